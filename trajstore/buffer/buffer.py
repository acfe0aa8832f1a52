"""Owns TrajectoryBuffer, where rollouts wait for the trainer: thread-safe verbs over rows and draws."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.batch import TrajectoryBatch
from trajstore.buffer import draw
from trajstore.buffer.accept import Addable, encoded
from trajstore.buffer.apart import Apart, sampleable, superseded_within
from trajstore.buffer.rows import UNKNOWN, Rows
from trajstore.buffer.state import Reopen, State, Store
from trajstore.codec import warn_cache_refs
from trajstore.errors import InputError
from trajstore.schema import BY_NAME
from trajstore.selection import freshness
from trajstore.trajectory import PartialTrajectory, PolicyVersion, Trajectory, version_number

Int64s = NDArray[np.int64]
_NONE = np.empty(0, np.int64)
_CHUNK = 4096


class TrajectoryBuffer:
    """A bounded, thread-safe buffer of trajectories, indexed by policy version.

    Completed rows, and pending ones with a response, can be sampled; generating, aborted, failed and
    response-less ones are kept apart. Rows are encoded and checked when they are added, and held as Arrow
    columns. A row's version is that of its oldest token; rows of unknown version are available only
    when there is no staleness limit. With a store every row is also written there in the background,
    and a buffer opened over the store again holds the same rows; without one it lives in memory.

    Args:
        max_size: rows to hold. The oldest-added leave first, each with all of its group; rows of the store
            stay there. As many rows are kept apart at most. A group larger than this cannot be held.
        max_staleness: largest version gap of a row that is available, in publications of the policy; None =
            no limit.
        max_times_sampled: a row leaves the buffer when it was drawn so often; None = never.
        seed: of the draws.
        store: a TrajectoryStore, whose rows the buffer then starts with.

    Raises:
        InputError: a limit is below its least value.
    """

    def __init__(
        self,
        max_size: int = 10_000,
        max_staleness: int | None = 5,
        *,
        max_times_sampled: int | None = None,
        seed: int = 0,
        store: Store | None = None,
    ) -> None:
        for name, value, least in (
            ("max_size", max_size, 1),
            ("max_staleness", max_staleness, 0),
            ("max_times_sampled", max_times_sampled, 1),
        ):
            if value is not None and value < least:
                raise InputError(f"{name} is {value}, expected {least} or more")
        self._max_size = max_size
        self._max_staleness = max_staleness
        self._max_times_sampled = max_times_sampled
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._rows = Rows()
        self._apart = Apart()
        self._adding = threading.Lock()  # the store gets rows in the order in which the buffer does
        self._change = threading.Condition()
        self._store = store
        self._writer_id = uuid.uuid4().hex
        self._opened = -1
        self._writer = None
        if store is not None:
            self._open(store)
            self._writer = store.writer(writer_id=self._writer_id)

    # Adding

    def add(self, trajectory: Trajectory) -> None:
        """Adds one trajectory; see `add_batch`."""
        self._add([trajectory])

    def add_batch(self, trajectories: Addable) -> None:
        """Adds trajectories, all of them or none.

        Args:
            trajectories: objects, a TrajectoryBatch, or Arrow data in our columns. Rows without an id get
                one.

        Raises:
            ValidationError: a row breaks the contract of the row.
            SchemaError: Arrow data does not fit the columns.
            TrajstoreError: a commit to the store failed; what was added after the one before may be lost.
        """
        self._add(trajectories)

    def _add(self, trajectories: Addable) -> None:
        refs: dict[str, Any] = {}
        batches = encoded(trajectories, refs)
        if self._writer is not None:
            warn_cache_refs(len(refs), stacklevel=4)  # where the verb was called
        with self._adding:
            if self._writer is not None:
                for i, batch in enumerate(batches):
                    self._writer.put(batch, cache_refs_left_out=0 if i else len(refs))
            with self._change:
                for batch in batches:
                    self._insert(batch, refs)
                self._change.notify_all()

    def add_partial(self, partial: PartialTrajectory) -> None:
        """Keeps a generation that was cut off, until its continuation is added.

        Raises:
            InputError: it is not a PartialTrajectory, or was not cut off.
            ValidationError: it breaks the contract of the row.
        """
        if not isinstance(partial, PartialTrajectory):
            raise InputError(f"found a {type(partial).__name__}, expected a PartialTrajectory")
        if not partial.can_continue(partial.continuation_count + 1):
            reason = f"a partial trajectory with status {partial.status.value!r} was not cut off"
            raise InputError(reason, hint="add(...) takes trajectories of every status")
        self._add([partial])

    def _insert(self, batch: pa.RecordBatch, refs: Mapping[str, Any], times: NDArray[Any] | int = 0) -> None:
        if len(self._apart):
            self._apart.supersede(batch)
        good = sampleable(batch)
        if good.all():
            self._rows.add(batch, times)
        else:
            if good.any():
                drawn = times if isinstance(times, int) else times[good]
                self._rows.add(batch.filter(pa.array(good)), drawn)
            self._apart.add(batch.filter(pa.array(~good & ~superseded_within(batch))), refs, self._max_size)
        if self._rows.size > self._max_size:
            self._rows.remove(self._rows.oldest(self._rows.size - self._max_size))

    # Sampling

    def __len__(self) -> int:
        """Rows that can be sampled, stale ones included."""
        return self._rows.size

    def _floor(self, current_version: PolicyVersion | int) -> int | None:
        """The oldest version that is available."""
        current = version_number(current_version)
        return None if self._max_staleness is None else current - self._max_staleness

    def get_available(self, current_version: PolicyVersion | int) -> TrajectoryBatch:
        """All rows whose version gap is within the limit, in order of arrival."""
        with self._change:
            slots = self._rows.slots(self._rows.versions(self._floor(current_version)))
            return TrajectoryBatch.from_picked(self._rows.pick(slots))

    def sample(
        self,
        n: int,
        current_version: PolicyVersion | int,
        stratified: bool = False,
        *,
        weights: Literal["freshness"] | None = None,
        whole_groups: bool = False,
    ) -> TrajectoryBatch:
        """Exactly min(n, available) rows drawn without replacement, in order of arrival; they stay in.

        Every draw is another one; the same seed and the same calls give the same draws.

        Args:
            n: rows to draw, or groups with whole_groups.
            current_version: the trainer's policy version.
            stratified: the same share of every version gap, shortfalls refilled evenly; each row of
                a gap is equally likely. Otherwise each row is.
            weights: "freshness" draws in proportion to 1 / (gap + 1); unknown versions are not drawn.
            whole_groups: draws groups that reached their group_size and lost no row, never a part of one;
                the gap of a group is that of its oldest version, and rows without a group are not drawn.

        Raises:
            InputError: n is negative; weights are unknown, or given beside stratified: all rows of a
                gap weigh the same.
        """
        if n < 0:
            raise InputError(f"n is {n}, expected 0 or more")
        if weights not in (None, "freshness"):
            raise InputError(f"weights is {weights!r}, expected 'freshness' or None")
        if weights is not None and stratified:
            raise InputError("weights are given beside stratified=True", hint="rows of a gap weigh the same")
        with self._change:
            at = version_number(current_version)
            if whole_groups:
                slots = self._draw_groups(n, at, stratified, weights)
            else:
                versions = self._rows.versions(self._floor(at))
                drawn = self._draw(n, versions, self._rows.counts(versions), at, stratified, weights)
                slots = self._rows.slots(versions, drawn)
            batch = TrajectoryBatch.from_picked(self._rows.pick(slots))
            times = self._rows.count_draw(slots)
            if self._max_times_sampled is not None:
                self._rows.remove(slots[times >= self._max_times_sampled])
            return batch

    def _draw(
        self, n: int, versions: Sequence[int], sizes: Int64s, at: int, stratified: bool, weights: str | None
    ) -> Int64s:
        """Which members of the versions, laid end to end, are drawn."""
        if stratified and versions:
            return draw.stratified(self._rng, sizes, n)
        if weights is None:
            return draw.uniform(self._rng, sizes, n)
        gaps = np.array([np.nan if version == UNKNOWN else float(at - version) for version in versions])
        return draw.weighted(self._rng, sizes, freshness(gaps), n)

    def _draw_groups(self, n: int, at: int, stratified: bool, weights: str | None) -> Int64s:
        codes, oldest = self._rows.groups.whole()
        floor = self._floor(at)
        if floor is not None:
            codes, oldest = codes[oldest >= floor], oldest[oldest >= floor]
        codes = codes[np.argsort(oldest, kind="stable")]
        versions, sizes = np.unique(oldest, return_counts=True)
        drawn = self._draw(n, versions.tolist(), sizes, at, stratified, weights)
        return np.sort(np.concatenate([_NONE, *map(self._rows.members, codes[drawn].tolist())]))

    def wait_for(self, n: int, current_version: PolicyVersion | int, timeout: float | None = None) -> bool:
        """Waits until n rows are available at a version; false when `timeout` seconds passed before.

        Raises:
            InputError: n is more than the buffer holds: no wait would end.
        """
        if n > self._max_size:
            raise InputError(f"n is {n}, and the buffer holds {self._max_size} rows at most (max_size)")
        floor = self._floor(current_version)

        def enough() -> bool:
            return int(self._rows.counts(self._rows.versions(floor)).sum()) >= n

        with self._change:
            return self._change.wait_for(enough, timeout)

    # Partial rollouts

    def get_partials_for_prompts(
        self,
        prompts: Sequence[str] | None = None,
        current_version: PolicyVersion | int | None = None,
        *,
        max_continuations: int = 3,
    ) -> list[PartialTrajectory]:
        """Aborted generations to go on with, oldest first; they stay until their continuation is added.

        Args:
            prompts: texts of the prompts; None = all.
            current_version: leaves out what is staler than `max_staleness`, or of unknown version.
            max_continuations: leaves out what was continued so often.
        """
        floor = None if current_version is None else self._floor(current_version)
        with self._change:
            found = list(self._apart.partials(prompts, floor))
        return [partial for partial in found if partial.can_continue(max_continuations)]

    # Upkeep

    def remove_stale(self, current_version: PolicyVersion | int) -> int:
        """Removes rows whose version gap exceeds the limit and returns how many; unknown versions stay.

        Memory of up to an eighth of the rows that are left, and 1024 more, comes back at the next add only,
        as does that of rows which were drawn for the last time from among others that stay.
        """
        with self._change:
            floor = self._floor(current_version)
            return 0 if floor is None else self._rows.remove_versions(floor)

    def clear(self) -> None:
        """Removes all rows, those kept apart too; a store keeps its rows."""
        with self._change:
            self._rows = Rows()
            self._apart.clear()

    def get_stats(self, current_version: PolicyVersion | int | None = None) -> dict[str, float]:
        """size, partial_size, mean_staleness, max_staleness, min_version and max_version.

        size counts rows that can be sampled, partial_size those kept apart. Staleness is the version gap to
        the newest version in the buffer, unless a current one is given. Versions that are not known do
        not count; the last four are NaN when none is known.
        """
        with self._change:
            versions = self._rows.versions(UNKNOWN + 1)
            counts = self._rows.counts(versions)
            stats: dict[str, float] = {"size": self._rows.size, "partial_size": len(self._apart)}
        if not versions:
            names = ("mean_staleness", "max_staleness", "min_version", "max_version")
            return stats | dict.fromkeys(names, float("nan"))
        at = versions[-1] if current_version is None else version_number(current_version)
        gaps = at - np.array(versions)
        return stats | {
            "mean_staleness": float((gaps * counts).sum() / counts.sum()),
            "max_staleness": at - versions[0],
            "min_version": versions[0],
            "max_version": versions[-1],
        }

    # Durability

    @property
    def has_store(self) -> bool:
        """Whether rows are written to a store, too."""
        return self._store is not None

    def flush(self) -> None:
        """Returns when all rows added before are durable, and the counts of draws and the generator too.

        Raises:
            TrajstoreError: what a commit failed with.
            InputError: the buffer has no store.
        """
        if self._store is None or self._writer is None:
            raise InputError("the buffer has no store", hint="TrajectoryBuffer(store=...), or save(store)")
        with self._adding:
            self._writer.flush()
            self._record(self._store, self._writer_id, self._opened)

    def _record(self, store: Store, writer_id: str, opened: int) -> None:
        saved = store.scan().snapshot
        with self._change:
            slots = self._rows.all()
            held = self._rows.pick(slots).column("id_hash")
            apart = [batch.column("id_hash") for batch in self._apart.batches()]
            hashes = pa.chunked_array([*held.chunks, *apart], pa.int64()).to_numpy()
            times = np.concatenate([self._rows.times(slots), np.zeros(len(apart), np.int32)])
            generator = self._rng.bit_generator.state
        State(writer_id, opened, saved, generator, hashes, times).save(store)

    def _open(self, store: Store) -> None:
        """Takes in the rows of a store that the buffer holds."""
        state = State.of(store)
        if state is not None:
            self._rng.bit_generator.state = state.generator
        # Twice the limit: whole groups leave, so which rows stay depends on some that came before them.
        reopen = Reopen(state, 2 * self._max_size)
        scan = store.scan()
        self._opened = scan.snapshot
        kept = scan.filter(reopen)
        kept.count()
        done = 0
        for part in kept.iter_batches(_CHUNK):
            batch = part.to_arrow().combine_chunks()
            names = [name for name in batch.schema.names if name not in _STAMPS]
            for rows in batch.select(names).to_batches():
                self._insert(rows, {}, reopen.times[done : done + rows.num_rows])
                done += rows.num_rows

    def save(self, store: Store) -> None:
        """Writes a buffer that lives in memory to an empty store: rows, partials, counts, generator.

        Raises:
            InputError: the buffer has a store, or the store given has rows.
        """
        if self._store is not None:
            raise InputError("the buffer has a store already", hint="flush() saves its state there")
        if store.scan().count():
            raise InputError(f"{store!r} has rows already", hint="give an empty store")
        with self._adding, self._change:
            held = self._rows.pick(self._rows.all()).to_arrow()
            apart = [pa.Table.from_batches([batch]) for batch in self._apart.batches()]
            store.append(pa.concat_tables([held, *apart], promote_options="default"))
            self._record(store, "", store.scan().snapshot)

    @classmethod
    def load(cls, store: Store, **limits: Any) -> TrajectoryBuffer:
        """The buffer that a store holds, in memory: what is added from now on is not written there.

        Args:
            store: where it was saved, or a store a buffer was opened over.
            limits: max_size, max_staleness, max_times_sampled, as for a new buffer.
        """
        buffer = cls(**limits)
        buffer._open(store)
        return buffer

    def close(self) -> None:
        """Flushes and ends the writing to the store; without a store it does nothing."""
        if self._writer is not None:
            self.flush()
            self._writer.close()

    def __enter__(self) -> TrajectoryBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_STAMPS = frozenset(name for name, column in BY_NAME.items() if column.stamp)
