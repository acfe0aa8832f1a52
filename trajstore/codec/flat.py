"""Owns rows of numbers (lists, arrays, tensors) → one flat numpy buffer; knows no column's meaning.

No Python code runs per value on the good path: lists go through `struct.pack` (about half the time of
`array.fromlist` or `pa.array`) or `bytes`, numpy rows through one `concatenate`, torch rows through one
`cat`. Only when a conversion fails does a slow path walk the rows, to name the value at fault.
"""

from __future__ import annotations

import math
import struct
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from numbers import Integral, Real
from operator import attrgetter, methodcaller
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import ValidationError

Nulls = Literal["error", "nan"]


@dataclass(frozen=True)
class Flat:
    """Ragged rows: `values` holds row after row, `lengths` [N] int64 says how long each is."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each row begins in `values`, [N] int64."""
        return np.cumsum(self.lengths) - self.lengths


class Kind(Protocol):
    """How one element type is checked and converted."""

    name: str
    dtype: np.dtype[Any]

    def from_lists(self, rows: list[list[Any]], size: int) -> NDArray[Any]:
        """One flat array; raises TypeError, ValueError or OverflowError when any value does not fit."""
        ...

    def from_numeric(self, values: NDArray[Any]) -> NDArray[Any]:
        """The same from an array of another dtype."""
        ...

    def fault(self, value: Any) -> str | None:
        """What is wrong with one Python value, or None."""
        ...


class _Ids:
    name = "a token id: an integer from 0 to 2147483647"
    dtype = np.dtype(np.int32)

    def from_lists(self, rows: list[list[Any]], size: int) -> NDArray[Any]:
        return _up_to(2**31 - 1, _pack("i", rows, size, self.dtype))

    def from_numeric(self, values: NDArray[Any]) -> NDArray[Any]:
        if values.dtype.kind not in "iu":
            raise TypeError
        return _up_to(2**31 - 1, values).astype(np.int32, copy=False)

    def fault(self, value: Any) -> str | None:
        if not _is_integer(value):
            return "is not an integer"
        return None if 0 <= value < 2**31 else "is outside 0..2147483647"


class _Mask:
    name = "0 or 1"
    dtype = np.dtype(np.int8)

    def from_lists(self, rows: list[list[Any]], size: int) -> NDArray[Any]:
        try:
            joined = b"".join(map(bytes, rows))
        except TypeError:  # masks of 0.0 and 1.0, as trainers keep them
            return self.from_numeric(_pack("d", rows, size, np.dtype(np.float64)))
        return _up_to(1, np.frombuffer(joined, np.uint8)).view(np.int8)

    def from_numeric(self, values: NDArray[Any]) -> NDArray[Any]:
        if values.dtype.kind == "f":
            ones: NDArray[np.bool_] = values == 1
            if not (ones | (values == 0)).all():
                raise ValueError
            return ones.view(np.int8)
        if values.dtype.kind not in "biu":
            raise TypeError
        mask = values.view(np.uint8) if values.dtype.kind == "b" else _up_to(1, values)
        return mask.astype(np.int8, copy=False)

    def fault(self, value: Any) -> str | None:
        return None if _is_number(value) and value in (0, 1) else "is neither 0 nor 1"


class _Floats:
    name = "a number that fits float32"
    dtype = np.dtype(np.float32)

    def from_lists(self, rows: list[list[Any]], size: int) -> NDArray[Any]:
        narrow = _pack("f", rows, size, self.dtype)
        if np.isinf(narrow).any():  # given so, or made so: struct narrows 1e300 to infinity silently
            self.from_numeric(_pack("d", rows, size, np.dtype(np.float64)))
        return narrow

    def from_numeric(self, values: NDArray[Any]) -> NDArray[Any]:
        if values.dtype.kind not in "iuf":
            raise TypeError
        if values.dtype.itemsize <= 4 and values.dtype.kind == "f":
            return values.astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        if (np.isinf(narrow) & np.isfinite(values)).any():
            raise OverflowError
        return narrow

    def fault(self, value: Any) -> str | None:
        if not _is_number(value):
            return "is not a number"
        return "is outside float32" if abs(value) >= _FLOAT32_OVERFLOWS and abs(value) != math.inf else None


# Half a unit in the last place above the largest float32: from here on rounding gives infinity.
_FLOAT32_OVERFLOWS = (2.0 - 2.0**-24) * 2.0**127

IDS: Kind = _Ids()
MASK: Kind = _Mask()
FLOATS: Kind = _Floats()


def flatten(rows: Sequence[Any], kind: Kind, column: str, ids: Sequence[str], nulls: Nulls = "error") -> Flat:
    """One flat buffer from rows of lists, numpy arrays or torch tensors; None is an empty row.

    Args:
        rows: N rows, each a list, tuple, 1-d numpy array or 1-d torch tensor (any device or dtype).
        kind: IDS (int32), MASK (int8) or FLOATS (float32).
        column: for messages.
        ids: N trajectory ids, for messages.
        nulls: "nan" turns None inside a float row into NaN; otherwise it is an error.

    Raises:
        ValidationError: a value does not fit, naming row, column, index, value and what was expected.
    """
    try:
        lengths = _lengths(rows)
    except TypeError:
        rows = _sized(rows, column, ids)
        lengths = _lengths(rows)
    size = int(lengths.sum())
    if not size:
        return Flat(np.empty(0, kind.dtype), lengths)
    filled = rows if lengths.all() else list(compress(rows, lengths))
    try:
        return Flat(_convert(filled, kind, lengths[lengths > 0]), lengths)
    except _UNFIT:
        if nulls == "nan" and kind is FLOATS:
            mended = [_mended(row) for row in rows]
            return flatten(mended, kind, column, ids)
        raise _fault(rows, kind, column, ids) from None


_UNFIT = (TypeError, ValueError, OverflowError, struct.error)


def _lengths(rows: Sequence[Any]) -> NDArray[np.int64]:
    # len() of a tensor runs Python code and costs a microsecond, numel() does not.
    try:
        sizes = map(methodcaller("numel"), rows) if rows and _is_tensor(type(rows[0])) else map(len, rows)
        return np.fromiter(sizes, np.int64, len(rows))
    except AttributeError:  # tensors beside lists
        return np.fromiter(map(len, rows), np.int64, len(rows))


def _convert(rows: Sequence[Any], kind: Kind, lengths: NDArray[np.int64]) -> NDArray[Any]:
    """The flat values of rows none of which is empty."""
    size = int(lengths.sum())
    types = set(map(type, rows))
    if types == {list}:
        return kind.from_lists(list(rows), size)
    if types == {np.ndarray}:
        return _join(list(rows), kind, size)
    if all(map(_is_tensor, types)):
        return kind.from_numeric(_cat(list(rows), kind, lengths))
    if len(types) > 1 and (np.ndarray in types or any(map(_is_tensor, types))):
        return np.concatenate([_convert([row], kind, np.array([len(row)])) for row in rows])
    return kind.from_lists([_listed(row) for row in rows], size)


def _room(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Uninitialised memory from Arrow's pool, which keeps its pages: fresh ones cost more than the copy."""
    return np.frombuffer(pa.allocate_buffer(size * dtype.itemsize), dtype)


def _pack(code: str, rows: list[list[Any]], size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    out = _room(size, dtype)
    target, compiled, at = memoryview(out.data).cast("B"), struct.Struct, 0
    for row in rows:
        packed = compiled(f"{len(row)}{code}").pack(*row)  # a copy, yet faster than pack_into
        target[at : at + len(packed)] = packed
        at += len(packed)
    return out


def _join(rows: list[NDArray[Any]], kind: Kind, size: int) -> NDArray[Any]:
    try:
        return kind.from_numeric(np.concatenate(rows, out=_room(size, kind.dtype), casting="equiv"))
    except TypeError:  # another dtype than the column's
        pass
    if len(set(map(attrgetter("dtype"), rows))) > 1:
        # Mixed dtypes are converted row by row: numpy would promote int64 and uint64 to float64.
        return np.concatenate([_join([row], kind, len(row)) for row in rows])
    flat = np.concatenate(rows)
    if flat.ndim != 1:
        raise ValueError
    return kind.from_lists([flat.tolist()], size) if flat.dtype.kind == "O" else kind.from_numeric(flat)


def _cat(rows: list[Any], kind: Kind, lengths: NDArray[np.int64]) -> NDArray[Any]:
    # A tensor exists, so its module is loaded: the codec itself never imports torch.
    torch = sys.modules["torch"]
    if set(map(attrgetter("dtype"), rows)) == {getattr(torch, kind.dtype.name)}:
        ends = np.cumsum(lengths).tolist()
        out = _room(ends[-1], kind.dtype)
        try:
            _cat_blocks(torch, rows, ends, torch.from_numpy(out))
            return out
        except RuntimeError:  # rows on a device, with gradients, or of more dimensions
            pass
    if set(map(attrgetter("ndim"), rows)) != {1}:
        raise ValueError
    flat = torch.cat([row.detach().cpu() for row in rows])
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.to(torch.float32)
    return flat.numpy()  # type: ignore[no-any-return]  # torch is reached without its types


_TORCH_GRAIN = 32_768
"""From so many values on torch wakes its threads, which costs more processor time than the copy itself."""


def _cat_blocks(torch: Any, rows: list[Any], ends: list[int], out: Any) -> None:
    """Joins rows, which end at `ends`, in `out` [ends[-1]]; RuntimeError when it cannot."""
    cuts, sizes, at = [0], [], 0
    while cuts[-1] < len(rows):
        cuts.append(max(cuts[-1] + 1, bisect_left(ends, at + _TORCH_GRAIN)))
        sizes.append(ends[cuts[-1] - 1] - at)
        at += sizes[-1]
    for (first, last), block in zip(pairwise(cuts), out.split(sizes), strict=True):
        if rows[first].ndim != 1:  # torch itself refuses rows that differ in it, and would resize `out`
            raise RuntimeError
        torch.cat(rows[first:last], out=block)


def _is_tensor(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch" and hasattr(kind, "detach")


def _listed(row: Any) -> list[Any]:
    if isinstance(row, (str, bytes, dict, set)):
        raise TypeError
    return row.tolist() if hasattr(row, "tolist") else list(row)


def _mended(row: Any) -> Any:
    """The row with NaN for None; one that is not a row of values as it is, for the error to name it."""
    if isinstance(row, (str, bytes, dict, set)) or getattr(row, "ndim", 1) != 1:
        return row
    return [math.nan if value is None else value for value in _listed(row)]


def _sized(rows: Sequence[Any], column: str, ids: Sequence[str]) -> list[Any]:
    sized = []
    for i, row in enumerate(rows):
        if row is None:
            row = []
        if not hasattr(row, "__len__") or getattr(row, "ndim", 1) == 0:
            raise ValidationError(
                f"found {shorten(row)}, expected a list, a numpy array or a torch tensor",
                row=i,
                id=ids[i],
                column=column,
            )
        sized.append(row)
    return sized


def _fault(rows: Sequence[Any], kind: Kind, column: str, ids: Sequence[str]) -> ValidationError:
    """The error that names the first value, or the first row, that cannot be converted."""
    for i, row in enumerate(rows):
        reason, hint = _row_fault(row, kind)
        if reason:
            return ValidationError(reason, row=i, id=ids[i], column=column, hint=hint)
    return ValidationError(f"its rows mix types that do not join, expected {kind.name}", column=column)


def _row_fault(row: Any, kind: Kind) -> tuple[str | None, str | None]:
    """What is wrong with a row and what to do about it."""
    if getattr(row, "ndim", 1) != 1:
        return f"found shape {tuple(row.shape)}, expected one dimension", "flatten or squeeze it"
    if isinstance(row, (str, bytes, dict, set)):
        return f"found {type(row).__name__}, expected a list of numbers", None
    for index, value in enumerate(_listed(row)):
        if value is None:
            hint = 'give the value, or pass nulls="nan" to store NaN' if kind is FLOATS else None
            return f"found None at index {index}, expected {kind.name}", hint
        wrong = kind.fault(value)
        if wrong is not None:
            return f"{shorten(value)} at index {index} {wrong}, expected {kind.name}", None
    try:
        if len(row):
            _convert([row], kind, np.array([len(row)]))
    except _UNFIT:
        return (
            f"found values of type {getattr(row, 'dtype', type(row[0]).__name__)}, expected {kind.name}",
            None,
        )
    return None, None


def shorten(value: Any) -> str:
    """A value as an error shows it: its repr, cut where it gets long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, np.bool_)


def _is_number(value: Any) -> bool:
    return isinstance(value, (Real, np.bool_))


def _up_to(high: int, values: NDArray[Any]) -> NDArray[Any]:
    """The integers themselves when all are in 0..high; one pass, for negative ones are huge as unsigned."""
    if values.size and values.view(f"u{values.dtype.itemsize}").max() > high:
        raise OverflowError
    return values
