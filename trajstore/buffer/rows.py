"""Owns which rows a buffer holds: slots in order of arrival, buckets by version, groups; draws nothing.

A slot is the number of a row in order of arrival. Slots are counted anew when most of them are empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.buffer.columns import Column
from trajstore.buffer.groups import Groups
from trajstore.chunks import Chunk, Picked
from trajstore.schema import ROW_SCHEMA

Int64s = NDArray[np.int64]

_NONE = np.empty(0, np.int64)
_ROW = 2**32 - 1

UNKNOWN = int(np.iinfo(np.int64).min)
"""The version of rows whose policy version is not known: below every gate."""

_SMALL_ROWS, _SMALL_TOKENS = 1024, 1 << 16
"""Chunks below both are joined with the next one: a chunk costs some 20 kB whatever it holds."""


class Bucket:
    """The slots of one version, ascending.

    Rows of a version mostly come in a row: its slots are then `first`, `first + 1`, ..., and no verb has to
    read them.
    """

    def __init__(self) -> None:
        self.replace(_NONE)

    @property
    def slots(self) -> Int64s:
        return self._slots.values[self._skipped :]

    @property
    def is_run(self) -> bool:
        """Whether the slots are `size` ones from `first` on."""
        return self._last - self.first == self.size - 1

    def append(self, slots: Int64s) -> None:
        self._slots.append(slots)
        self._measure()

    def remove(self, slots: Int64s) -> None:
        """Takes some of its slots out; the oldest ones cost nothing."""
        held = self.slots
        if len(slots) <= len(held) and np.array_equal(held[: len(slots)], slots):
            self._skipped += len(slots)
            self._measure()
            return
        keep = np.ones(len(held), bool)
        keep[np.searchsorted(held, slots)] = False
        self.replace(held[keep])

    def replace(self, slots: Int64s) -> None:
        self._slots, self._skipped = Column(np.int64, len(slots)), 0
        self.append(slots)

    def _measure(self) -> None:
        slots = self.slots
        self.size = len(slots)
        self.first, self._last = (int(slots[0]), int(slots[-1])) if self.size else (0, -1)


class Rows:
    """Rows in Arrow chunks. No verb looks at rows it does not touch."""

    def __init__(self) -> None:
        self.schema: pa.Schema = ROW_SCHEMA
        self.size = 0
        self.groups = Groups()
        self._buckets: dict[int, Bucket] = {}
        self._versions: list[int] = []  # of the buckets, ascending
        self._chunks: list[Chunk | None] = []
        self._live: list[int] = []  # rows of each chunk that are held
        self._spans: list[tuple[int, int]] = []  # slots of each chunk
        self._oldest = 0  # no slot below it is held
        self._dead = self._dead_seen = 0  # rows in chunks that are no longer held; when last looked at
        self._emptied: list[Chunk] = []  # to be let go of
        self._emptied_rows = 0
        self._clear_columns()

    def _clear_columns(self) -> None:
        self._place = Column(np.int64)  # chunk << 32 | row: one look in memory instead of two
        self._version, self._group = Column(np.int64), Column(np.int32)
        self._times, self._held = Column(np.int32), Column(np.bool_)

    # Adding

    def add(self, batch: pa.RecordBatch, times: NDArray[Any] | int = 0) -> None:
        """Rows behind all others; `times` says how often each was drawn."""
        count = batch.num_rows
        if not count:
            return
        self._tidy()
        first = len(self._held.values)
        slots = np.arange(first, first + count)
        versions = batch.column("oldest_version_id").fill_null(UNKNOWN).to_numpy()
        groups = self.groups.codes(batch.column("group_id"))
        self._place.append(np.arange(count) + (len(self._chunks) << 32))
        self._version.append(versions)
        self._group.append(groups)
        self._times.append(np.broadcast_to(times, count))
        self._held.append(np.ones(count, bool))
        self._chunks.append(Chunk(batch))
        self._live.append(count)
        self._spans.append((first, first + count))
        self.size += count
        self.groups.add(groups, slots, versions, batch.column("group_size"))
        for version, bucket in _by(versions, slots):
            if version not in self._buckets:
                self._buckets[version] = Bucket()
                insort(self._versions, version)
            self._buckets[version].append(bucket)
        if batch.schema.names != self.schema.names:
            self.schema = pa.unify_schemas([self.schema, batch.schema])
        self._join_small()

    def _join_small(self) -> None:
        """Joins the last chunks while they are small and of like size: rows may come one by one."""
        while len(self._chunks) > 1:
            left, right = self._chunks[-2:]
            if left is None or right is None or len(left) > 2 * len(right):
                return
            if len(left) + len(right) > _SMALL_ROWS or _tokens(left) + _tokens(right) > _SMALL_TOKENS:
                return
            if left.batch.schema.names != right.batch.schema.names:
                return
            (first, _), (_, last) = self._spans[-2:]
            del self._chunks[-2:], self._live[-2:], self._spans[-2:]
            slots = first + np.flatnonzero(self._held.values[first:last])
            self._put(pa.concat_batches([left.batch, right.batch]), slots, len(left), (first, last))

    def _put(self, batch: pa.RecordBatch, slots: Int64s, offset: int, span: tuple[int, int]) -> None:
        """Makes a joined batch the last chunk; `offset` is where the rows of its second part begin."""
        number = len(self._chunks)
        place = self._place.values[slots]
        row = (place & _ROW) + np.where(place >> 32 > number, offset, 0)
        self._place.values[slots] = row + (number << 32)
        self._chunks.append(Chunk(batch))
        self._live.append(len(slots))
        self._spans.append(span)

    # Finding

    def versions(self, floor: int | None) -> list[int]:
        """Versions that are held and not below `floor`; UNKNOWN only when there is no floor."""
        return self._versions if floor is None else self._versions[bisect_left(self._versions, floor) :]

    def counts(self, versions: Iterable[int]) -> Int64s:
        """Rows of each of these versions."""
        return np.array([self._buckets[version].size for version in versions], np.int64)

    def slots(self, versions: Sequence[int], members: Int64s | None = None) -> Int64s:
        """Slots of these versions' rows, ascending.

        Args:
            versions: some that are held.
            members: ascending numbers of rows, counted through the versions one after another; None = all.
        """
        buckets = [self._buckets[version] for version in versions]
        edges = [0, *accumulate(bucket.size for bucket in buckets)]
        if members is None:
            slots = np.concatenate([_NONE, *(bucket.slots for bucket in buckets)])
        elif all(bucket.is_run for bucket in buckets):
            shifts = np.array(
                [bucket.first - edge for bucket, edge in zip(buckets, edges, strict=False)], np.int64
            )
            slots = members + shifts[np.searchsorted(edges[1:], members, side="right")]
            if all(a.first < b.first for a, b in pairwise(buckets)):  # runs share no slot
                return slots
        else:
            cuts = np.searchsorted(members, edges).tolist()
            parts = zip(buckets, edges, pairwise(cuts), strict=False)
            slots = np.concatenate([bucket.slots[members[a:b] - edge] for bucket, edge, (a, b) in parts])
        slots.sort()
        return slots

    def pick(self, slots: Int64s) -> Picked:
        """The rows of these slots, gathered only when touched."""
        place = self._place.values[slots]
        number = place >> 32
        new = np.ones(len(slots), bool)
        np.not_equal(number[1:], number[:-1], out=new[1:])
        chunks = [self._chunks[i] for i in number[new].tolist()]
        return Picked(cast("list[Chunk]", chunks), new.cumsum() - 1, place & _ROW, self.schema)

    def all(self) -> Int64s:
        """Every slot that is held, ascending."""
        return np.flatnonzero(self._held.values)

    def times(self, slots: Int64s) -> NDArray[np.int32]:
        """How often each row was drawn."""
        return self._times.values[slots]

    def count_draw(self, slots: Int64s) -> NDArray[np.int32]:
        """Notes that these rows were drawn once more; returns how often each was."""
        times = self._times.values[slots] + np.int32(1)
        self._times.values[slots] = times
        return times

    # Removing

    def oldest(self, least: int) -> Int64s:
        """Slots of the rows that came first, and of all of their groups, until there are `least` or more.

        The rows are those that would go one group after another; they are named in one go, as each removal
        costs as much for a few rows as for a thousand.
        """
        held, width = self._held.values, 4096
        while len(window := np.flatnonzero(held[self._oldest : self._oldest + width])) < least:
            width *= 4
        window = self._oldest + window[:least]
        self._oldest = int(window[0])
        codes = self._group.values[window]
        named, first, which, seen = np.unique(
            codes, return_index=True, return_inverse=True, return_counts=True
        )
        adds = np.where(codes < 0, 1, 0)
        grouped = named >= 0
        adds[first[grouped]] = self.groups.sizes(named[grouped])
        last = int(np.searchsorted(np.cumsum(adds), least))
        going = grouped & (first <= last)
        elsewhere = going & (seen < self.groups.sizes(named))
        inside = (going & ~elsewhere)[which]
        inside[: last + 1] |= codes[: last + 1] < 0
        return np.concatenate([window[inside], *map(self.members, named[elsewhere].tolist())])

    def members(self, code: int) -> Int64s:
        """Slots of a group's rows that are held, ascending."""
        slots = self.groups.slots(code)
        return slots[self._held.values[slots]]

    def remove_versions(self, floor: int) -> int:
        """Takes out all rows of a known version below `floor`; returns how many."""
        low, high = bisect_left(self._versions, UNKNOWN + 1), bisect_left(self._versions, floor)
        before = self.size
        for version in self._versions[low:high]:
            bucket = self._buckets.pop(version)
            self._forget(slice(bucket.first, bucket.first + bucket.size) if bucket.is_run else bucket.slots)
        del self._versions[low:high]
        return before - self.size

    def remove(self, slots: Int64s) -> None:
        """Takes out rows that are held."""
        if not len(slots):
            return
        slots = np.sort(slots)
        for version, part in _by(self._version.values[slots], slots):
            bucket = self._buckets[version]
            bucket.remove(part)
            if not bucket.size:
                del self._buckets[version]
                del self._versions[bisect_left(self._versions, version)]
        self._forget(slots)

    def _forget(self, slots: Int64s | slice) -> None:
        """Everything about rows that are no longer in a bucket."""
        self._held.values[slots] = False
        self.groups.remove(self._group.values[slots])
        chunks, rows = _counted(self._place.values[slots] >> 32)
        for number, count in zip(chunks, rows, strict=True):
            self.size -= count
            self._live[number] -= count
            self._dead += count
            chunk = self._chunks[number]
            if not self._live[number] and chunk is not None:
                self._dead -= len(chunk)
                self._chunks[number] = None
                self._emptied.append(chunk)
                self._emptied_rows += len(chunk)
        if self._emptied_rows > self.size // 8 + 1024:
            self._free()

    def _free(self) -> None:
        """Lets go of empty chunks. It costs more than all else about removing, so the next add does it."""
        self._emptied.clear()
        self._emptied_rows = 0

    def _tidy(self) -> None:
        """Gives memory back once enough is held for nothing: so removing rows copies none of the others."""
        self._free()
        self._dead_seen = min(self._dead_seen, self._dead)  # what has gone since makes no room for more
        if self._dead - self._dead_seen > self.size // 8 + 1024:
            for number, chunk in enumerate(self._chunks):
                if chunk is not None and 2 * self._live[number] < len(chunk):
                    self._shrink(number, chunk)
            self._dead_seen = self._dead  # in chunks of which most is held
        if len(self._held.values) > 2 * self.size + 4096:
            self._recount()

    def _shrink(self, number: int, chunk: Chunk) -> None:
        """Copies what is held of a chunk, so that the rest gives its memory back."""
        first, last = self._spans[number]
        slots = first + np.flatnonzero(self._held.values[first:last])
        self._dead -= len(chunk) - len(slots)
        rows = self._place.values[slots] & _ROW
        self._chunks[number] = Chunk(chunk.batch.take(pa.array(rows)))
        self._place.values[slots] = np.arange(len(slots)) + (number << 32)

    def _recount(self) -> None:
        """Numbers the slots from 0 again and drops what is empty."""
        held = self._held.values
        kept = np.flatnonzero(held)
        new = np.cumsum(held) - 1
        place = self._place.values[kept]
        numbers, chunk = np.unique(place >> 32, return_inverse=True)
        columns = [c.values[kept] for c in (self._version, self._group, self._times)]
        self._clear_columns()
        self._place.append((place & _ROW) + (chunk << 32))
        for column, values in zip((self._version, self._group, self._times), columns, strict=True):
            column.append(values)
        self._held.append(np.ones(len(kept), bool))
        for bucket in self._buckets.values():
            bucket.replace(new[bucket.slots])
        ends = np.cumsum(np.bincount(chunk, minlength=len(numbers))).tolist()
        self._chunks = [self._chunks[i] for i in numbers.tolist()]
        self._live = [self._live[i] for i in numbers.tolist()]
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []
        self._oldest = 0
        self.groups.renumber(self._group.values)


def _counted(numbers: Int64s) -> tuple[list[int], list[int]]:
    """Numbers [N] that are mostly equal to their neighbours, as runs: the number and the length of each."""
    first = np.flatnonzero(np.diff(numbers, prepend=-1))
    return numbers[first].tolist(), np.diff(first, append=len(numbers)).tolist()


def _by(versions: Int64s, slots: Int64s) -> Iterable[tuple[int, Int64s]]:
    """Ascending slots of each version."""
    if (versions == versions[0]).all():
        return [(int(versions[0]), slots)]
    order = np.argsort(versions, kind="stable")
    ordered = versions[order]
    cuts = np.flatnonzero(np.diff(ordered)) + 1
    firsts = ordered[np.concatenate([[0], cuts])].tolist()
    return zip(firsts, np.split(slots[order], cuts), strict=True)


def _tokens(chunk: Chunk) -> int:
    offsets = chunk.batch.column("tokens").offsets
    return int(offsets[-1].as_py() - offsets[0].as_py())
