"""Owns the arrays, tensors and containers that a pickle asks for; makes numpy arrays, knows no opcodes.

Sizes are checked before anything is made, and the bytes that are made are counted: a small pickle can name
one large text a million times, and have a copy made of it each time.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Buffer = memoryview | bytes

_BF16 = "bfloat16"
DTYPES = {
    "Byte": "u1", "Char": "i1", "Short": "i2", "Int": "i4", "Long": "i8", "Bool": "?",
    "Half": "f2", "Float": "f4", "Double": "f8", "BFloat16": _BF16,
}  # fmt: skip
_TORCH = {
    "uint8": "u1", "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "bool": "?",
    "float16": "f2", "float32": "f4", "float64": "f8", "bfloat16": _BF16,
}  # fmt: skip
_NUMPY_KINDS = "biuf"
_EXPANDED = 1 << 26  # elements of a tensor that repeats its storage, as torch's expand makes them
_FREE, _TIMES = 64 << 20, 8  # bytes that calls may make: so many, and so many times the file
_SLOT = 64  # of an entry of a dict or set
_ROW = 200  # bytes of a row's array that looks at a part of another

_LEFT: ContextVar[list[int]] = ContextVar("bytes that the calls of this pickle may still make")


def _charge(size: int) -> None:
    """Counts bytes that are made, not those that are named: a pickle can name one text a million times."""
    left = _LEFT.get()
    left[0] -= size
    if left[0] < 0:
        raise pickle.UnpicklingError("it makes many times its own size: it repeats its content")


@contextmanager
def metered(size: int) -> Iterator[None]:
    """Within the block, calls make no more bytes than 64 MiB and eight times a file of `size` bytes."""
    token = _LEFT.set([_FREE + _TIMES * size])
    try:
        yield
    finally:
        _LEFT.reset(token)


class Nested(list[Any]):
    """Rows of a jagged tensor, each a numpy array."""


class DType:
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
        order = self.order if self.order in "<>" else "="
        return np.dtype(self.text).newbyteorder(order)  # type: ignore[arg-type]  # the stub wants literals


class _Array(np.ndarray[Any, Any]):
    """What `reconstruct` makes: numpy's own array, whose state is checked before numpy sees it."""

    def __setstate__(self, state: Any) -> None:
        version, shape, dtype, fortran, data = state
        made = _array(data, dtype, shape, "F" if fortran else "C")
        _charge(2 * (8 * made.size if dtype.is_object else made.nbytes))  # numpy copies the copy
        kept = made.reshape(-1, order="A").tolist() if dtype.is_object else made.tobytes("A")
        # numpy's stub asks for its own bool, the code for Python's
        super().__setstate__((version, made.shape, made.dtype, bool(fortran), kept))  # type: ignore[arg-type]


def reconstruct(*_: Any) -> _Array:
    return np.empty(0, np.int8).view(_Array)


def _array(data: Any, dtype: Any, shape: Any, order: str = "C") -> Any:
    sizes = _shape(shape)
    layout: Literal["C", "F"] = "F" if order == "F" else "C"
    if dtype.is_object:
        if not isinstance(data, list) or len(data) != math.prod(sizes):
            raise pickle.UnpicklingError("an object array does not hold as many values as it says")
        _charge(8 * len(data))
        out = np.empty(len(data), object)
        for index, value in enumerate(data):
            out[index] = value
        return out.reshape(sizes, order=layout)
    real = dtype.real()
    if isinstance(data, str):  # protocol 2 keeps bytes as Latin-1 text
        _charge(len(data))
        data = data.encode("latin1")
    if real.itemsize * math.prod(sizes) != len(data):
        raise pickle.UnpicklingError("an array does not hold as many bytes as it says")
    return np.frombuffer(data, real).reshape(sizes, order=layout)


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(sizes) > 16 or not all(isinstance(n, int) and 0 <= n < 1 << 40 for n in sizes):
        raise pickle.UnpicklingError(f"shape {sizes[:8]} is not read")
    return sizes


def scalar(dtype: DType, data: Any = None) -> Any:
    return _array(data, dtype, (1,))[0].item()


def frombuffer(data: Any, dtype: DType, shape: Any, order: str) -> Any:
    return _array(data, dtype, shape, order)


def to_bytes(value: Any = b"", encoding: str = "latin1") -> bytes:
    """bytearray(...) and _codecs.encode(...); a number, which would be that many zero bytes, is refused."""
    if isinstance(value, str):
        _charge(len(value))
        return value.encode("latin1")
    if not isinstance(value, bytes):
        raise pickle.UnpicklingError("bytes made from something else than bytes")
    return value


class Storage:
    """Bytes of one tensor storage; `dtype` as in DTYPES."""

    def __init__(self, dtype: str, data: Buffer) -> None:
        size = 2 if dtype == _BF16 else np.dtype(dtype).itemsize
        if len(data) % size:
            raise pickle.UnpicklingError("a storage does not hold whole numbers")
        flat = np.frombuffer(data, np.uint16 if dtype == _BF16 else dtype)
        if dtype == _BF16:
            _charge(4 * len(flat))
        self.values: Array = widened(flat) if dtype == _BF16 else flat


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 given as its 16 bits, as float32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Any:
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


def rebuild_njt(state: Any, *_: Any) -> Nested:
    values, offsets, lengths = state["values"], state["offsets"], state.get("lengths")
    return jagged(values, offsets, lengths)


def jagged(values: Array, offsets: Array, lengths: Array | None) -> Nested:
    """Rows `values[offsets[i] : offsets[i] + lengths[i]]`; without lengths, up to the next offset."""
    _charge(_ROW * np.asarray(offsets).size)
    starts = np.asarray(offsets).tolist()
    if lengths is None:
        ends = starts[1:]
    else:
        ends = [s + n for s, n in zip(starts, np.asarray(lengths).tolist(), strict=False)]
    if any(not 0 <= s <= e <= len(values) for s, e in zip(starts, ends, strict=False)):
        raise pickle.UnpicklingError("a nested tensor reaches beyond its values")
    return Nested(values[s:e] for s, e in zip(starts, ends, strict=False))


def copied(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    """A container out of another one."""

    def make(values: Any = ()) -> Any:
        _charge(_SLOT * len(values))
        return kind(values)

    return make


def consolidated(metadata: Any, storage: Any) -> dict[str, Any]:
    """tensordict's consolidated form: every leaf is a range of bytes of one storage."""
    raw: dict[str, Array] = {}
    for key, leaf in metadata["leaves"].items():
        name, shape, start, stop = leaf[:4]
        dtype, sizes = _TORCH[str(name).removeprefix("torch.")], _shape(shape)
        part = storage[start:stop]
        _charge(part.nbytes)
        data = part.tobytes()
        flat = Storage(dtype, data).values
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
