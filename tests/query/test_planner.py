"""What-if questions against plain counting."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import (
    PolicyVersion,
    QueryError,
    Trajectory,
    TrajectoryBatch,
    TrajectoryStatus,
    ValidationError,
)
from trajstore.loader import TrajectoryLoader
from trajstore.plan import Recipe
from trajstore.query.planner import REASONS, forecast, paddings
from trajstore.query.survey import facts, survey

AT = 6


@st.composite
def rollouts(draw: st.DrawFn) -> Trajectory:
    n = draw(st.integers(1, 12))
    return Trajectory(
        group_id=draw(st.sampled_from(["a", "b", "c", None])),
        response_tokens=[1] * n,
        version=draw(st.sampled_from([None, *(PolicyVersion(v) for v in (1, 4, 6, 7))])),
        status=draw(st.sampled_from([*[TrajectoryStatus.COMPLETED] * 4, TrajectoryStatus.ABORTED])),
        source=draw(st.sampled_from(["x", "y", None])),
    )


def gap_of(row: Trajectory) -> int | None:
    return None if row.version is None else AT - row.version.version_id


def reason(row: Trajectory, rows: list[Trajectory], most: int | None, group: int | None, budget: int) -> Any:
    """Why a row goes; with groups, what is true of one completed member is true of all."""
    done = TrajectoryStatus.COMPLETED
    mates = [row]
    if group is not None and row.group_id is not None:
        mates = [r for r in rows if r.group_id == row.group_id and r.status is done]
    if row.status is not done:
        return "not completed"
    if most is not None and any(gap_of(r) is None for r in mates):
        return "unknown version"
    if most is not None and any(g > most for r in mates if (g := gap_of(r)) is not None):
        return "stale"
    if group is not None and (row.group_id is None or len(mates) < group):
        return "group incomplete"
    return "too long" if any(len(r.tokens) > budget for r in mates) else None


@given(
    st.lists(rollouts(), max_size=20),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([None, 2, 3]),
    st.integers(8, 30),
)
@settings(max_examples=30, deadline=None)
def test_what_is_dropped_and_why(
    made: list[Trajectory], most: int | None, group: int | None, budget: int
) -> None:
    batch = TrajectoryBatch(made)
    rows = list(batch)
    found = forecast(facts(batch, at=AT), Recipe(max_tokens=budget), max_staleness=most, group=group)
    why = [reason(row, rows, most, group, budget) for row in rows]
    assert found.rows == len(rows)
    assert found.kept == why.count(None)
    assert found.dropped == {r: why.count(r) for r in REASONS if r in why}
    for cell in found.by_task.to_dicts():
        mine = [w for w, row in zip(why, rows, strict=True) if row.source == cell["task"]]
        assert cell["kept"] == mine.count(None)
        assert {r: cell[r] for r in REASONS} == {r: mine.count(r) for r in REASONS}
        kept = [
            len(r.tokens) for w, r in zip(why, rows, strict=True) if w is None and r.source == cell["task"]
        ]
        assert cell["kept_length"] == (pytest.approx(np.mean(kept)) if kept else None)
    tokens = sum(len(r.tokens) for w, r in zip(why, rows, strict=True) if w is None)
    assert found.batches * found.tokens_per_batch == pytest.approx(tokens)
    assert found.most_tokens <= budget
    gaps = [max(0, g) for w, r in zip(why, rows, strict=True) if w is None and (g := gap_of(r)) is not None]
    weights = [1 / (g + 1) for g in gaps]
    if weights:
        expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
        assert found.ess_freshness == pytest.approx(expected)
    else:
        assert math.isnan(found.ess_freshness)


def test_padding_is_that_of_the_loaders_own_batches() -> None:
    rng = np.random.default_rng(0)
    rows = [
        Trajectory(
            id=str(i),
            prompt_tokens=[1],
            response_tokens=[2] * int(n),
            version=PolicyVersion(1),
            status=TrajectoryStatus.COMPLETED,
        )
        for i, n in enumerate(rng.integers(1, 60, 100))
    ]
    batch = TrajectoryBatch(rows)
    found = forecast(facts(batch), Recipe(batch_size=16, bucket_window=2))
    loader = TrajectoryLoader(batch, batch_size=16, bucket_window=2, shuffle=True)
    padded = list(loader)
    assert found.batches == len(padded)
    size = sum(b["input_ids"].numel() for b in padded)
    # The loader's shuffle is another one, its padding is of the same kind.
    assert found.padding == pytest.approx(1 - sum(b["num_tokens"] for b in padded) / size, abs=0.1)
    one = forecast(facts(batch), Recipe(batch_size=1))
    assert (one.padding, one.batches, one.rows_per_batch) == (0, 100, 1)
    assert forecast(facts(batch), Recipe(max_tokens=64, layout="packed")).padding == 0


def test_ranks_and_importance_weights() -> None:
    rows = [
        Trajectory(
            response_tokens=[1, 2],
            behavior_log_probs=[-1.0, -1.0],
            log_probs=[-1.0, -1.0 + (i % 2)],
            version=PolicyVersion(0),
            status=TrajectoryStatus.COMPLETED,
        )
        for i in range(8)
    ]
    batch = TrajectoryBatch(rows)
    assert forecast(facts(batch), Recipe(batch_size=2, world_size=2)).batches == 4
    assert math.isnan(forecast(facts(batch), Recipe(batch_size=2)).ess_rows)
    found = forecast(survey(batch), Recipe(batch_size=2))
    assert found.ess_rows == pytest.approx((1 + math.e) ** 2 / (2 * (1 + math.e**2)))
    assert found.ess_tokens == pytest.approx((3 + math.e) ** 2 / (4 * (3 + math.e**2)))


def test_a_task_of_which_nothing_is_left_is_named() -> None:
    """P08: 50 short rows of gap 0 and 50 long ones of gap 4, gated at 3."""
    easy = Trajectory(
        response_tokens=[1] * 50,
        version=PolicyVersion(4),
        source="easy",
        status=TrajectoryStatus.COMPLETED,
    )
    hard = replace(easy, response_tokens=[1] * 800, version=PolicyVersion(0), source="hard")
    batch = TrajectoryBatch([easy] * 50 + [hard] * 50)
    found = forecast(facts(batch), Recipe(batch_size=10), max_staleness=3)
    assert found.starved == ["hard"]
    by = {cell["task"]: cell for cell in found.by_task.to_dicts()}
    assert (by["easy"]["kept"], by["hard"]["kept"], by["hard"]["stale"]) == (50, 0, 50)
    assert (by["easy"]["kept_length"], by["hard"]["dropped_length"]) == (50, 800)
    assert forecast(facts(batch), Recipe(batch_size=10), max_staleness=4).starved == []


def test_no_rows_and_bad_numbers() -> None:
    nothing = facts(TrajectoryBatch())
    found = forecast(nothing, Recipe(batch_size=4), max_staleness=2, group=2)
    assert (found.rows, found.kept, found.batches, found.padding) == (0, 0, 0, 0.0)
    assert len(paddings(nothing.frame)) == 0
    with pytest.raises(QueryError, match="max_staleness is -1"):
        forecast(nothing, Recipe(batch_size=4), max_staleness=-1)
    with pytest.raises(QueryError, match="group is 0"):
        forecast(nothing, Recipe(batch_size=4), group=0)


def test_sorted_plans_pad_least_and_every_plan_has_all_tokens() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(3, 1, 400) + 1
    rows = [Trajectory(id=str(i), response_tokens=[1] * int(n)) for i, n in enumerate(lengths)]
    table = paddings(facts(TrajectoryBatch(rows)).frame)
    assert table["padding"][:4].arg_min() == 3
    total = sum(len(r.response_tokens) for r in rows)
    for line in table.to_dicts():
        assert line["batches"] * line["tokens"] == pytest.approx(total)
    assert table["padding"][1] > table["padding"][2]


def test_a_group_larger_than_a_batch_is_refused_by_the_plan() -> None:
    rows = [Trajectory(group_id="g", response_tokens=[1] * 8, status=TrajectoryStatus.COMPLETED)] * 4
    with pytest.raises((ValidationError, ValueError)):
        forecast(facts(TrajectoryBatch(rows)), Recipe(max_tokens=16, whole_groups=True))


def test_only_completed_members_speak_for_their_group() -> None:
    def member(version: int, status: TrajectoryStatus) -> Trajectory:
        return Trajectory(group_id="g", response_tokens=[1], version=PolicyVersion(version), status=status)

    done, aborted = TrajectoryStatus.COMPLETED, TrajectoryStatus.ABORTED
    rows = [member(5, done), member(5, done), member(0, aborted)]
    kept = forecast(facts(TrajectoryBatch(rows)), Recipe(batch_size=2), max_staleness=1, group=2)
    assert kept.dropped == {"not completed": 1}
    rows = [member(5, done), member(0, done), member(5, aborted)]
    lost = forecast(facts(TrajectoryBatch(rows)), Recipe(batch_size=2), max_staleness=1, group=2)
    assert lost.dropped == {"not completed": 1, "stale": 2}


@pytest.mark.parametrize(
    ("worst", "reason"),
    [
        ({"version": None}, "unknown version"),
        ({"version": PolicyVersion(0)}, "stale"),
        ({"response_tokens": [1] * 9}, "too long"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_completed_member_takes_its_group_along(worst: Any, reason: str, place: int) -> None:
    fine = Trajectory(
        group_id="g",
        response_tokens=[1],
        version=PolicyVersion(5),
        status=TrajectoryStatus.COMPLETED,
    )
    bad = replace(fine, **worst)
    others = [replace(fine, group_id="h")] * 3
    recipe = Recipe(max_tokens=8)

    def dropped(worst_row: Trajectory, group: int | None) -> dict[str, int]:
        rows = [worst_row if i == place else fine for i in range(3)] + others
        return dict(
            forecast(facts(TrajectoryBatch(rows), at=5), recipe, max_staleness=1, group=group).dropped
        )

    assert dropped(bad, 2) == {reason: 3}, "no group is split"
    assert dropped(bad, None) == {reason: 1}, "without groups a row goes by itself"
    aborted = replace(bad, status=TrajectoryStatus.ABORTED)
    assert dropped(aborted, 2) == {"not completed": 1}, "an aborted member takes nobody along"
