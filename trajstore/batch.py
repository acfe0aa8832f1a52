"""Owns TrajectoryBatch, the pivot both roads pass through: Arrow rows with our schema; knows no store.

Axis letters: B trajectories, T the tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajstore import layouts
from trajstore.chunks import Picked, take_rows
from trajstore.codec import Nulls, decode, encode
from trajstore.errors import SchemaError
from trajstore.layouts import Missing, Rows
from trajstore.schema import BY_NAME, Column
from trajstore.trajectory import Trajectory

if TYPE_CHECKING:
    import torch

_DECODED = 256
"""Rows that iteration turns into objects at a time."""


class Tabular(Protocol):
    """Anything with rows in Arrow form: a Scan, another batch."""

    def to_arrow(self) -> pa.Table:
        """The rows."""
        ...


class TrajectoryBatch(Sequence[Trajectory]):
    """Trajectories in Arrow columns; a lazy sequence whose objects are made only when touched.

    Args:
        trajectories: objects, which are encoded and checked.
        nulls: "nan" turns None inside a list of floats into NaN; otherwise it is an error.

    Raises:
        ValidationError: a trajectory breaks the contract of the row.
    """

    def __init__(self, trajectories: Sequence[Trajectory] = (), *, nulls: Nulls = "error") -> None:
        self._picked: Picked | None = None
        self._table: pa.Table | None
        if isinstance(trajectories, TrajectoryBatch):  # in Arrow already: objects would be made for nothing
            self._picked, self._table = trajectories._picked, trajectories._table
        else:
            self._table = pa.Table.from_batches([encode(trajectories, nulls=nulls)])

    @classmethod
    def from_arrow(cls, data: pa.RecordBatch | pa.Table | Tabular) -> TrajectoryBatch:
        """Wraps rows that are in our schema already, a Scan's too; nothing is copied and no object is made.

        Raises:
            SchemaError: a column that every batch needs is missing, or has another type.
        """
        if isinstance(data, pa.RecordBatch):
            table = pa.Table.from_batches([data])
        else:
            table = data if isinstance(data, pa.Table) else data.to_arrow()
        for name in (*layouts.SCALARS, "tokens"):
            if name not in table.schema.names:
                raise SchemaError(f"a batch needs the column {name!r}", hint="add it to columns=")
            if table.schema.field(name).type != BY_NAME[name].type:
                found, wanted = table.schema.field(name).type, BY_NAME[name].type
                raise SchemaError(f"column {name!r} has type {found}, expected {wanted}")
        return cls._of(table, None)

    @classmethod
    def from_picked(cls, picked: Picked) -> TrajectoryBatch:
        """Rows picked out of chunks of whole rows, which are gathered only when touched."""
        return cls._of(None, picked)

    @classmethod
    def _of(cls, table: pa.Table | None, picked: Picked | None) -> TrajectoryBatch:
        batch = cls.__new__(cls)
        batch._table, batch._picked = table, picked
        return batch

    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table, in as many chunks as they came in."""
        if self._table is None:
            assert self._picked is not None
            self._table = self._picked.to_arrow()
        return self._table

    def _column(self, name: str) -> pa.ChunkedArray:
        if self._table is None and self._picked is not None:
            return self._picked.column(name)
        return self.to_arrow().column(name)

    def __len__(self) -> int:
        return len(self._picked) if self._picked is not None else int(self.to_arrow().num_rows)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> TrajectoryBatch: ...
    def __getitem__(self, index: int | slice) -> Trajectory | TrajectoryBatch:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if self._picked is not None:
                return type(self)._of(None, self._picked[np.arange(start, stop, step)])
            if step == 1:
                return type(self)._of(self.to_arrow().slice(start, max(stop - start, 0)), None)
            return type(self)._of(take_rows(self.to_arrow(), np.arange(start, stop, step)), None)
        position = range(len(self))[index]
        return next(iter(self[position : position + 1]))

    def __iter__(self) -> Iterator[Trajectory]:
        if self._picked is None:
            for batch in self.to_arrow().to_batches():
                yield from decode(batch)
            return
        for start in range(0, len(self), _DECODED):  # joined first: a decode costs as much as tens of rows
            rows = self._picked[start : start + _DECODED].to_arrow()
            yield from decode(pa.concat_batches(rows.to_batches()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrajectoryBatch) and self.to_arrow().equals(other.to_arrow())

    def __reduce__(self) -> tuple[object, ...]:
        # Pickling a slice of an Arrow table sends the whole of its buffers; an IPC stream sends its rows.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.to_arrow().schema) as writer:
            writer.write_table(self.to_arrow())
        return _from_stream, (type(self), sink.getvalue().to_pybytes())

    __hash__ = None  # type: ignore[assignment]  # compares by value, like a list

    def __repr__(self) -> str:
        return f"TrajectoryBatch({self.batch_size} trajectories, {self.num_tokens} tokens)"

    @property
    def batch_size(self) -> int:
        """Number of trajectories."""
        return len(self)

    @property
    def max_length(self) -> int:
        """Tokens of the longest trajectory, 0 when there is none."""
        return pc.max(self._column("length")).as_py() or 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all trajectories."""
        return pc.sum(self._column("length")).as_py() or 0

    @property
    def rewards(self) -> list[float]:
        """Scalar reward of each trajectory."""
        return self._column("reward").to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped

    def rows(self, columns: Sequence[str] = ()) -> Rows:
        """What layouts and loaders make batches from, with these list columns, and group_id; none: all."""
        if self._picked is not None:
            return self._picked.rows(pad_values(self._picked.schema), columns)
        table = self.to_arrow()
        pads = pad_values(table.schema)
        if columns:
            wanted = {*layouts.SCALARS, *columns}
            table = table.select([name for name in table.schema.names if name in wanted])
        return Rows.from_arrow(table, pads)

    def to_tensors(
        self,
        device: Any = "cpu",
        pad_token_id: int = 0,
        *,
        missing: Missing = "nan",
        extra: Sequence[str] = (),
    ) -> dict[str, torch.Tensor]:
        """One padded batch on a device; see `trajstore.layouts.padded` for keys, shapes and dtypes.

        An empty batch gives [0, 0] and [0] tensors of the same dtypes.

        Raises:
            ValidationError: a row has neither loss_mask nor a known split into prompt and response; a
                column is missing and `missing="error"`.
        """
        options = layouts.Options(pad_token_id=pad_token_id, missing=missing, extra=tuple(extra))
        return layouts.to_torch(layouts.padded(self.rows((*layouts.READ, *extra)), options).arrays, device)

    def compute_padding_ratio(self) -> float:
        """Padding / (B·T) if the batch is padded to its longest trajectory; 0.0 when it is empty."""
        return layouts.padding_ratio(self._column("length").to_numpy().astype(np.int64))

    def get_version_stats(self) -> dict[str, float]:
        """mean_version, min_version, max_version and version_spread over the known policy versions.

        All are NaN when no version is known.
        """
        known = self._column("version_id").drop_null().to_numpy()
        if not len(known):
            return dict.fromkeys(
                ("mean_version", "min_version", "max_version", "version_spread"), float("nan")
            )
        low, high = int(known.min()), int(known.max())
        return {
            "mean_version": float(known.mean()),
            "min_version": low,
            "max_version": high,
            "version_spread": high - low,
        }


def _from_stream(kind: type[TrajectoryBatch], stream: bytes) -> TrajectoryBatch:
    return kind.from_arrow(pa.ipc.open_stream(stream).read_all())


def pad_values(schema: pa.Schema) -> dict[str, float]:
    """Pad value of each per-token column of a schema that is the user's own."""
    extra = [Column.from_field(field) for field in schema if field.name not in BY_NAME]
    return {column.name: column.pad for column in extra if column.role == "token"}
