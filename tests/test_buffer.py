"""TrajectoryBuffer in memory: what is available, how it is drawn, what is kept apart, threads."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import threading
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from trajstore import (
    InputError,
    PartialTrajectory,
    PolicyVersion,
    SchemaError,
    Trajectory,
    TrajectoryBatch,
    TrajectoryBuffer,
    TrajectoryStatus,
    ValidationError,
)
from trajstore.buffer import draw
from trajstore.codec import encode, normalize
from trajstore.schema import Column, list_of


def row(i: int, version: int | None = 0, **given: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "id": f"t{i}",
        "prompt": f"p{i % 3}",
        "prompt_tokens": [1, 2],
        "response_tokens": list(range(1 + i % 5)),
        "reward": float(i),
        "version": None if version is None else PolicyVersion(version),
        "status": TrajectoryStatus.COMPLETED,
    }
    return Trajectory(**fields | given)


def ids(batch: TrajectoryBatch) -> list[str]:
    return [t.id for t in batch]


def filled(sizes: dict[int | None, int], **limits: Any) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(**limits)
    versions = [version for version, size in sizes.items() for _ in range(size)]
    buffer.add_batch([row(i, version) for i, version in enumerate(versions)])
    return buffer


# The page


def test_the_page() -> None:
    buffer = TrajectoryBuffer(max_size=10000, max_staleness=5)
    buffer.add(row(0, 3))
    buffer.add_batch([row(1, 4), row(2, 5)])
    available = buffer.get_available(PolicyVersion(9))
    assert isinstance(available, TrajectoryBatch)
    assert list(available) == [normalize(row(1, 4)), normalize(row(2, 5))]
    assert available[1] == normalize(row(2, 5))
    assert ids(buffer.sample(n=32, current_version=PolicyVersion(8), stratified=True)) == ["t0", "t1", "t2"]
    assert buffer.get_stats() == {
        "size": 3,
        "partial_size": 0,
        "mean_staleness": 1.0,
        "max_staleness": 2,
        "min_version": 3,
        "max_version": 5,
    }
    assert buffer.remove_stale(PolicyVersion(9)) == 1
    assert len(buffer) == 2
    assert buffer.get_stats(9)["mean_staleness"] == 4.5
    buffer.clear()
    assert len(buffer) == 0
    assert all(math.isnan(value) for value in list(buffer.get_stats().values())[2:])


def test_an_empty_buffer_gives_empty_batches() -> None:
    buffer = TrajectoryBuffer()
    for batch in (
        buffer.get_available(3),
        buffer.sample(4, 3),
        buffer.sample(4, 3, stratified=True),
        buffer.sample(4, 3, weights="freshness"),
        buffer.sample(4, 3, whole_groups=True),
    ):
        assert (len(batch), list(batch), batch.num_tokens, batch.max_length, batch.rewards) == (
            0,
            [],
            0,
            0,
            [],
        )
        assert batch.to_tensors()["input_ids"].shape == (0, 0)
        assert batch.compute_padding_ratio() == 0
    assert buffer.remove_stale(9) == 0


def test_arguments_are_checked() -> None:
    for limits in ({"max_size": 0}, {"max_staleness": -1}, {"max_times_sampled": 0}):
        with pytest.raises(InputError, match=f"{next(iter(limits))} is "):
            TrajectoryBuffer(**limits)
    buffer = filled({0: 3})
    with pytest.raises(InputError, match="n is -1"):
        buffer.sample(-1, 0)
    with pytest.raises(InputError, match="weights is 'reward'"):
        buffer.sample(1, 0, weights="reward")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InputError, match="beside stratified=True"):
        buffer.sample(1, 0, stratified=True, weights="freshness")
    with pytest.raises(InputError, match="the buffer has no store"):
        buffer.flush()
    with pytest.raises(InputError, match="found a Trajectory, expected a PartialTrajectory"):
        buffer.add_partial(row(9))  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InputError, match="status 'completed' was not cut off"):
        buffer.add_partial(PartialTrajectory(status=TrajectoryStatus.COMPLETED))
    assert len(buffer) == 3


def test_a_bad_row_adds_nothing() -> None:
    buffer = filled({0: 3})
    with pytest.raises(ValidationError, match="trajectory 1"):
        buffer.add_batch([row(7), row(8, log_probs=[1.0]), row(9)])
    assert len(buffer) == 3


def test_unknown_versions_are_never_fresh_and_a_stratum_of_their_own() -> None:
    buffer = filled({None: 4, 2: 4, 3: 4})
    assert len(buffer) == 12
    assert buffer.get_stats()["mean_staleness"] == 0.5
    assert len(buffer.get_available(3)) == 8
    assert buffer.remove_stale(100) == 8
    assert len(buffer) == 4
    unlimited = filled({None: 4, 2: 4, 3: 4}, max_staleness=None)
    assert len(unlimited.get_available(1000)) == 12
    drawn = unlimited.sample(3, 3, stratified=True)
    assert sorted(t.version.version_id if t.version else -1 for t in drawn) == [-1, 2, 3]
    assert unlimited.remove_stale(1000) == 0
    weighted = unlimited.sample(12, 3, weights="freshness")
    assert sorted(t.version.version_id for t in weighted if t.version) == [2] * 4 + [3] * 4
    assert len(weighted) == 8


def test_rows_newer_than_the_trainer_are_available() -> None:
    assert len(filled({5: 3}, max_staleness=0).get_available(2)) == 3
    assert filled({5: 3}).get_stats(2)["mean_staleness"] == -3


def test_the_oldest_token_decides() -> None:
    partial = PartialTrajectory(prompt_tokens=[1], version=PolicyVersion(2), status=TrajectoryStatus.ABORTED)
    mixed = partial.continue_with([5], [-1.0], 2, status=TrajectoryStatus.ABORTED).continue_with(
        [6], [-1.0], 6
    )
    buffer = TrajectoryBuffer(max_staleness=2)
    buffer.add(mixed)
    assert len(buffer.get_available(4)) == 1
    assert len(buffer.get_available(5)) == 0


# Drawing


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 9, 10, 29, 30, 31, 100])
@pytest.mark.parametrize("how", [{}, {"stratified": True}, {"weights": "freshness"}])
def test_exactly_what_was_asked_for_or_all(n: int, how: dict[str, Any]) -> None:
    buffer = filled({0: 1, 1: 2, 2: 20, 3: 7})
    drawn = ids(buffer.sample(n, 3, **how))
    assert len(drawn) == len(set(drawn)) == min(n, 30)
    assert len(buffer) == 30


def test_fewer_rows_than_strata_are_not_over_delivered() -> None:
    buffer = filled(dict.fromkeys(range(199), 5), max_staleness=None)
    drawn = buffer.sample(32, 199, stratified=True)
    assert len(drawn) == 32
    assert len({t.version.version_id for t in drawn if t.version}) == 32


def test_shortfalls_are_refilled_evenly() -> None:
    drawn = filled({0: 1, 1: 20, 2: 20, 3: 3}).sample(20, 3, stratified=True)
    assert Counter(t.version.version_id for t in drawn if t.version) == {0: 1, 1: 8, 2: 8, 3: 3}


def test_the_same_seed_draws_the_same_and_each_draw_another() -> None:
    def draws(seed: int) -> list[list[str]]:
        buffer = filled({0: 50, 1: 50}, seed=seed)
        hows: list[dict[str, Any]] = [{}, {"stratified": True}, {"weights": "freshness"}, {}]
        return [ids(buffer.sample(8, 1, **how)) for how in hows]

    assert draws(1) == draws(1) != draws(2)
    assert draws(1)[0] != draws(1)[3]


SIZES = np.array([1, 3, 0, 40, 6])


def _often(make: Any, rounds: int = 1500) -> np.ndarray:
    """How often each of the 50 members was drawn, by rounds."""
    rng = np.random.default_rng(7)
    counts = np.zeros(int(SIZES.sum()))
    for _ in range(rounds):
        drawn = make(rng)
        assert (np.diff(drawn) > 0).all()
        counts[drawn] += 1
    return counts / rounds


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda rng: draw.uniform(rng, SIZES, 10), [0.2] * 5),
        # 10 over 4 strata: 1 is taken whole, 3 of 3, and 3 of each of the others.
        (lambda rng: draw.stratified(rng, SIZES, 10), [1, 1, 0, 3 / 40, 3 / 6]),
        (lambda rng: draw.stratified(rng, SIZES, 2), [2 / 4, 2 / 12, 0, 2 / 160, 2 / 24]),
        (lambda rng: draw.weighted(rng, SIZES, np.array([1.0, 1, 1, 1, 1]), 10), [0.2] * 5),
        (lambda rng: draw.weighted(rng, SIZES, np.array([0.0, 0, 1, 0.5, 0]), 10), [0, 0, 0, 0.25, 0]),
    ],
)
def test_draws_are_unbiased(make: Any, expected: list[float]) -> None:
    """Five standard deviations of 1500 rounds for each of 50 members."""
    wanted = np.repeat(expected, SIZES)
    spread = np.sqrt(wanted * (1 - wanted) / 1500)
    assert (abs(_often(make) - wanted) <= 5 * spread + 1e-12).all()


def test_weights_are_those_of_a_race_of_all_members() -> None:
    """Next to Efraimidis and Spirakis run over every member."""
    weights = np.array([3.0, 0.5, 1.0, 1.0, 2.0])
    each = np.repeat(weights, SIZES)

    def race(rng: np.random.Generator) -> np.ndarray:
        return np.sort(np.argsort(rng.standard_exponential(len(each)) / each)[:12])

    ours, theirs = _often(lambda rng: draw.weighted(rng, SIZES, weights, 12)), _often(race)
    spread = np.sqrt(theirs * (1 - theirs) / 1500)
    assert (abs(ours - theirs) <= 7.5 * spread + 1e-3).all()


def test_a_stratum_that_empties_slows_down() -> None:
    """3 of 1 + 3 members of one weight: each with probability 3/4, and not as if no one had left."""
    rng = np.random.default_rng(1)
    ones = np.ones(2)
    alone = sum(0 in draw.weighted(rng, np.array([1, 3]), ones, 3) for _ in range(1000)) / 1000
    assert abs(alone - 0.75) < 0.07


def test_fresher_rows_come_more_often() -> None:
    buffer = filled({0: 500, 3: 500}, seed=3)
    drawn = Counter(
        t.version.version_id for _ in range(40) for t in buffer.sample(10, 3, weights="freshness")
    )
    # A quarter of the weight: 1 in 5 of 400, standard deviation 8.
    assert abs(drawn[0] - 80) < 40


def test_a_row_leaves_when_it_was_drawn_often_enough() -> None:
    buffer = filled({0: 10}, max_times_sampled=2)
    seen: Counter[str] = Counter()
    while len(buffer):
        seen.update(ids(buffer.sample(3, 0)))
    assert seen == {f"t{i}": 2 for i in range(10)}


# Groups


def grouped(groups: dict[str, int], size: int | None = 4, version: int = 0) -> list[Trajectory]:
    members = [name for name, count in groups.items() for _ in range(count)]
    return [row(i, version, group_id=name, group_size=size) for i, name in enumerate(members)]


def test_groups_are_drawn_whole_or_not_at_all() -> None:
    buffer = TrajectoryBuffer()
    buffer.add_batch([*grouped({"full": 4, "short": 3, "more": 5}), row(90)])
    for n in (0, 1, 2, 9):
        drawn = Counter(t.group_id for t in buffer.sample(n, 0, whole_groups=True))
        assert len(drawn) == min(n, 2)
        assert drawn.items() <= {("full", 4), ("more", 5)}
    buffer.add(row(91, group_id="short", group_size=4))
    assert len(buffer.sample(9, 0, whole_groups=True)) == 13


def test_the_worst_member_decides_for_its_group() -> None:
    buffer = TrajectoryBuffer(max_staleness=1)
    buffer.add_batch(grouped({"a": 3}, version=5))
    buffer.add(row(9, 2, group_id="a", group_size=4))
    assert len(buffer.get_available(5)) == 3
    assert len(buffer.sample(1, 5, whole_groups=True)) == 0
    assert len(buffer.sample(1, 3, whole_groups=True)) == 4
    buffer.remove_stale(5)
    assert len(buffer) == 3
    assert len(buffer.sample(1, 3, whole_groups=True)) == 0, "a group that lost a row is not whole"
    unsized = TrajectoryBuffer(max_staleness=9)
    unsized.add_batch([row(i, i, group_id="b") for i in range(4)])
    assert len(unsized.sample(1, 0, whole_groups=True)) == 4
    unsized.remove_stale(11)
    assert len(unsized) == 2
    assert len(unsized.sample(1, 0, whole_groups=True)) == 0, "even when its size was never said"


def test_groups_by_freshness_leave_when_they_were_drawn_often_enough() -> None:
    """Gap 0 weighs 4 times as much as gap 3, so it comes first: in 4 of 5 first draws."""
    first: Counter[str | None] = Counter()
    for seed in range(300):
        buffer = TrajectoryBuffer(max_staleness=3, max_times_sampled=2, seed=seed)
        old = [row(i, 0, group_id="old", group_size=2) for i in range(2)]
        new = [row(9 + i, 3, group_id="new", group_size=2) for i in range(2)]
        stale = [row(20 + i, -1 + i, group_id="stale", group_size=2) for i in range(2)]
        buffer.add_batch([*old, *new, *stale, row(30, 3, group_id="short", group_size=2)])
        drawn: list[str | None] = []
        while batch := buffer.sample(1, 3, weights="freshness", whole_groups=True):
            (group,) = {t.group_id for t in batch}
            assert len(batch) == 2
            drawn.append(group)
        assert sorted(drawn, key=str) == ["new", "new", "old", "old"]
        assert ids(buffer.get_available(3)) == ["t21", "t30"]
        first[drawn[0]] += 1
    assert abs(first["new"] - 240) < 35  # five standard deviations


def test_a_group_that_lost_a_row_to_single_draws_is_not_whole() -> None:
    buffer = TrajectoryBuffer(max_times_sampled=1)
    buffer.add_batch(grouped({"a": 4, "b": 4}))
    (taken,) = buffer.sample(1, 0)
    (whole,) = {t.group_id for t in buffer.sample(9, 0, whole_groups=True)}
    assert whole != taken.group_id
    assert len(buffer) == 3


def test_the_oldest_groups_leave_whole() -> None:
    buffer = TrajectoryBuffer(max_size=9)
    buffer.add_batch(grouped({"a": 4, "b": 4}))
    buffer.add(row(50))
    assert len(buffer) == 9
    buffer.add(row(51))
    assert ids(buffer.get_available(0)) == ["t4", "t5", "t6", "t7", "t50", "t51"]
    buffer.add_batch([row(60 + i) for i in range(4)])
    assert ids(buffer.get_available(0))[:2] == ["t50", "t51"]


# Kept apart


def test_what_nothing_can_be_trained_on_is_kept_apart() -> None:
    status = TrajectoryStatus
    buffer = TrajectoryBuffer()
    buffer.add_batch(
        [
            *(row(i, status=s) for i, s in enumerate((status.GENERATING, status.ABORTED, status.FAILED))),
            row(3, status=status.PENDING, response_tokens=[]),
            row(4, status=status.PENDING),
            row(5, status=status.PENDING, response_tokens=[], response="text only"),
            Trajectory(id="t6", tokens=[1, 2], version=PolicyVersion(0)),
            row(7, response_tokens=[]),
        ]
    )
    assert ids(buffer.get_available(0)) == ["t4", "t5", "t6", "t7"]
    stats = buffer.get_stats()
    assert (stats["size"], stats["partial_size"]) == (4, 4)
    assert buffer.get_partials_for_prompts() == []
    buffer.add(row(0))  # the generation that was under way has ended
    assert buffer.get_stats()["partial_size"] == 3


def partial(i: int, version: int | None = 0, **given: Any) -> PartialTrajectory:
    return PartialTrajectory(**vars(row(i, version)) | {"status": TrajectoryStatus.ABORTED} | given)


def test_partials_wait_until_their_continuation_comes() -> None:
    buffer = TrajectoryBuffer(max_staleness=2)
    for i, version in enumerate((3, 4, None, 7)):
        buffer.add_partial(partial(i, version))

    def waiting(*args: Any) -> list[str]:
        return [t.id for t in buffer.get_partials_for_prompts(*args)]

    assert waiting() == ["t0", "t1", "t2", "t3"]
    assert waiting(["p0"]) == ["t0", "t3"]
    assert waiting(["p1", "p2", "p1"]) == ["t1", "t2"]
    assert waiting(None, 6) == ["t1", "t3"]
    assert waiting([]) == []
    (first,) = buffer.get_partials_for_prompts(["p1"])
    again = first.continue_with([9], [-1.0], 5, status=TrajectoryStatus.ABORTED)
    buffer.add_partial(again)
    assert waiting(["p1"]) == [again.id]
    buffer.add(again.continue_with([8], [-1.0], 5))
    assert waiting(["p1"]) == []
    assert len(buffer) == 1


@pytest.mark.parametrize("together", [False, True])
def test_a_partial_and_its_continuation_may_come_together(together: bool) -> None:
    first, second, replaced = partial(0), partial(1), partial(2)
    again = first.continue_with([9], [-1.0], 1, status=TrajectoryStatus.ABORTED)
    rows = [first, second, replaced, again, second.continue_with([8], [-1.0], 1), row(2)]
    buffer = TrajectoryBuffer()
    for batch in [rows] if together else [[one] for one in rows]:
        buffer.add_batch(batch)
    assert [t.id for t in buffer.get_partials_for_prompts(max_continuations=9)] == [again.id]
    assert buffer.get_stats()["partial_size"] == 1
    assert len(buffer) == 2


def test_the_engines_cache_reference_may_be_anything() -> None:
    cache = object()
    buffer = TrajectoryBuffer()
    buffer.add_batch([partial(0, kv_cache_ref=cache), partial(1, kv_cache_ref="block-7"), partial(2, id="")])
    buffer.add_partial(partial(3, id="", kv_cache_ref=cache))
    found = buffer.get_partials_for_prompts()
    assert [t.kv_cache_ref for t in found] == [cache, "block-7", None, cache]
    assert len({t.id for t in found}) == 4


def test_rows_apart_are_bounded_too() -> None:
    buffer = TrajectoryBuffer(max_size=3)
    for i in range(5):
        buffer.add_partial(partial(i))
    assert [t.id for t in buffer.get_partials_for_prompts()] == ["t2", "t3", "t4"]


# Rows in Arrow form


def test_batches_and_arrow_data_are_taken_as_they_are() -> None:
    rows = [row(i) for i in range(9)]
    batch = encode(rows)
    extra = Column("entropy", list_of(pa.float32()), "token", pad=-1.0)
    table = pa.Table.from_batches([batch.slice(0, 4), batch.slice(4)])
    wide = table.append_column(extra.field, pa.array([[0.5] * t.total_length for t in rows], extra.type))
    for given in (batch, table, TrajectoryBatch(rows), wide):
        buffer = TrajectoryBuffer()
        buffer.add_batch(given)
        assert list(buffer.get_available(0)) == [normalize(t) for t in rows]
    buffer.add_batch(rows[:2])  # without the extra column, which is null there
    both = buffer.get_available(0)[7:]
    out = both.to_tensors(extra=["entropy"])["entropy"]
    assert out[0, :6].tolist() == [0.5] * 5 + [-1] if out.shape[1] > 5 else True
    assert out[2, :3].isnan().all()
    assert both.to_arrow()["entropy"].null_count == 2
    with pytest.raises(SchemaError):
        TrajectoryBuffer().add_batch(table.drop_columns(["reward"]))


def test_a_picked_batch_is_the_batch_of_its_rows() -> None:
    """Rows out of many chunks, next to a batch made of the same objects."""
    rng = np.random.default_rng(0)
    rows = [
        row(
            i,
            int(rng.integers(0, 4)),
            log_probs=[-0.5] * (1 + i % 5) if i % 3 else [],
            loss_mask=[0, 0] + [1] * (1 + i % 5) if i % 4 else [],
            response_tokens=rng.integers(0, 99, 1 + i % 5).tolist(),
        )
        for i in range(300)
    ]
    buffer = TrajectoryBuffer(max_size=200)
    for start in range(0, 300, 7):  # chunks of all sizes, joined ones and halves of evicted ones
        buffer.add_batch(rows[start : start + 7])
    held = rows[-len(buffer) :]
    for picked, plain in (
        (buffer.get_available(3), held),
        (buffer.get_available(3)[5:170:3], held[5:170:3]),
        (buffer.get_available(3)[::-1], held[::-1]),
        (buffer.get_available(3)[::-1][:40][10:30], held[::-1][10:30]),
    ):
        whole = TrajectoryBatch(plain)
        assert len(picked) == picked.batch_size == len(plain)
        assert list(picked) == list(whole)
        assert [picked[i] for i in (0, 3, -1)] == [whole[i] for i in (0, 3, -1)]
        assert picked.rewards == whole.rewards
        assert (picked.num_tokens, picked.max_length) == (whole.num_tokens, whole.max_length)
        assert picked.compute_padding_ratio() == whole.compute_padding_ratio()
        assert picked.get_version_stats() == whole.get_version_stats()
        assert list(picked.rows().ids) == [t.id for t in plain]
        others = whole.to_tensors(extra=["action_mask", "values"])
        for name, tensor in picked.to_tensors(extra=["action_mask", "values"]).items():
            torch.testing.assert_close(tensor, others[name], rtol=0, atol=0, equal_nan=True)
        assert picked == whole
        assert repr(picked) == repr(whole)
        assert TrajectoryBatch(picked) == whole
        assert pickle.loads(pickle.dumps(picked)) == whole
    assert TrajectoryBatch.from_arrow(buffer.get_available(3)) == TrajectoryBatch(held)
    assert len(pickle.dumps(buffer.get_available(3)[:2])) < 20_000, "two rows, not their chunks"


def test_a_batch_stays_as_it_was_drawn() -> None:
    buffer = filled({0: 500})
    before = buffer.get_available(0)
    buffer.remove_stale(100)
    buffer.add_batch([row(i, 1) for i in range(3000)])
    assert ids(before) == [f"t{i}" for i in range(500)]


def test_memory_comes_back_and_slots_are_counted_anew() -> None:
    buffer = TrajectoryBuffer(max_size=1000)
    for start in range(0, 9_000, 250):
        buffer.add_batch([row(i, start // 250, group_id=f"g{i // 4}") for i in range(start, start + 250)])
    rows = buffer._rows
    assert ids(buffer.get_available(35))[-1] == "t8999"
    assert len(buffer) == 1000
    assert len(rows._held.values) < 2 * 1000 + 4096 + 500
    assert sum(len(chunk) for chunk in rows._chunks if chunk is not None) < 3500
    assert len(rows.groups._code) < 4000
    assert len(buffer.sample(3, 35, whole_groups=True)) == 12


def held_for_nothing(buffer: TrajectoryBuffer) -> int:
    """Rows that chunks hold and the buffer does not, those of chunks about to be let go of included."""
    chunks = [chunk for chunk in buffer._rows._chunks if chunk is not None]
    return sum(map(len, [*chunks, *buffer._rows._emptied])) - len(buffer)


def test_a_buffer_that_only_removes_holds_little() -> None:
    """Whole chunks go at once but for a remainder, what is left of others at the next add."""
    buffer = TrajectoryBuffer(max_size=10**5, max_staleness=0)
    for version in range(11):  # a chunk each: smaller ones would be joined
        buffer.add_batch([row(i, version) for i in range(600)])
    for version in range(1, 11):
        buffer.remove_stale(version)
        waiting = sum(map(len, buffer._rows._emptied))
        assert waiting <= len(buffer) // 8 + 1024
    assert (len(buffer), waiting) == (600, 600)
    buffer.add(row(10**6, 40))
    assert buffer._rows._emptied == []
    assert held_for_nothing(buffer) == 0
    buffer.remove_stale(10**6)
    buffer.clear()
    assert (buffer._rows._chunks, buffer._rows._emptied, len(buffer._rows._held.values)) == ([], [], 0)
    once = filled({0: 12_000}, max_size=10**5, max_times_sampled=1)
    while len(once) > 200:
        once.sample(100, 0)
    once.add(row(10**6))
    assert held_for_nothing(once) <= len(once) + len(once) // 8 + 1024


def test_what_a_large_buffer_held_for_nothing_gives_a_small_one_no_leave() -> None:
    buffer = TrajectoryBuffer(max_size=10**5, max_staleness=None, max_times_sampled=1)
    buffer.add_batch([row(i) for i in range(20_000)])
    buffer.sample(9_000, 0)
    buffer.add(row(10**6))  # more than half of each chunk is held, so all of it stays
    assert held_for_nothing(buffer) == 9_000
    buffer.sample(20_000, 0)
    for i in range(20):
        buffer.add_batch([row(j) for j in range(1100)])
        buffer.sample(len(buffer) - 10 - i, 0)
        buffer.add(row(i))
        assert held_for_nothing(buffer) <= len(buffer) + len(buffer) // 8 + 1024 + 1


def test_rows_of_a_slice_do_not_hold_the_rest() -> None:
    table = TrajectoryBatch([row(i, response_tokens=[3] * 100) for i in range(20_000)]).to_arrow()
    (whole,) = table.to_batches()
    for given, limits in ((whole.slice(7, 3), {}), (table.slice(7, 3), {}), (whole, {"max_size": 100})):
        buffer = TrajectoryBuffer(**limits)
        buffer.add_batch(given)
        chunks = [chunk.batch for chunk in buffer._rows._chunks if chunk is not None]
        assert sum(c.get_total_buffer_size() for c in chunks) < whole.nbytes / 2
        assert (
            buffer.get_available(0)
            .to_arrow()
            .equals(table.slice(7, 3) if len(buffer) == 3 else table.slice(20_000 - len(buffer)))
        )


# Threads


def test_adders_and_samplers_at_once_lose_nothing() -> None:
    buffer = TrajectoryBuffer(max_size=10**6, max_staleness=None)
    errors: list[BaseException] = []
    removed: list[int] = []
    ended = threading.Event()

    def guarded(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
                ended.set()

        return threading.Thread(target=run)

    def adder(number: int) -> None:
        for i in range(40):
            buffer.add_batch([row(j, i, id=f"{number}/{i}/{j}") for j in range(5)])

    def sampler() -> None:
        while not ended.is_set():
            drawn = ids(buffer.sample(7, 40, stratified=True))
            assert len(drawn) == len(set(drawn))
            buffer.get_stats()

    adders = [guarded(lambda n=n: adder(n)) for n in range(3)]
    others = [guarded(sampler), guarded(lambda: removed.append(buffer.wait_for(300, 40)))]
    for thread in adders + others:
        thread.start()
    for thread in adders:
        thread.join()
    ended.set()
    for thread in others:
        thread.join()
    assert errors == []
    assert removed == [True]
    assert Counter(ids(buffer.get_available(40))) == {
        f"{n}/{i}/{j}": 1 for n in range(3) for i in range(40) for j in range(5)
    }


def test_waiting_for_rows() -> None:
    buffer = filled({3: 2}, max_staleness=1)
    assert buffer.wait_for(2, 4)
    assert not buffer.wait_for(3, 4, timeout=0.01)
    assert not buffer.wait_for(1, 5, timeout=0)
    waiting = threading.Thread(target=lambda: found.append(buffer.wait_for(4, 5)))
    found: list[bool] = []
    waiting.start()
    buffer.add_batch([row(i, 5) for i in range(3)])
    assert found == []
    buffer.add(row(9, 6))
    waiting.join()
    assert found == [True]
    with pytest.raises(InputError, match="n is 10001, and the buffer holds 10000 rows at most"):
        buffer.wait_for(10_001, 5)


def test_each_of_several_waiters_gets_what_it_waits_for() -> None:
    buffer = TrajectoryBuffer(max_staleness=1)
    found: dict[str, bool] = {}

    def wait(name: str, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.__setitem__(name, buffer.wait_for(*args)))
        thread.start()
        return thread

    few, many = wait("few", 2, 3), wait("many", 4, 3, 60)
    never = wait("never", 1, 9, 0.05)  # these rows are stale there
    buffer.add_batch([row(i, 3) for i in range(2)])
    few.join()
    never.join()
    assert found == {"few": True, "never": False}
    buffer.add_batch([row(i, 3) for i in range(2, 4)])
    many.join()
    assert found["many"]


def test_the_import_is_light() -> None:
    code = "from trajstore import TrajectoryBuffer; import sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {"torch", "polars", "duckdb"}.isdisjoint(loaded.split())
