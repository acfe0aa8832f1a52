"""Owns Ragged, a list column as an address and a length per row; knows no batch, no store and no tensors.

Axis letter: N rows of a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import CorruptFileError, InputError, ValidationError

Int64s = NDArray[np.int64]


class Ragged:
    """A list column as addresses: row i is `chunks[chunk[i]][start[i] : start[i] + length[i]]`.

    Never changed once made. A column taken out of another one gathers each of its arrays when it is first
    asked for: of the columns of a batch, C reads `address` and nothing else.

    Attributes:
        chunks: flat value arrays of one dtype, which Arrow or a mapped file owns and nobody writes to.
        chunk, start, length: [N] int64 each; a length of -1 is a null row.
    """

    def __init__(
        self, chunks: tuple[NDArray[Any], ...], chunk: Int64s, start: Int64s, length: Int64s
    ) -> None:
        self.chunks = chunks
        self.chunk, self.start, self.length = chunk, start, length
        self._taken: tuple[Ragged, Int64s] | None = None

    @staticmethod
    def from_arrow(column: pa.Array | pa.ChunkedArray, name: str | None = None) -> Ragged:
        """The addresses of a list or large_list column of numbers or booleans; no number is copied.

        Args:
            column: the rows.
            name: what to call the column in an error.

        Raises:
            ValidationError: an element inside a list is null.
            CorruptFileError: the offsets are not those of its values.
        """
        arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        chunks, numbers, starts, lengths, addresses = [], [], [], [], []
        for number, array in enumerate(arrays):
            # `offsets` respects a slice and `values` does not, so the two fit together; null rows may
            # own values, so their length comes from the validity and not from the offsets.
            offsets = array.offsets.to_numpy().astype(np.int64, copy=False)
            if array.type.value_field.nullable and array.flatten().null_count:
                raise ValidationError(
                    "an element inside a list is null", column=name, hint="store NaN, or mask the token"
                )
            values, start, length = _flat_values(array), offsets[:-1], np.diff(offsets)
            if len(offsets) and (offsets[0] < 0 or offsets[-1] > len(values) or length.min(initial=0) < 0):
                raise CorruptFileError(f"the offsets of list column {name!r} reach beyond its values")
            address = values.__array_interface__["data"][0] + start * values.itemsize
            if array.null_count:
                valid = np.asarray(array.is_valid())
                length, address = np.where(valid, length, -1), np.where(valid, address, 0)
            chunks.append(values)
            starts.append(start)
            lengths.append(length)
            addresses.append(address)
            numbers.append(np.full(len(array), number, np.int64))
        empty = np.empty(0, np.int64)
        made = Ragged(
            tuple(chunks),
            np.concatenate([empty, *numbers]),
            np.concatenate([empty, *starts]),
            np.concatenate([empty, *lengths]),
        )
        made.address = np.concatenate([empty, *addresses])
        return made

    @staticmethod
    def absent(count: int) -> Ragged:
        """A column in which every row is null."""
        zeros = np.zeros(count, np.int64)
        return Ragged((), zeros, zeros, zeros - 1)

    def __reduce__(self) -> tuple[object, ...]:
        # Addresses stay behind: in another process the values lie elsewhere. So do values of other rows.
        given = self.length.clip(0)
        if given.sum() >= sum(len(chunk) for chunk in self.chunks):
            return Ragged, (self.chunks, self.chunk, self.start, self.length)
        parts = [row for i in range(len(self)) if (row := self.row(i)) is not None]
        values = np.concatenate([self.chunks[0][:0], *parts])
        return Ragged, ((values,), np.zeros_like(given), np.cumsum(given) - given, self.length)

    def __len__(self) -> int:
        return len(self.length if self._taken is None else self._taken[1])

    @cached_property
    def chunk(self) -> Int64s:
        """[N] in which of the chunks each row is."""
        return self._gathered("chunk")

    @cached_property
    def start(self) -> Int64s:
        """[N] where in its chunk each row begins."""
        return self._gathered("start")

    @cached_property
    def length(self) -> Int64s:
        """[N] values of each row, -1 when it is null."""
        return self._gathered("length")

    def _gathered(self, name: str) -> Int64s:
        assert self._taken is not None, "of any other column __init__ sets it"
        whole, rows = self._taken
        return getattr(whole, name)[rows]  # type: ignore[no-any-return]  # one of the four arrays

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Of the values; None when every row is null because there are none."""
        return self.chunks[0].dtype if self.chunks else None

    @cached_property
    def address(self) -> Int64s:
        """[N] where the first value of each row lies in memory; 0 for a null row.

        Raises:
            InputError: the chunks are not flat arrays of one dtype, or a row reaches beyond its chunk:
                whatever reads at the addresses relies on this check.
        """
        if self._taken is not None:
            return self._gathered("address")
        given = self.length >= 0
        if not given.any():
            return np.zeros(len(self), np.int64)
        kinds = {(chunk.dtype.str, chunk.ndim, chunk.flags.c_contiguous) for chunk in self.chunks}
        if len(kinds) != 1 or not {kind[1:] for kind in kinds} <= {(1, True)}:
            raise InputError(f"the chunks of a list column are not flat arrays of one dtype: {sorted(kinds)}")
        sizes = np.array([len(chunk) for chunk in self.chunks], np.int64)
        chunk = np.where(given, self.chunk, 0)
        outside = given & ((self.start < 0) | (self.start + self.length > sizes[chunk]))
        if outside.any():
            row = int(outside.argmax())
            raise InputError(
                f"row {row} of a list column reaches to {self.start[row] + self.length[row]}, "
                f"but its chunk holds {sizes[chunk[row]]} values"
            )
        bases = np.array([chunk.__array_interface__["data"][0] for chunk in self.chunks], np.int64)
        return np.where(given, bases[chunk] + self.start * self.chunks[0].itemsize, 0)

    def take(self, rows: Int64s, address: Int64s | None = None) -> Ragged:
        """The rows at these positions, in this order; no value is copied.

        Args:
            rows: positions.
            address: their addresses, from who has gathered them already.
        """
        taken = Ragged.__new__(Ragged)
        taken.chunks, taken._taken = self.chunks, (self, rows)
        if address is not None:
            taken.address = address
        return taken

    def or_else(self, other: Ragged) -> Ragged:
        """The same rows, null ones replaced by those of another column of the same dtype."""
        null = self.length < 0
        if null.all():
            return other
        if not null.any():
            return self
        return Ragged(
            self.chunks + other.chunks,
            np.where(null, other.chunk + len(self.chunks), self.chunk),
            np.where(null, other.start, self.start),
            np.where(null, other.length, self.length),
        )

    def row(self, i: int) -> NDArray[Any] | None:
        """Values of row i as a view, or None when the row is null."""
        if self.length[i] < 0:
            return None
        start = self.start[i]
        values: NDArray[Any] = self.chunks[self.chunk[i]][start : start + self.length[i]]
        return values


def side_by_side(columns: Mapping[str, Ragged], count: int) -> Int64s:
    """[N, C] addresses of columns of `count` rows: all of a row in one place, one cache miss to take it.

    Raises:
        InputError: see `Ragged.address`.
    """
    none = np.empty((count, 0), np.int64)
    return np.concatenate([none, *(column.address[:, None] for column in columns.values())], axis=1)


def take_all(columns: Mapping[str, Ragged], addresses: Int64s, rows: Int64s) -> dict[str, Ragged]:
    """The rows at these positions of every column; `addresses` is theirs, `side_by_side`."""
    taken = addresses.take(rows, axis=0)
    return {name: column.take(rows, taken[:, i]) for i, (name, column) in enumerate(columns.items())}


def _flat_values(array: pa.Array) -> NDArray[Any]:
    values = array.values
    if pa.types.is_boolean(values.type):  # bit-packed: it has no view as an array
        values = values.cast(pa.uint8())
    if values.null_count:  # only hidden behind null rows: the visible ones were checked
        values = values.fill_null(0)
    return values.to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]  # pyarrow is untyped
