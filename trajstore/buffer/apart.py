"""Owns the rows a buffer keeps apart because nothing may be trained on them yet, or ever; samples nothing.

These are generating, aborted and failed rows, and pending ones without a response. Those of them that are
partial trajectories can be continued.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trajstore.codec import decode
from trajstore.schema import ROW_SCHEMA
from trajstore.trajectory import PartialTrajectory


def sampleable(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """Rows that can be sampled, [N]: completed ones, and pending ones that have a response."""
    status = batch.column("status")
    completed: NDArray[np.bool_] = np.asarray(pc.equal(status, "completed"))
    if completed.all():
        return completed
    # Without a known split, any tokens may hold a response.
    size = np.asarray(pc.coalesce(batch.column("response_length"), batch.column("length")))
    answered = (size > 0) | np.asarray(pc.not_equal(batch.column("response"), ""))
    completed |= np.asarray(pc.equal(status, "pending")) & answered
    return completed


def superseded_within(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    """Rows that another row of the batch continues, or that a later one of the same id replaces, [N]."""
    ids = batch.column("id").to_pylist()
    last = {id: position for position, id in enumerate(ids)}
    parents = set(batch.column("parent_id").drop_null().to_pylist())
    return np.array([id in parents or last[id] > i for i, id in enumerate(ids)], bool)


@dataclass(frozen=True)
class _Row:
    batch: pa.RecordBatch  # of one row
    kv_cache_ref: Any

    @property
    def resumable(self) -> bool:
        """Whether the row is a partial trajectory that was cut off."""
        return self._of("continuation_count") is not None and self._of("status") in ("aborted", "generating")

    def is_fresh(self, floor: int | None) -> bool:
        version = self._of("oldest_version_id")
        return floor is None or (version is not None and version >= floor)

    def _of(self, name: str) -> Any:
        return self.batch.column(name)[0].as_py()

    def trajectory(self) -> PartialTrajectory:
        (row,) = decode(self.batch.select(ROW_SCHEMA.names))
        assert isinstance(row, PartialTrajectory)
        if self.kv_cache_ref is not None:
            row.kv_cache_ref = self.kv_cache_ref
        return row


class Apart:
    """Rows by id, in order of arrival, until a row of the same id or one that continues it comes."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def resumable(self) -> int:
        """How many can be continued."""
        return sum(row.resumable for row in self._rows.values())

    def add(self, batch: pa.RecordBatch, kv_cache_refs: Mapping[str, Any], limit: int) -> None:
        """Adds rows; of more than `limit` the oldest ones are dropped. Objects of the engine's go by id."""
        for position, id in enumerate(batch.column("id").to_pylist()):
            row = batch.take(pa.array([position]))  # a slice would hold the whole batch
            self._rows[id] = _Row(row, kv_cache_refs.get(id))
        while len(self._rows) > limit:
            del self._rows[next(iter(self._rows))]

    def supersede(self, batch: pa.RecordBatch) -> None:
        """Drops rows of the same ids as these, and rows that these continue."""
        if not self._rows:
            return
        for name in ("id", "parent_id"):
            for id in batch.column(name).drop_null().to_pylist():
                self._rows.pop(id, None)

    def partials(self, prompts: Sequence[str] | None, floor: int | None) -> Iterable[PartialTrajectory]:
        """Partial trajectories of these prompts, or of all, whose versions are not below `floor`."""
        wanted = None if prompts is None else set(prompts)
        for row in self._rows.values():
            if not row.resumable or not row.is_fresh(floor):
                continue
            if wanted is None or row.batch.column("prompt")[0].as_py() in wanted:
                yield row.trajectory()

    def batches(self) -> list[pa.RecordBatch]:
        """The rows, each in a batch of its own."""
        return [row.batch for row in self._rows.values()]

    def clear(self) -> None:
        """Drops all rows."""
        self._rows.clear()
