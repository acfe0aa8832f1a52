"""Owns what a buffer leaves in a store and how it finds it again; knows a store only by the verbs it needs.

Rows live in the table like any others. Beside them the buffer keeps one record: which rows it held and how
often each was drawn, the state of its random generator, and up to which commits that record speaks. A row
that came later is in the buffer; one the record leaves out was evicted, removed or used up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.selection import Bounds
from trajstore.selection.resume import SOURCES, resumable

if TYPE_CHECKING:
    import polars as pl

    from trajstore.batch import TrajectoryBatch

Int64s = NDArray[np.int64]


class Writer(Protocol):
    """What a buffer needs of a store's writer."""

    def put(self, batch: pa.RecordBatch, *, cache_refs_left_out: int = 0) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Scan(Protocol):
    """What a buffer needs of a scan."""

    @property
    def snapshot(self) -> int: ...
    def filter(self, where: Any) -> Scan: ...
    def count(self) -> int: ...
    def iter_batches(self, batch_size: int = ...) -> Iterable[TrajectoryBatch]: ...


class Store(Protocol):
    """What a buffer needs of a store."""

    @property
    def schema(self) -> pa.Schema: ...
    def scan(self, where: Any = None, columns: Sequence[str] | None = None) -> Scan: ...
    def append(self, rows: Any) -> Any: ...
    def writer(self, *, writer_id: str | None = None) -> Writer: ...
    def buffer_state(self) -> tuple[str, Int64s, Int64s] | None: ...
    def save_buffer_state(self, note: str, id_hashes: Int64s, times_sampled: Int64s) -> None: ...


@dataclass(frozen=True)
class State:
    """What a buffer was at a flush.

    Attributes:
        writer_id: of the writer through which it wrote.
        opened: the snapshot at which it was opened; of what others wrote, the record speaks up to there.
        saved: the snapshot up to which it speaks of the buffer's own rows.
        generator: state of the random generator.
        id_hashes: [N] int64 hashes of the ids of the rows that were held, in order of arrival.
        times_sampled: [N] how often each was drawn.
    """

    writer_id: str
    opened: int
    saved: int
    generator: Mapping[str, Any]
    id_hashes: Int64s = field(default_factory=lambda: np.empty(0, np.int64), compare=False)
    times_sampled: Int64s = field(default_factory=lambda: np.empty(0, np.int64), compare=False)

    @staticmethod
    def of(store: Store) -> State | None:
        """The last one saved in a store, None when there is none."""
        found = store.buffer_state()
        if found is None:
            return None
        note, id_hashes, times = found
        return State(**json.loads(note), id_hashes=id_hashes, times_sampled=times)

    def save(self, store: Store) -> None:
        """Takes the place of the one saved before."""
        note = {k: v for k, v in asdict(self).items() if k not in ("id_hashes", "times_sampled")}
        store.save_buffer_state(json.dumps(note), self.id_hashes, self.times_sampled)


@dataclass
class Reopen:
    """A step of a scan: keeps the rows of the snapshot that a buffer holds when it is opened.

    Rows the record does not speak of are in. Of those only the newest `limit` are read, and what can be
    continued.

    Attributes:
        state: the record, None when there is none.
        limit: how many rows to read at most of those the record does not speak of.
        times: set by `keep`: how often each row that was kept had been drawn.
    """

    state: State | None
    limit: int
    times: Int64s = field(default_factory=lambda: np.empty(0, np.int64))

    label: ClassVar[str] = "rows of the buffer"
    bounds: ClassVar[Bounds] = {}

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return {"id_hash", "ingest_snapshot", "writer_id", *SOURCES}

    def keep(self, frame: pl.DataFrame) -> Int64s:
        spoken_of = np.zeros(len(frame), bool)
        times = np.zeros(len(frame), np.int64)
        held = np.zeros(len(frame), bool)
        if self.state is not None:
            arrival = frame["ingest_snapshot"].to_numpy()
            own = (frame["writer_id"] == self.state.writer_id).to_numpy()
            spoken_of = (arrival <= self.state.opened) | (own & (arrival <= self.state.saved))
            known = np.flatnonzero(spoken_of)
            there, recorded = _matched(frame["id_hash"].to_numpy()[known], self.state.id_hashes)
            held[known[there]] = True
            times[known[there]] = self.state.times_sampled[recorded]
        new = np.flatnonzero(~spoken_of)
        held[new[-self.limit :] if self.limit else []] = True
        held |= ~spoken_of & resumable(frame).to_numpy()
        kept = np.flatnonzero(held)
        self.times = times[kept]
        return kept


def _matched(stored: Int64s, recorded: Int64s) -> tuple[Int64s, Int64s]:
    """Positions in both of rows that are the same; of rows with one id the last ones belong together."""
    _, there, found = np.intersect1d(
        _numbered(stored), _numbered(recorded), assume_unique=True, return_indices=True
    )
    return there, found


def _numbered(hashes: Int64s) -> NDArray[np.uint64]:
    """A key of each row: its hash, moved on by how many rows of the same hash follow."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    ends = np.searchsorted(ordered, ordered, side="right") - 1
    keys = np.empty(len(hashes), np.uint64)
    following = (ends - np.arange(len(hashes))).astype(np.uint64)
    with np.errstate(over="ignore"):
        keys[order] = ordered.view(np.uint64) + following * np.uint64(0x9E3779B97F4A7C15)
    return keys
