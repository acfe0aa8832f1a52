"""Owns Ragged, a list column as an address and a length per row; knows no batch, no store and no tensors.

Axis letter: N rows of a column.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import InputError, ValidationError

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """A list column as addresses: row i is `chunks[chunk[i]][start[i] : start[i] + length[i]]`.

    Attributes:
        chunks: flat value arrays of one dtype, which Arrow or a mapped file owns and nobody writes to.
        chunk, start, length: [N] int64 each; a length of -1 is a null row.
    """

    chunks: tuple[NDArray[Any], ...]
    chunk: Int64s
    start: Int64s
    length: Int64s
    _address: Int64s | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def from_arrow(column: pa.Array | pa.ChunkedArray, name: str | None = None) -> Ragged:
        """The addresses of a list or large_list column of numbers or booleans; no number is copied.

        Args:
            column: the rows.
            name: what to call the column in an error.

        Raises:
            ValidationError: an element inside a list is null.
        """
        arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        chunks, numbers, starts, lengths = [], [], [], []
        for number, array in enumerate(arrays):
            # `offsets` respects a slice and `values` does not, so the two fit together; null rows may
            # own values, so their length comes from the validity and not from the offsets.
            offsets = array.offsets.to_numpy().astype(np.int64)
            if array.type.value_field.nullable and array.flatten().null_count:
                raise ValidationError(
                    "an element inside a list is null", column=name, hint="store NaN, or mask the token"
                )
            chunks.append(_flat_values(array))
            starts.append(offsets[:-1])
            lengths.append(np.where(np.asarray(array.is_valid()), np.diff(offsets), -1))
            numbers.append(np.full(len(array), number, np.int64))
        empty = np.empty(0, np.int64)
        return Ragged(
            tuple(chunks),
            np.concatenate([empty, *numbers]),
            np.concatenate([empty, *starts]),
            np.concatenate([empty, *lengths]),
        )

    @staticmethod
    def absent(count: int) -> Ragged:
        """A column in which every row is null."""
        zeros = np.zeros(count, np.int64)
        return Ragged((), zeros, zeros, zeros - 1, zeros)

    def __len__(self) -> int:
        return len(self.length)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Of the values; None when every row is null because there are none."""
        return self.chunks[0].dtype if self.chunks else None

    @property
    def address(self) -> Int64s:
        """[N] where the first value of each row lies in memory; 0 for a null row.

        Raises:
            InputError: the chunks are not flat arrays of one dtype, or a row reaches beyond its chunk:
                whatever reads at the addresses relies on this check.
        """
        if self._address is None:
            object.__setattr__(self, "_address", self._addresses())
        return self._address  # type: ignore[return-value]  # set just above

    def _addresses(self) -> Int64s:
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

    def take(self, rows: Int64s) -> Ragged:
        """The rows at these positions, in this order; no value is copied."""
        return Ragged(self.chunks, self.chunk[rows], self.start[rows], self.length[rows], self.address[rows])

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
            np.where(null, other.address, self.address),
        )

    def row(self, i: int) -> NDArray[Any] | None:
        """Values of row i as a view, or None when the row is null."""
        if self.length[i] < 0:
            return None
        start = self.start[i]
        values: NDArray[Any] = self.chunks[self.chunk[i]][start : start + self.length[i]]
        return values


def _flat_values(array: pa.Array) -> NDArray[Any]:
    values = array.values
    if pa.types.is_boolean(values.type):  # bit-packed: it has no view as an array
        values = values.cast(pa.uint8())
    if values.null_count:  # only hidden behind null rows: the visible ones were checked
        values = values.fill_null(0)
    return values.to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]  # pyarrow is untyped
