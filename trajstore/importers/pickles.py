"""Owns decoding pickles and torch.save archives into plain values; runs no code of theirs, loads no torch.

A pickle is a program. This one may build lists, dicts, numbers and text, and may name only the globals of
`_ALLOWED`, each of which is a function or class of this module, or a container that does nothing when called:
numpy arrays and torch tensors become numpy arrays, objects of frameworks become `Opaque` or plain dicts.
Nothing here can be given attributes by a pickle (`_Call`, and types without an instance dict).
Any other global is refused before it is looked up, so nothing of it is imported and nothing runs.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import ImportFormatError
from trajstore.importers.opcodes import check_claims

Array = NDArray[Any]
Buffer = memoryview | bytes

_BF16 = "bfloat16"
_DTYPES = {
    "Byte": "u1", "Char": "i1", "Short": "i2", "Int": "i4", "Long": "i8", "Bool": "?",
    "Half": "f2", "Float": "f4", "Double": "f8", "BFloat16": _BF16,
}  # fmt: skip
_TORCH = {
    "uint8": "u1", "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "bool": "?",
    "float16": "f2", "float32": "f4", "float64": "f8", "bfloat16": _BF16,
}  # fmt: skip
_NUMPY_KINDS = "biuf"
_EXPANDED = 1 << 26  # elements of a tensor that repeats its storage, as torch's expand makes them


class Opaque:
    """An object of a class that is not here: what it was made from, and the state it was given."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Nested(list[Any]):
    """Rows of a jagged tensor, each a numpy array."""


class _DType:
    """A numpy dtype by its text; never a real one before it is checked."""

    def __init__(self, text: Any, *_: Any) -> None:
        self.text = text if isinstance(text, str) else ""
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if isinstance(state[1], str) and state[1] in "<>=|" else "="

    @property
    def is_object(self) -> bool:
        """Whether its arrays hold Python values."""
        return self.text in ("O", "O8", "object")

    def real(self) -> np.dtype[Any]:
        """The dtype of numbers or fixed-length text."""
        kind = self.text.lstrip("<>=|")[:1]
        if kind not in (*_NUMPY_KINDS, "U", "S") or len(self.text) > 12:
            raise pickle.UnpicklingError(f"numpy dtype {self.text!r} is not read")
        return np.dtype(self.text).newbyteorder(self.order if self.order in "<>" else "=")  # type: ignore[arg-type]


class _Array(np.ndarray[Any, Any]):
    """What `_reconstruct` makes: numpy's own array, whose state is checked before numpy sees it."""

    def __setstate__(self, state: Any) -> None:
        version, shape, dtype, fortran, data = state
        made = _array(data, dtype, shape, "F" if fortran else "C")
        kept = made.reshape(-1, order="A").tolist() if dtype.is_object else made.tobytes("A")
        # numpy's stub asks for its own bool, the code for Python's
        super().__setstate__((version, made.shape, made.dtype, bool(fortran), kept))  # type: ignore[arg-type]


def _reconstruct(*_: Any) -> _Array:
    return np.empty(0, np.int8).view(_Array)


def _array(data: Any, dtype: Any, shape: Any, order: str = "C") -> Any:
    sizes = _shape(shape)
    layout: Literal["C", "F"] = "F" if order == "F" else "C"
    if dtype.is_object:
        if not isinstance(data, list) or len(data) != math.prod(sizes):
            raise pickle.UnpicklingError("an object array does not hold as many values as it says")
        out = np.empty(len(data), object)
        for index, value in enumerate(data):
            out[index] = value
        return out.reshape(sizes, order=layout)
    real = dtype.real()
    if isinstance(data, str):  # protocol 2 keeps bytes as Latin-1 text
        data = data.encode("latin1")
    if real.itemsize * math.prod(sizes) != len(data):
        raise pickle.UnpicklingError("an array does not hold as many bytes as it says")
    return np.frombuffer(data, real).reshape(sizes, order=layout)


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(sizes) > 16 or not all(isinstance(n, int) and 0 <= n < 1 << 40 for n in sizes):
        raise pickle.UnpicklingError(f"shape {sizes[:8]} is not read")
    return sizes


def _scalar(dtype: _DType, data: Any = None) -> Any:
    return _array(data, dtype, (1,))[0].item()


def _frombuffer(data: Any, dtype: _DType, shape: Any, order: str) -> Any:
    return _array(data, dtype, shape, order)


def _bytes(value: Any = b"", encoding: str = "latin1") -> bytes:
    """bytearray(...) and _codecs.encode(...); a number, which would be that many zero bytes, is refused."""
    if isinstance(value, str):
        return value.encode("latin1")
    if not isinstance(value, bytes):
        raise pickle.UnpicklingError("bytes made from something else than bytes")
    return value


class _Storage:
    """Bytes of one tensor storage; `dtype` as in _DTYPES."""

    def __init__(self, dtype: str, data: Buffer) -> None:
        size = 2 if dtype == _BF16 else np.dtype(dtype).itemsize
        if len(data) % size:
            raise pickle.UnpicklingError("a storage does not hold whole numbers")
        flat = np.frombuffer(data, np.uint16 if dtype == _BF16 else dtype)
        self.values: Array = widened(flat) if dtype == _BF16 else flat


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 given as its 16 bits, as float32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Any:
    values = storage.values
    shape, steps = _shape(size), _shape(stride)
    if len(shape) != len(steps) or not isinstance(offset, int) or offset < 0:
        raise pickle.UnpicklingError("a tensor's size and stride do not match")
    if 0 in shape:
        return np.empty(shape, values.dtype)
    last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    if last >= len(values) or math.prod(shape) > max(len(values), _EXPANDED):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    view = values[offset:]
    return np.lib.stride_tricks.as_strided(view, shape, [s * values.itemsize for s in steps], writeable=False)


def _from_type(build: Any, _kind: Any, args: Any, _state: Any) -> Any:
    if not isinstance(build, _Call):
        raise pickle.UnpicklingError("a tensor is rebuilt by something that is no function")
    return build(*args)


def _rebuild_njt(state: Any, *_: Any) -> Nested:
    values, offsets, lengths = state["values"], state["offsets"], state.get("lengths")
    return jagged(values, offsets, lengths)


def jagged(values: Array, offsets: Array, lengths: Array | None) -> Nested:
    """Rows `values[offsets[i] : offsets[i] + lengths[i]]`; without lengths, up to the next offset."""
    starts = np.asarray(offsets).tolist()
    if lengths is None:
        ends = starts[1:]
    else:
        ends = [s + n for s, n in zip(starts, np.asarray(lengths).tolist(), strict=False)]
    if any(not 0 <= s <= e <= len(values) for s, e in zip(starts, ends, strict=False)):
        raise pickle.UnpicklingError("a nested tensor reaches beyond its values")
    return Nested(values[s:e] for s, e in zip(starts, ends, strict=False))


def _make_td(_kind: Any, state: Any) -> Any:
    return state.get("_tensordict", state)


def _consolidated(metadata: Any, storage: Any) -> dict[str, Any]:
    """tensordict's consolidated form: every leaf is a range of bytes of one storage."""
    raw: dict[str, Array] = {}
    for key, leaf in metadata["leaves"].items():
        name, shape, start, stop = leaf[:4]
        dtype, sizes = _TORCH[str(name).removeprefix("torch.")], _shape(shape)
        data = storage[start:stop].tobytes()
        flat = _Storage(dtype, data).values
        count = math.prod(sizes)
        if count > len(flat):
            raise pickle.UnpicklingError("a tensor reaches beyond its storage")
        raw[key] = flat[:count].reshape(sizes)
    out: dict[str, Any] = {key: values for key, values in raw.items() if not key.startswith("<NJT")}
    for key in list(raw):
        if key.startswith("<NJT_VALUES>"):
            name = key.removeprefix("<NJT_VALUES>")
            out[name] = jagged(raw[key], raw[f"<NJT_OFFSETS>{name}"], raw.get(f"<NJT_LENGTHS>{name}"))
    return out


class _Call:
    """A function as pickles see it: they can call it, and cannot set attributes of it."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it gives a state to a function")


def _second(_kind: Any, state: Any) -> Any:
    return state


_NESTED = "torch.nested._internal.nested_tensor"
_STORAGES = {("torch", f"{name}Storage"): dtype for name, dtype in _DTYPES.items()}
_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Call(dict),  # a plain one, which has no attributes to set
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
    ("builtins", "bytearray"): _Call(_bytes),
    ("builtins", "bytes"): _Call(_bytes),
    ("__builtin__", "bytes"): _Call(_bytes),
    ("_codecs", "encode"): _Call(_bytes),
    ("numpy", "ndarray"): Opaque,
    ("numpy", "dtype"): _DType,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Call(_reconstruct) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Call(_scalar) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Call(_frombuffer) for core in ("core", "_core")},
    ("torch", "Size"): _Call(tuple),
    ("torch", "device"): Opaque,
    ("torch", "Tensor"): Opaque,
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_tensor),
    ("torch._tensor", "_rebuild_from_type_v2"): _Call(_from_type),
    (_NESTED, "NestedTensor"): Opaque,
    (_NESTED, "_rebuild_njt"): _Call(_rebuild_njt),
    ("torch._dynamo.decorators", "_DimRange"): Opaque,
    ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"): _Call(_consolidated),
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
        self._made: dict[str, _Storage] = {}

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
            self._made[key] = _Storage(dtype, self._storages(key))
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
    return _load(path, data, None)


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

    return _load(path, member(names[0]), lambda key: member(f"{folder}data/{key}"))


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


def _load(path: Path, data: Buffer, storages: Callable[[str], Buffer] | None) -> Any:
    try:
        check_claims(data)
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
