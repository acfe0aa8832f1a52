"""Owns replay: a store's rollouts in the order of a live run, or as they were trained on; knows no trainer.

The order is a step of a scan, so a replay is a recipe: the same snapshot gives the same rows in the same
order, whatever the files look like by now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trajstore import layouts
from trajstore.batch import TrajectoryBatch
from trajstore.buffer import TrajectoryBuffer
from trajstore.errors import InputError, QueryError
from trajstore.selection import Bounds
from trajstore.store import Scan, TrajectoryStore

if TYPE_CHECKING:
    import polars as pl

Order = Literal["version", "ingest", "step"]
Int64s = NDArray[np.int64]

WINDOW = 1024
"""Rows that are read at a time; a moment is cut out of them without a copy."""

_NO_VERSION = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Moment:
    """Rows that came, or were trained on, together.

    Attributes:
        at: policy version, snapshot of arrival, or training step; None for rows of unknown version.
        current_version: the newest policy version that any row up to these has; None when none is known.
        batch: the rows, in order.
        rank, micro_batch: where in the training step; 0 otherwise.
    """

    at: int | None
    current_version: int | None
    batch: TrajectoryBatch
    rank: int = 0
    micro_batch: int = 0


@overload
def replay(
    store: TrajectoryStore, *, by: Order = ..., where: Any = ..., batch_size: int = ..., step: None = ...
) -> Replay: ...
@overload
def replay(store: TrajectoryStore, *, step: int, rank: int | None = ...) -> TrajectoryBatch: ...
def replay(
    store: TrajectoryStore,
    *,
    by: Order | None = None,
    where: Any = None,
    batch_size: int = WINDOW,
    step: int | None = None,
    rank: int | None = None,
) -> Replay | TrajectoryBatch:
    """The rollouts of a store as if the run were live, or the rows of one training step.

    - "version": a policy version after the other, by the newest token of each row, so that a row comes when
      it was finished; within one in order of arrival. Rows of unknown version come last.
    - "ingest": in order of arrival, a commit after the other.
    - "step": as the training ledger has it, by step, rank and micro-batch, each row as it was in the
      snapshot that the ledger names: later updates, deletes and compactions do not show.

    Args:
        store: the store, or `store.at(...)`: then up to that snapshot.
        by: the order; "version" unless given.
        where: only rows for which this is true; not with "step", which is exact.
        batch_size: most rows of a moment; one that holds more is given in parts. Not with "step".
        step: give the rows of this training step instead, all of them, in their order, as one batch.
        rank: of that step, this rank's rows only.

    Raises:
        QueryError: there is no such order or step; the predicate cannot be read; while reading: a row that
            the ledger names is not in its snapshot, or is there twice.
    """
    if step is not None:
        if by is not None or where is not None:
            raise QueryError("step goes with neither by nor where: it gives what was trained on, exactly")
        return _step(store, step, rank)
    if rank is not None:
        raise QueryError("rank goes with step", hint="replay(store, step=1200, rank=0)")
    by = "version" if by is None else by
    if by not in get_args(Order):
        raise QueryError(f"by is {by!r}, expected one of {', '.join(get_args(Order))}")
    if batch_size < 1:
        raise QueryError(f"batch_size is {batch_size}, expected at least 1")
    if by == "step":
        if where is not None:
            raise QueryError("where does not go with by='step': it gives what was trained on, exactly")
        return Replay(by, _trained(store, _ledger(store)))
    order = _Live(by)
    scan = store.scan(where).then(order)
    scan.count()
    runs = np.flatnonzero(np.diff(order.at)) + 1
    bounds = [0, *runs.tolist(), len(order.at)] if len(order.at) else [0]
    edges = [0, *(e for a, b in pairwise(bounds) for e in [*range(a + batch_size, b, batch_size), b])]
    at = [None if order.at[e] == _NO_VERSION else int(order.at[e]) for e in edges[:-1]]
    return Replay(by, [_Stretch(scan, edges, [(a, 0, 0) for a in at])])


class Replay:
    """Moments of a run, in order; iterate over it as often as you like.

    Attributes:
        by: the order.
    """

    def __init__(self, by: Order, stretches: Sequence[_Stretch]) -> None:
        self.by = by
        self._stretches = stretches

    def __len__(self) -> int:
        """Number of moments."""
        return sum(len(stretch.moments) for stretch in self._stretches)

    @property
    def num_rows(self) -> int:
        """Rows of all moments."""
        return sum(stretch.edges[-1] for stretch in self._stretches)

    @property
    def scan(self) -> Scan:
        """All rows in this order as one scan, for a TrajectoryLoader with `shuffle=False`, an export, SQL.

        Raises:
            InputError: the order is by training step, and the steps read different snapshots.
        """
        if len(self._stretches) != 1:
            raise InputError(
                f"the steps read {len(self._stretches)} snapshots, which are no one scan",
                hint="iterate over the moments, or over tensors()",
            )
        return self._stretches[0].scan

    def __iter__(self) -> Iterator[Moment]:
        newest: int | None = None
        for stretch in self._stretches:
            for (at, rank, micro_batch), batch in zip(stretch.moments, stretch.batches(), strict=True):
                found = pc.max(batch.to_arrow()["newest_version_id"]).as_py()
                if found is not None:
                    newest = found if newest is None else max(newest, found)
                yield Moment(at, newest, batch, rank, micro_batch)

    def into(self, buffer: TrajectoryBuffer) -> Iterator[int | None]:
        """Adds the rows to a buffer as they came, and gives the current version at each stop.

        It stops when all rows of a policy version, commit or step are in, however many moments they are: so
        a trainer that samples and gates there does the same every time, under the same seed.

            for version in replay(store).into(buffer):
                batch = buffer.sample(64, version)
        """
        last: Moment | None = None
        for moment in self:
            if last is not None and moment.at != last.at:
                yield last.current_version
            buffer.add_batch(moment.batch)
            last = moment
        if last is not None:
            yield last.current_version

    def tensors(self, layout: str = "padded", **options: Any) -> Iterator[dict[str, Any]]:
        """Each moment as a dict of tensors, made from the column cache as a TrajectoryLoader makes them.

        Args:
            layout: `padded`, `packed`, `nested` or `prompt_response`.
            options: see `trajstore.layouts.Options`.

        Returns:
            The tensors of the layout, and `ids`, `num_tokens`, `padding_ratio` and `at`.

        Raises:
            InputError: there is no such layout or option.
            ValidationError: a row has neither loss_mask nor a known split, ...
        """
        if layout not in layouts.LAYOUTS:
            raise InputError(f"layout is {layout!r}, expected one of {', '.join(layouts.LAYOUTS)}")
        asked = layouts.Options(**options)
        for stretch in self._stretches:
            rows = stretch.scan.rows([*layouts.READ, *asked.extra])
            for (at, _, _), (start, stop) in zip(stretch.moments, pairwise(stretch.edges), strict=True):
                chosen = rows.take(np.arange(start, stop))
                batch = layouts.LAYOUTS[layout](chosen, asked)
                tensors = layouts.to_torch(batch.arrays)
                if layout == "nested":
                    tensors = layouts.to_nested(tensors, batch.columns)
                yield tensors | {
                    "ids": list(chosen.ids),
                    "num_tokens": batch.num_tokens,
                    "padding_ratio": batch.padding_ratio,
                    "at": at,
                }


@dataclass(frozen=True)
class _Stretch:
    """Moments that follow each other and read one snapshot.

    Attributes:
        scan: their rows, one moment after the other.
        edges: [M + 1] where each moment begins in it, and the end.
        moments: [M] at, rank and micro-batch.
    """

    scan: Scan
    edges: list[int]
    moments: Sequence[tuple[int | None, int, int]]

    def batches(self) -> Iterator[TrajectoryBatch]:
        """The rows of each moment; several small ones are read at once."""
        windows = [0]
        for edge, following in pairwise([*self.edges[1:], _NO_VERSION]):
            if following - windows[-1] > WINDOW:
                windows.append(edge)
        place = 0
        for (start, stop), read in zip(pairwise(windows), self.scan.iter_parts(windows), strict=True):
            while place < len(self.moments) and self.edges[place + 1] <= stop:
                yield read[self.edges[place] - start : self.edges[place + 1] - start]
                place += 1


@dataclass
class _Live:
    """A step of a scan: all rows, in the order of a live run.

    Attributes:
        by: "version" or "ingest".
        at: [N] set by `keep`: the version or snapshot of each row; _NO_VERSION where it is not known.
    """

    by: Order
    at: Int64s = field(default_factory=lambda: np.empty(0, np.int64))

    bounds: ClassVar[Bounds] = {}

    @property
    def label(self) -> str:
        return f"replay by {self.by}"

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return {"newest_version_id" if self.by == "version" else "ingest_snapshot"}

    def keep(self, frame: pl.DataFrame) -> Int64s:
        (name,) = self.columns({})
        at = frame[name].fill_null(_NO_VERSION).to_numpy()
        order: Int64s = np.argsort(at, kind="stable")
        self.at = at[order]
        return order


@dataclass(frozen=True)
class _Named:
    """A step of a scan: the rows of these ids, in this order; an id may come several times."""

    ids: tuple[str, ...]
    label: str

    bounds: ClassVar[Bounds] = {}

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return {"id"}

    def keep(self, frame: pl.DataFrame) -> Int64s:
        found = np.flatnonzero(frame["id"].is_in(list(set(self.ids))).to_numpy())
        names = frame["id"].gather(found).to_list()
        place = dict(zip(names, found.tolist(), strict=True))
        if len(place) < len(names):
            twice = next(name for i, name in enumerate(names) if place[name] != found[i])
            raise QueryError(
                f"{self.label}: id {twice!r} is on several rows there, and the ledger does not say which",
                hint="`trajstore fsck` lists ids that are not unique",
            )
        for id in self.ids:
            if id not in place:
                raise QueryError(
                    f"{self.label}: no row has the id {id!r} there", hint="record ids of stored rows, flushed"
                )
        return np.array([place[id] for id in self.ids], np.int64)


def _ledger(store: TrajectoryStore) -> pa.Table:
    """What the ledger says of snapshots up to the store's, by step, rank, micro-batch and position."""
    ledger = store.ledger()
    return ledger.filter(pc.less_equal(ledger["snapshot"], store.scan().snapshot))


def _trained(store: TrajectoryStore, ledger: pa.Table) -> list[_Stretch]:
    """The moments of a ledger, an unbroken stretch for each run of one snapshot."""
    if not len(ledger):
        return []
    keys = np.stack([ledger[name].to_numpy() for name in ("step", "rank", "micro_batch", "snapshot")])
    starts = [0, *(np.flatnonzero((np.diff(keys) != 0).any(0)) + 1).tolist(), len(ledger)]
    ids = ledger["id"].to_pylist()
    stretches = []
    first = 0
    while first < len(starts) - 1:
        snapshot, after = int(keys[3, starts[first]]), first + 1
        while after < len(starts) - 1 and keys[3, starts[after]] == snapshot:
            after += 1
        base, stop = starts[first], starts[after]
        label = f"training step {keys[0, base]} at snapshot {snapshot}"
        scan = store.at(snapshot).scan().then(_Named(tuple(ids[base:stop]), label))
        moments = [(int(s), int(r), int(m)) for s, r, m, _ in keys[:, starts[first:after]].T]
        stretches.append(_Stretch(scan, [edge - base for edge in starts[first : after + 1]], moments))
        first = after
    return stretches


def _step(store: TrajectoryStore, step: int, rank: int | None) -> TrajectoryBatch:
    ledger = _ledger(store)
    there = pc.equal(ledger["step"], step)
    if rank is not None:
        there = pc.and_(there, pc.equal(ledger["rank"], rank))
    asked = ledger.filter(there)
    if not len(asked):
        what = f"step {step}" if rank is None else f"step {step} of rank {rank}"
        known = pc.min_max(ledger["step"]).as_py()
        hint = f"it has steps {known['min']} to {known['max']}" if len(ledger) else "it is empty"
        raise QueryError(f"the training ledger has no {what}", hint=f"{hint}: store.record_training_step")
    tables = [stretch.scan.to_arrow() for stretch in _trained(store, asked)]
    return TrajectoryBatch.from_arrow(pa.concat_tables(tables, promote_options="default"))
