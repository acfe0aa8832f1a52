"""The numbers of logged rollouts against plain definitions."""

import math
import statistics
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import PolicyVersion, Trajectory, TrajectoryBatch, TrajectoryStatus
from trajstore.query import metrics
from trajstore.query.measures import CLIP
from trajstore.query.survey import facts, survey

CURRENT = 6


@st.composite
def rollouts(draw: st.DrawFn) -> Trajectory:
    n = draw(st.integers(1, 5))
    nats = st.floats(-6, 0, width=32)
    both = draw(st.booleans())
    return Trajectory(
        group_id=draw(st.sampled_from(["a", "b", None])),
        group_size=draw(st.sampled_from([2, None])),
        prompt_tokens=[9],
        response_tokens=draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        behavior_log_probs=draw(st.lists(nats, min_size=n, max_size=n)),
        log_probs=draw(st.lists(nats, min_size=n, max_size=n)) if both else [],
        log_probs_version=draw(st.sampled_from([4, CURRENT, None])) if both else None,
        reward=draw(st.sampled_from([0.0, 0.1, 1.0, math.nan, math.inf])),
        version=draw(st.sampled_from([None, PolicyVersion(2), PolicyVersion(4), PolicyVersion(8)])),
        status=draw(st.sampled_from([TrajectoryStatus.COMPLETED, TrajectoryStatus.ABORTED])),
        finish_reason=draw(st.sampled_from([None, "stop", "length"])),
        terminated=draw(st.sampled_from([None, True, False])),
        source=draw(st.sampled_from(["x", "y"])),
    )


def version_of(row: Trajectory) -> int | None:
    return None if row.version is None else row.version.version_id


def gap_of(row: Trajectory, at: int | None = None) -> int | None:
    version = version_of(row)
    return None if version is None else (CURRENT if at is None else at) - version


def by(found: pl.DataFrame, *names: str) -> dict[Any, dict[str, Any]]:
    keyed = {tuple(row[n] for n in names): row for row in found.to_dicts()}
    assert len(keyed) == len(found)
    return {k[0] if len(names) == 1 else k: v for k, v in keyed.items()}


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


@given(st.lists(rollouts(), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_every_table_is_that_of_plain_loops(made: list[Trajectory]) -> None:
    batch = TrajectoryBatch(made)
    frame, rows = survey(batch, at=CURRENT).frame, list(batch)
    check_ages(frame, rows)
    check_drift(frame, rows)
    check_groups(frame, rows)
    check_outcomes(frame, rows)
    check_staleness(frame, rows)


def check_ages(frame: pl.DataFrame, rows: list[Trajectory]) -> None:
    found = by(metrics.rewards(frame), "task", "version_id")
    assert set(found) == {(row.source, version_of(row)) for row in rows}
    for (task, version), cell in found.items():
        mine = [r for r in rows if (r.source, version_of(r)) == (task, version)]
        finite = [r.reward for r in mine if math.isfinite(r.reward)]
        assert cell["rows"] == len(mine)
        assert cell["tokens"] == sum(r.total_length for r in mine)
        assert cell["not_finite"] == len(mine) - len(finite)
        assert cell["reward"] == pytest.approx(mean(finite)) if finite else cell["reward"] is None
    assert {r["gap"] for r in metrics.ages(frame).to_dicts()} == {gap_of(r) for r in rows}


def check_drift(frame: pl.DataFrame, rows: list[Trajectory]) -> None:
    both = [r for r in rows if r.log_probs]
    found = by(metrics.drift(frame), "drift_gap")

    def at(row: Trajectory) -> int | None:
        return gap_of(row, row.log_probs_version)

    assert set(found) == {at(r) for r in both}
    for gap, cell in found.items():
        mine = [r for r in both if at(r) == gap]
        ratios = [  # the prompt's token is no action
            [p - b for p, b in zip(r.log_probs[1:], r.behavior_log_probs[1:], strict=True)] for r in mine
        ]
        flat = [x for row in ratios for x in row]
        weights = [math.exp(x) for x in flat]
        of_rows = [math.exp(sum(row)) for row in ratios]
        expected = {
            "rows": len(mine),
            "tokens": len(flat),
            "log_ratio": mean(flat),
            "abs_log_ratio": mean(list(map(abs, flat))),
            "max_log_ratio": max(map(abs, flat)),
            "k1": -(mean(flat) or 0.0),
            "k2": mean([x * x / 2 for x in flat]),
            "k3": mean([math.exp(x) - 1 - x for x in flat]),
            "ratio": mean(weights),
            "ess_tokens": sum(weights) ** 2 / (len(flat) * sum(w * w for w in weights)),
            "ess_rows": sum(of_rows) ** 2 / (len(mine) * sum(w * w for w in of_rows)),
            "clipped_low": mean([w < 1 - CLIP for w in weights]),
            "clipped_high": mean([w > 1 + CLIP for w in weights]),
        }
        for name, value in expected.items():
            assert cell[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def check_groups(frame: pl.DataFrame, rows: list[Trajectory]) -> None:
    found = by(metrics.groups(frame), "group_id")
    grouped = [r for r in rows if r.group_id]
    assert list(found) == list(dict.fromkeys(r.group_id for r in grouped))
    for name, cell in found.items():
        mine = [r for r in grouped if r.group_id == name]
        finite = [r.reward for r in mine if math.isfinite(r.reward)]
        assert cell["rows"] == len(mine)
        assert cell["responses"] == len({tuple(r.tokens[1:]) for r in mine})
        assert cell["prompts"] == 1
        expected = len(set(finite)) == 1 if len(finite) > 1 else None
        assert cell["zero_variance"] is expected
        if len(finite) > 1:
            assert cell["reward_std"] == pytest.approx(statistics.stdev(finite))
    for row, advantage in zip(rows, metrics.advantages(frame), strict=True):
        finite = [r.reward for r in rows if r.group_id == row.group_id and math.isfinite(r.reward)]
        if row.group_id is None or not math.isfinite(row.reward) or len(finite) < 2:
            assert math.isnan(advantage)
        elif len(set(finite)) == 1:
            assert advantage == 0
        else:
            expected = (row.reward - sum(finite) / len(finite)) / statistics.stdev(finite)
            assert advantage == pytest.approx(expected)


def check_outcomes(frame: pl.DataFrame, rows: list[Trajectory]) -> None:
    for version, cell in by(metrics.outcomes(frame), "version_id").items():
        mine = [r for r in rows if version_of(r) == version]
        cut = [
            r.status is TrajectoryStatus.COMPLETED and (r.finish_reason == "length" or r.terminated is False)
            for r in mine
        ]
        assert cell["truncated"] == pytest.approx(mean(cut))
        assert cell["aborted"] == pytest.approx(mean([r.status is TrajectoryStatus.ABORTED for r in mine]))
    for version, cell in by(metrics.lengths(frame), "version_id").items():
        mine = sorted(r.response_length for r in rows if version_of(r) == version)
        assert cell["mean"] == pytest.approx(mean(mine))
        assert (cell["longest"], cell["p50"] in mine, cell["p90"] in mine) == (mine[-1], True, True)


def check_staleness(frame: pl.DataFrame, rows: list[Trajectory]) -> None:
    found = by(metrics.staleness(frame), "task", "max_staleness")
    gaps = sorted({0, *(g for r in rows if (g := gap_of(r)) is not None and g > 0)})
    assert set(found) == {(task, gap) for task in {r.source for r in rows} for gap in gaps}
    for (task, most), cell in found.items():
        mine = [r for r in rows if r.source == task]
        kept = [r for r in mine if (g := gap_of(r)) is not None and g <= most]
        assert cell["rows"] == len(kept)
        assert cell["share"] == pytest.approx(len(kept) / len(mine))
        if kept:
            assert cell["kept_length"] == pytest.approx(mean([r.total_length for r in kept]))


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=20), st.floats(-500, 500))
@settings(max_examples=50, deadline=None)
def test_effective_sample_size(log_weights: list[float], shift: float) -> None:
    found = metrics.ess(np.array(log_weights))
    assert 1 / len(log_weights) <= found * (1 + 1e-9)
    assert found <= 1 + 1e-9
    assert metrics.ess(np.array(log_weights) + shift) == pytest.approx(found, rel=1e-6)
    assert metrics.ess(np.zeros(len(log_weights))) == 1


def test_no_rows() -> None:
    frame = survey(TrajectoryBatch()).frame
    for table in (metrics.ages, metrics.drift, metrics.groups, metrics.outcomes, metrics.lengths):
        assert len(table(frame)) == 0
    assert len(metrics.staleness(frame)) == 0
    assert math.isnan(metrics.ess(np.zeros(0)))


def test_staleness_keeps_no_less_when_it_allows_more() -> None:
    rows = [Trajectory(response_tokens=[1] * (i + 1), version=PolicyVersion(i)) for i in range(6)]
    kept = metrics.staleness(facts(TrajectoryBatch(rows), at=3).frame)
    assert kept["max_staleness"].to_list() == [0, 1, 2, 3], "negative gaps are kept by every one"
    assert all(a < b for a, b in pairwise(kept["rows"].to_list()))
    assert kept["rows"][0] == 3
