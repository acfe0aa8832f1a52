"""Owns the way from rows of numbers (lists, arrays, tensors) to one flat numpy buffer; knows no columns' meaning.

No Python code runs per value on the good path: lists go through `struct.pack` (about half the time of
`array.fromlist` or `pa.array`) or `bytes`, numpy rows through one `concatenate`, torch rows through one
`cat`. Only when a conversion fails does a slow path walk the rows, to name the value at fault.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
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
        return _within(_pack("i", rows, size, self), 0, 2**31 - 1)

    def from_numeric(self, values: NDArray[Any]) -> NDArray[Any]:
        if values.dtype.kind not in "iu":
            raise TypeError
        return _within(values, 0, 2**31 - 1).astype(np.int32, copy=False)

    def fault(self, value: Any) -> str | None:
        if isinstance(value, float) or not hasattr(value, "__index__"):
            return "is not an integer"
        return None if 0 <= value < 2**31 else "is outside 0..2147483647"


class _Mask:
    name = "0 or 1"
    dtype = np.dtype(np.int8)

    def from_lists(self, rows: list[list[Any]], size: int) -> NDArray[Any]:
        return _within(np.frombuffer(b"".join(map(bytes, rows)), np.uint8), 0, 1).view(np.int8)

    def from_numeric(self, values: NDArray[Any]) -> NDArray[Any]:
        mask = values.astype(np.int8) if values.dtype.kind in "biu" else values == 1
        if values.dtype.kind not in "biuf" or not ((values == 0) | (values == 1)).all():
            raise ValueError
        return mask.view(np.int8)

    def fault(self, value: Any) -> str | None:
        return None if value in (0, 1) else "is neither 0 nor 1"


class _Floats:
    name = "a number that fits float32"
    dtype = np.dtype(np.float32)

    def from_lists(self, rows: list[list[Any]], size: int) -> NDArray[Any]:
        return _pack("f", rows, size, self)

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
        try:
            number = float(value)
        except (TypeError, ValueError):
            return "is not a number"
        if isinstance(value, str):
            return "is not a number"
        return "is outside float32" if math.isfinite(number) and abs(number) >= _FLOAT32_OVERFLOWS else None


# Half a unit in the last place above the largest float32: from here on rounding gives infinity.
_FLOAT32_OVERFLOWS = (2.0 - 2.0**-24) * 2.0**127

IDS: Kind = _Ids()
MASK: Kind = _Mask()
FLOATS: Kind = _Floats()


def flatten(
    rows: Sequence[Any], kind: Kind, column: str, ids: Sequence[str], nulls: Nulls = "error"
) -> Flat:
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
    if not lengths.any():
        return Flat(np.empty(0, kind.dtype), lengths)
    filled = rows if lengths.all() else list(compress(rows, lengths))
    try:
        return Flat(_convert(filled, kind, int(lengths.sum())), lengths)
    except (TypeError, ValueError, OverflowError, struct.error):
        if nulls == "nan" and kind is FLOATS:
            mended = [[math.nan if v is None else v for v in _listed(row)] for row in rows]
            return flatten(mended, kind, column, ids)
        raise _fault(rows, kind, column, ids) from None


def _lengths(rows: Sequence[Any]) -> NDArray[np.int64]:
    # len() of a tensor runs Python code and costs a microsecond, numel() does not.
    try:
        sizes = map(methodcaller("numel"), rows) if rows and _is_tensor(type(rows[0])) else map(len, rows)
        return np.fromiter(sizes, np.int64, len(rows))
    except AttributeError:  # tensors beside lists
        return np.fromiter(map(len, rows), np.int64, len(rows))


def _convert(rows: Sequence[Any], kind: Kind, size: int) -> NDArray[Any]:
    types = set(map(type, rows))
    if types <= {list}:
        return kind.from_lists(rows, size)  # type: ignore[arg-type]  # every row is a list
    if types == {np.ndarray}:
        return _join(list(rows), kind, size)
    if all(_is_tensor(t) for t in types):
        return kind.from_numeric(_cat(list(rows), kind, size))
    if len(types) > 1 and (np.ndarray in types or any(map(_is_tensor, types))):
        return np.concatenate([_convert([row], kind, len(row)) for row in rows])
    return kind.from_lists([_listed(row) for row in rows], size)


def _room(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Uninitialised memory from Arrow's pool, which keeps its pages: fresh ones cost more than the copy."""
    return np.frombuffer(pa.allocate_buffer(size * dtype.itemsize), dtype)


def _join(rows: list[NDArray[Any]], kind: Kind, size: int) -> NDArray[Any]:
    try:
        flat = np.concatenate(rows, out=_room(size, kind.dtype), casting="equiv")
    except (TypeError, ValueError):
        if len(set(map(attrgetter("dtype"), rows))) == 1:
            flat = np.concatenate(rows)
        else:  # mixed dtypes are converted row by row: numpy would promote int64 and uint64 to float64
            return np.concatenate([_join([row], kind, len(row)) for row in rows])
    if flat.ndim != 1:
        raise ValueError
    return kind.from_numeric(flat)


def _cat(rows: list[Any], kind: Kind, size: int) -> NDArray[Any]:
    # A tensor exists, so its module is loaded: the codec itself never imports torch.
    torch = sys.modules["torch"]
    out = None
    if set(map(attrgetter("dtype"), rows)) == {getattr(torch, kind.dtype.name)}:
        out = torch.from_numpy(_room(size, kind.dtype))
    try:
        flat = torch.cat(rows, out=out)
    except RuntimeError:  # rows on a device, with gradients, or of different dimensions
        if any(row.dim() != 1 for row in rows):
            raise ValueError from None
        flat = torch.cat([row.detach().cpu() for row in rows])
    flat = flat.detach().cpu()
    if flat.dim() != 1:
        raise ValueError
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.to(torch.float32)
    return flat.numpy()  # type: ignore[no-any-return]  # torch is reached without its types


def _pack(code: str, rows: list[list[Any]], size: int, kind: Kind) -> NDArray[Any]:
    out = _room(size, kind.dtype)
    compiled, width, at = struct.Struct, kind.dtype.itemsize, 0
    for row in rows:
        compiled(f"{len(row)}{code}").pack_into(out, at, *row)
        at += len(row) * width
    return out


def _is_tensor(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch" and hasattr(kind, "detach")


def _listed(row: Any) -> list[Any]:
    if isinstance(row, (str, bytes, dict, set)):
        raise TypeError
    return row.tolist() if hasattr(row, "tolist") else list(row)


def _sized(rows: Sequence[Any], column: str, ids: Sequence[str]) -> list[Any]:
    sized = []
    for i, row in enumerate(rows):
        if row is None:
            row = []
        if not hasattr(row, "__len__") or getattr(row, "ndim", 1) == 0:
            raise ValidationError(
                f"found {row!r}, expected a list, a numpy array or a torch tensor",
                row=i,
                id=ids[i],
                column=column,
            )
        sized.append(row)
    return sized


def _fault(rows: Sequence[Any], kind: Kind, column: str, ids: Sequence[str]) -> ValidationError:
    for i, row in enumerate(rows):

        def error(reason: str, hint: str | None = None, i: int = i) -> ValidationError:
            return ValidationError(reason, row=i, id=ids[i], column=column, hint=hint)

        if getattr(row, "ndim", 1) != 1:
            return error(f"found shape {tuple(row.shape)}, expected one dimension", "flatten or squeeze it")
        if isinstance(row, (str, bytes, dict, set)):
            return error(f"found {type(row).__name__}, expected a list of numbers")
        for index, value in enumerate(_listed(row)):
            if value is None:
                hint = 'give the value, or pass nulls="nan" to store NaN' if kind is FLOATS else None
                return error(f"found None at index {index}, expected {kind.name}", hint)
            wrong = kind.fault(value)
            if wrong is not None:
                return error(f"{value!r} at index {index} {wrong}, expected {kind.name}")
    return ValidationError(f"its rows mix types that do not join, expected {kind.name}", column=column)


def _within(values: NDArray[Any], low: int, high: int) -> NDArray[Any]:
    if values.size and (values.min() < low or values.max() > high):
        raise OverflowError
    return values

