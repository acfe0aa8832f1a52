"""Owns decoding pickles and torch.save archives into plain values; runs no code of theirs, loads no torch.

A pickle is a program. This one may build lists, dicts, numbers and text, and may name only the globals of
`_ALLOWED`, each of which is a function or class of this module or of `rebuilt` that does nothing but make a
value: arrays and torch tensors become numpy arrays, objects of frameworks become `Opaque` or plain dicts.
Nothing here can be given attributes by a pickle (`_Call`, and types without an instance dict).
Any other global is refused before it is looked up, so nothing of it is imported and nothing runs.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from trajstore.errors import ImportFormatError
from trajstore.importers.opcodes import check_claims
from trajstore.importers.rebuilt import (
    DTYPES,
    Buffer,
    DType,
    Storage,
    consolidated,
    copied,
    frombuffer,
    metered,
    rebuild_njt,
    reconstruct,
    scalar,
    tensor,
    to_bytes,
)  # fmt: skip


class Opaque:
    """An object of a class that is not here: what it was made from, and the state it was given."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _make_td(_kind: Any, state: Any) -> Any:
    return state.get("_tensordict", state)


class _Call:
    """A function as pickles see it: they can call it, and cannot set attributes of it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it gives a state to a function")


def _from_type(build: Any, _kind: Any, args: Any, _state: Any) -> Any:
    if not isinstance(build, _Call):
        raise pickle.UnpicklingError("a tensor is rebuilt by something that is no function")
    return build(*args)


def _second(_kind: Any, state: Any) -> Any:
    return state


_NESTED = "torch.nested._internal.nested_tensor"
_STORAGES = {("torch", f"{name}Storage"): dtype for name, dtype in DTYPES.items()}
_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Call(copied(dict)),  # a plain one, which has no attributes to set
    ("builtins", "set"): _Call(copied(set)),
    ("__builtin__", "set"): _Call(copied(set)),
    ("builtins", "frozenset"): _Call(copied(frozenset)),
    ("builtins", "slice"): slice,
    ("builtins", "bytearray"): _Call(to_bytes),
    ("builtins", "bytes"): _Call(to_bytes),
    ("__builtin__", "bytes"): _Call(to_bytes),
    ("_codecs", "encode"): _Call(to_bytes),
    ("numpy", "ndarray"): Opaque,
    ("numpy", "dtype"): DType,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Call(reconstruct) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Call(scalar) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Call(frombuffer) for core in ("core", "_core")},
    ("torch", "Size"): _Call(copied(tuple)),
    ("torch", "device"): Opaque,
    ("torch", "Tensor"): Opaque,
    ("torch._utils", "_rebuild_tensor_v2"): _Call(tensor),
    ("torch._tensor", "_rebuild_from_type_v2"): _Call(_from_type),
    (_NESTED, "NestedTensor"): Opaque,
    (_NESTED, "_rebuild_njt"): _Call(rebuild_njt),
    ("torch._dynamo.decorators", "_DimRange"): Opaque,
    ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"): _Call(consolidated),
    ("tensordict._reductions", "_make_td"): _Call(_make_td),
    ("tensordict._td", "TensorDict"): Opaque,
    ("verl.protocol", "DataProto"): Opaque,
    ("skyrl.backends.skyrl_train.training_batch", "_rebuild_tensor_batch"): _Call(_second),
    ("skyrl.backends.skyrl_train.training_batch", "TrainingInputBatch"): Opaque,
    ("nemo_rl.distributed.batched_data_dict", "BatchedDataDict"): Opaque,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, storages: Callable[[str], Buffer] | None = None) -> None:
        super().__init__(file)
        self._storages = storages
        self._made: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = (module, name)
        if found in _STORAGES:
            return _STORAGES[found]
        if found not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is not on the list of what is read"
            )
        return _ALLOWED[found]

    def persistent_load(self, pid: Any) -> Any:
        if self._storages is None or not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise pickle.UnpicklingError("it refers to something outside the file")
        _, dtype, key, _, _ = pid
        if not isinstance(dtype, str) or not isinstance(key, str):
            raise pickle.UnpicklingError("it refers to a storage of no known type")
        if key not in self._made:
            self._made[key] = Storage(dtype, self._storages(key))
        return self._made[key]


_FAULTS = (
    pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError,
    ValueError, MemoryError, OverflowError, RecursionError, AssertionError, struct.error,
)  # fmt: skip


def load_pickle(path: Path, data: Buffer) -> Any:
    """The value of a pickle.

    Raises:
        ImportFormatError: it names anything that is not on the list, or is damaged. Nothing of it has run.
    """
    return _load(path, data, len(data), None)


def load_torch(path: Path, data: Buffer) -> Any:
    """The value that `torch.save` wrote; tensors are read-only numpy arrays over `data`.

    Raises:
        ImportFormatError: as load_pickle; also an archive that is compressed, whose members lie outside it
            or overlap, or the form torch wrote before 1.6.
    """
    if bytes(data[:4]) != b"PK\x03\x04":
        raise ImportFormatError(
            f"{path}: not a torch archive", hint="save it again with torch.save of torch 1.6 or newer"
        )
    try:
        archive = zipfile.ZipFile(io.BufferedReader(_View(data)))
        members = {info.filename: info for info in archive.infolist()}
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, struct.error) as error:
        _refuse(path, f"its archive is damaged ({error})")
    _check_members(path, members.values(), len(data))
    names = [name for name in members if name.endswith("/data.pkl") or name == "data.pkl"]
    if len(names) != 1:
        _refuse(path, f"it holds {len(names)} pickles, expected one")
    folder = names[0].removesuffix("data.pkl")
    big_endian = members.get(f"{folder}byteorder")
    if big_endian is not None and archive.read(big_endian) != b"little":
        _refuse(path, "its numbers are big-endian")

    def member(name: str) -> Buffer:
        if name not in members:
            raise pickle.UnpicklingError(f"it refers to {name!r}, which the archive lacks")
        info = members[name]
        fixed = bytes(data[info.header_offset : info.header_offset + 30])
        if len(fixed) < 30 or fixed[:4] != b"PK\x03\x04":
            raise pickle.UnpicklingError(f"the archive's entry {name!r} is not where it says")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", fixed[26:30]))
        if start + info.file_size > len(data):
            raise pickle.UnpicklingError(f"the archive's entry {name!r} is longer than the file")
        return memoryview(data)[start : start + info.file_size]

    return _load(path, member(names[0]), len(data), lambda key: member(f"{folder}data/{key}"))


def _check_members(path: Path, members: Any, size: int) -> None:
    total = 0
    for info in members:
        parts = PurePosixPath(info.filename.replace("\\", "/")).parts
        if ".." in parts or info.filename.startswith(("/", "\\")):
            _refuse(path, f"its entry {info.filename[:60]!r} leaves the archive")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            _refuse(path, f"its entry {info.filename[:60]!r} is compressed, which torch.save never does")
        total += info.file_size
    if total > size:
        _refuse(path, f"its entries claim {total:,} bytes, and the file has {size:,}")


def _load(path: Path, data: Buffer, whole: int, storages: Callable[[str], Buffer] | None) -> Any:
    """The value of a pickle that is `data` of a file of `whole` bytes."""
    try:
        check_claims(data)
        with metered(whole):
            return _Unpickler(io.BufferedReader(_View(data), 1 << 16), storages).load()
    except _FAULTS as error:
        _refuse(path, str(error) or type(error).__name__, error)


def _refuse(path: Path, reason: str, error: BaseException | None = None) -> NoReturn:
    raise ImportFormatError(
        f"{path}: refused: {reason}",
        hint="only plain values, arrays and tensors of known dumps are read; save those alone",
    ) from error


class _View(io.RawIOBase):
    """Bytes in memory as a file; nothing is copied but what is asked for."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        taken = self._data[self._at : self._at + len(into)]
        into[: len(taken)] = taken
        self._at += len(taken)
        return len(taken)
