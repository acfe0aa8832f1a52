"""The buffer against a naive one made of lists: any sequence of calls gives the same rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.strategies import same
from trajstore import PartialTrajectory, PolicyVersion, Trajectory, TrajectoryBuffer, TrajectoryStatus
from trajstore.codec import normalize

STALE = 2
VERSIONS = st.none() | st.integers(0, 6)
GOOD = (TrajectoryStatus.COMPLETED, TrajectoryStatus.PENDING)


def oldest(row: Trajectory) -> int:
    """The version that gates go by: a continuation may be by an older policy than what it continues."""
    assert row.version is not None
    return min([row.version.version_id, *(s.version.version_id for s in row.version_segments)])


@dataclass
class Naive:
    """A list in order of arrival, as the page describes it."""

    max_size: int
    max_times: int | None
    rows: list[Trajectory] = field(default_factory=list)
    apart: dict[str, Trajectory] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    meant: Counter[str] = field(default_factory=Counter)
    broken: set[str] = field(default_factory=set)

    def add(self, given: list[Trajectory]) -> None:
        for t in given:  # first what the new rows supersede, then the rows
            for name in (t.id, t.parent_id):
                self.apart.pop(name or "", None)
        for t in given:
            has_response = t.response != "" or t.response_length > 0
            if t.is_complete or (t.status is TrajectoryStatus.PENDING and has_response):
                self.rows.append(t)
                if t.group_id is not None:
                    self.meant[t.group_id] = max(self.meant[t.group_id], t.group_size or 0)
            else:
                self.apart[t.id] = t
        while len(self.apart) > self.max_size:
            del self.apart[next(iter(self.apart))]
        while len(self.rows) > self.max_size:
            first = self.rows[0]
            self.remove(
                [t for t in self.rows if t is first or (first.group_id in (t.group_id,) and t.group_id)]
            )

    def remove(self, gone: list[Trajectory]) -> None:
        names = {t.id for t in gone}
        self.rows = [t for t in self.rows if t.id not in names]
        for group in {t.group_id for t in gone} - {None}:
            if any(t.group_id == group for t in self.rows):
                self.broken.add(group)
            else:
                self.broken.discard(group)
                del self.meant[group]

    def available(self, current: int) -> list[Trajectory]:
        known = [t for t in self.rows if t.version is not None]
        return [t for t in known if current - oldest(t) <= STALE]

    def groups(self, current: int) -> dict[str, list[Trajectory]]:
        found = {}
        for group in {t.group_id for t in self.rows} - self.broken - {None}:
            rows = [t for t in self.rows if t.group_id == group]
            if len(rows) >= self.meant[group] and all(t in self.available(current) for t in rows):
                found[group] = rows
        return found

    def drawn(self, ids: list[str]) -> None:
        self.times.update(ids)
        if self.max_times is not None:
            self.remove([t for t in self.rows if self.times[t.id] >= self.max_times])


class Buffers(RuleBasedStateMachine):
    @initialize(max_size=st.integers(1, 12), max_times=st.none() | st.integers(1, 3), seed=st.integers(0, 9))
    def start(self, max_size: int, max_times: int | None, seed: int) -> None:
        self.real = TrajectoryBuffer(max_size, STALE, max_times_sampled=max_times, seed=seed)
        self.naive = Naive(max_size, max_times)
        self.count = 0

    def fresh(self, given: list[dict[str, Any]]) -> list[Trajectory]:
        made = []
        for fields in given:
            response = list(range(fields.pop("size")))
            version = fields.pop("version")
            kind = PartialTrajectory if fields.pop("partial") else Trajectory
            made.append(
                kind(
                    id=f"t{self.count}",
                    prompt="p",
                    prompt_tokens=[7],
                    response_tokens=response,
                    version=None if version is None else PolicyVersion(version),
                    **fields,
                )
            )
            self.count += 1
        return made

    rows = st.fixed_dictionaries(
        {
            "size": st.integers(0, 3),
            "version": VERSIONS,
            "partial": st.booleans(),
            "status": st.sampled_from([*TrajectoryStatus, *[TrajectoryStatus.COMPLETED] * 4]),
            "group_id": st.none() | st.sampled_from(["a", "b", "c"]),
            "group_size": st.none() | st.integers(1, 3),
        }
    )

    @rule(given=st.lists(rows, max_size=7))
    def add_batch(self, given: list[dict[str, Any]]) -> None:
        made = self.fresh(given)
        self.real.add_batch(made)
        self.naive.add([normalize(t) for t in made])

    @rule(given=rows)
    def add(self, given: dict[str, Any]) -> None:
        (made,) = self.fresh([given])
        self.real.add(made)
        self.naive.add([normalize(made)])

    @precondition(lambda self: self.real.get_partials_for_prompts())
    @rule(data=st.data(), completes=st.booleans())
    def continue_one(self, data: st.DataObject, completes: bool) -> None:
        partial = data.draw(st.sampled_from(self.real.get_partials_for_prompts()))
        status = TrajectoryStatus.COMPLETED if completes else TrajectoryStatus.ABORTED
        after = partial.continue_with([1], [-1.0], 5, status=status)
        self.real.add(after)
        self.naive.add([normalize(after)])

    @rule(
        n=st.integers(0, 9), current=st.integers(0, 8), how=st.sampled_from(["", "stratified", "freshness"])
    )
    def sample(self, n: int, current: int, how: str) -> None:
        there = [t.id for t in self.naive.available(current)]
        kind: dict[str, Any] = {"stratified": {"stratified": True}, "freshness": {"weights": how}}.get(
            how, {}
        )
        batch = self.real.sample(n, current, **kind)
        ids = [t.id for t in batch]
        assert len(ids) == min(n, len(there))
        assert ids == [id for id in there if id in set(ids)], "rows come once, in order of arrival"
        if how == "stratified":
            strata = Counter(map(oldest, self.naive.available(current)))
            got = Counter(map(oldest, batch))
            open_ = [got[v] for v, size in strata.items() if got[v] < size]
            assert not open_ or max(got.values(), default=0) - min(open_) <= 1
        self.naive.drawn(ids)

    @rule(n=st.integers(0, 3), current=st.integers(0, 8), stratified=st.booleans())
    def sample_groups(self, n: int, current: int, stratified: bool) -> None:
        whole = self.naive.groups(current)
        batch = list(self.real.sample(n, current, stratified, whole_groups=True))
        chosen = {t.group_id for t in batch}
        assert chosen <= whole.keys()
        assert len(chosen) == min(n, len(whole))
        assert [t.id for t in batch] == [t.id for t in self.naive.rows if t.group_id in chosen]
        self.naive.drawn([t.id for t in batch])

    @rule(current=st.integers(0, 8))
    def remove_stale(self, current: int) -> None:
        known = [t for t in self.naive.rows if t.version is not None]
        stale = [t for t in known if current - oldest(t) > STALE]
        assert self.real.remove_stale(current) == len(stale)
        self.naive.remove(stale)

    @rule()
    def clear(self) -> None:
        self.real.clear()
        self.naive = Naive(self.naive.max_size, self.naive.max_times)

    @rule(current=st.integers(-1, 9))
    def look(self, current: int) -> None:
        assert same(list(self.real.get_available(current)), self.naive.available(current))
        versions = [oldest(t) for t in self.naive.rows if t.version is not None]
        stats = self.real.get_stats(current)
        assert (stats["size"], stats["partial_size"]) == (len(self.naive.rows), len(self.naive.apart))
        if versions:
            gaps = [current - v for v in versions]
            assert math.isclose(stats["mean_staleness"], sum(gaps) / len(gaps))
            assert stats["max_staleness"] == max(gaps)
            assert (stats["min_version"], stats["max_version"]) == (min(versions), max(versions))
        else:
            assert all(math.isnan(value) for value in list(stats.values())[2:])

    @invariant()
    def partials(self) -> None:
        cut_off = [
            t for t in self.naive.apart.values() if isinstance(t, PartialTrajectory) and t.can_continue()
        ]
        assert same(self.real.get_partials_for_prompts(["p"]), cut_off)
        assert len(self.real) == len(self.naive.rows) <= self.naive.max_size


TestBuffers = Buffers.TestCase
TestBuffers.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
