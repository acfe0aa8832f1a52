"""Owns TrajectoryBatch, the pivot both roads pass through: Arrow rows with our schema; knows no store.

Axis letters: B trajectories, T the tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajstore import layouts
from trajstore.codec import Nulls, decode, encode
from trajstore.errors import SchemaError
from trajstore.layouts import Missing, Rows
from trajstore.schema import BY_NAME, Column
from trajstore.trajectory import Trajectory

if TYPE_CHECKING:
    import torch


class TrajectoryBatch(Sequence[Trajectory]):
    """Trajectories in Arrow columns; a lazy sequence whose objects are made only when touched.

    Args:
        trajectories: objects, which are encoded and checked.
        nulls: "nan" turns None inside a list of floats into NaN; otherwise it is an error.

    Raises:
        ValidationError: a trajectory breaks the contract of the row.
    """

    def __init__(self, trajectories: Sequence[Trajectory] = (), *, nulls: Nulls = "error") -> None:
        self._table = pa.Table.from_batches([encode(trajectories, nulls=nulls)])

    @classmethod
    def from_arrow(cls, data: pa.RecordBatch | pa.Table) -> TrajectoryBatch:
        """Wraps rows that are in our schema already; nothing is copied.

        Raises:
            SchemaError: a column that every batch needs is missing, or has another type.
        """
        table = data if isinstance(data, pa.Table) else pa.Table.from_batches([data])
        for name in (*layouts.SCALARS, "tokens"):
            if name not in table.schema.names:
                raise SchemaError(f"a batch needs the column {name!r}", hint="add it to columns=")
            if table.schema.field(name).type != BY_NAME[name].type:
                found, wanted = table.schema.field(name).type, BY_NAME[name].type
                raise SchemaError(f"column {name!r} has type {found}, expected {wanted}")
        batch = cls.__new__(cls)
        batch._table = table
        return batch

    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table, in as many chunks as they came in."""
        return self._table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> TrajectoryBatch: ...
    def __getitem__(self, index: int | slice) -> Trajectory | TrajectoryBatch:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return type(self).from_arrow(self._table.slice(start, max(stop - start, 0)))
            return type(self).from_arrow(self._table.take(pa.array(range(start, stop, step), pa.int64())))
        position = range(len(self))[index]
        return next(iter(type(self).from_arrow(self._table.slice(position, 1))))

    def __iter__(self) -> Iterator[Trajectory]:
        for batch in self._table.to_batches():
            yield from decode(batch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrajectoryBatch) and self._table.equals(other._table)

    def __reduce__(self) -> tuple[object, ...]:
        # Pickling a slice of an Arrow table sends the whole of its buffers; an IPC stream sends its rows.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._table.schema) as writer:
            writer.write_table(self._table)
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
        return pc.max(self._table.column("length")).as_py() or 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all trajectories."""
        return pc.sum(self._table.column("length")).as_py() or 0

    @property
    def rewards(self) -> list[float]:
        """Scalar reward of each trajectory."""
        return self._table.column("reward").to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped

    def rows(self, columns: Sequence[str] = ()) -> Rows:
        """What layouts and loaders make batches from; `columns` is for sources that read on demand."""
        return Rows.from_arrow(self._table, pad_values(self._table.schema))

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
        return layouts.to_torch(layouts.padded(self.rows(), options).arrays, device)

    def compute_padding_ratio(self) -> float:
        """Padding / (B·T) if the batch is padded to its longest trajectory; 0.0 when it is empty."""
        return layouts.padding_ratio(self._table.column("length").to_numpy().astype(np.int64))

    def get_version_stats(self) -> dict[str, float]:
        """mean_version, min_version, max_version and version_spread over the known policy versions.

        All are NaN when no version is known.
        """
        known = self._table.column("version_id").drop_null().to_numpy()
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
