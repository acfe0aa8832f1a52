"""Cases that metrics and the doctor answer: groups without signal, mixed versions, clocks, NaN rewards."""

import math
from typing import Any

import pytest

from trajstore import PolicyVersion, Trajectory, TrajectoryBatch, TrajectoryStatus, VersionSegment
from trajstore.plan import Recipe
from trajstore.query import metrics
from trajstore.query.doctor import doctor
from trajstore.query.planner import forecast
from trajstore.query.survey import facts, survey


def completed(**fields: Any) -> Trajectory:
    return Trajectory(**{"response_tokens": [1], "status": TrajectoryStatus.COMPLETED, **fields})


def test_G03_equal_rewards_have_no_variance_and_no_advantage(case: Any) -> None:
    rows = [completed(group_id=name, reward=r) for name, rewards in case["groups"].items() for r in rewards]
    frame = survey(TrajectoryBatch(rows)).frame
    found = {g["group_id"]: g for g in metrics.groups(frame).to_dicts()}
    assert {name: g["zero_variance"] for name, g in found.items()} == {"a": True, "b": True, "c": False}
    assert found["a"]["reward_std"] == found["b"]["reward_std"] == 0
    by_group: dict[str, list[float]] = {}
    for row, advantage in zip(rows, metrics.advantages(frame), strict=True):
        by_group.setdefault(str(row.group_id), []).append(float(advantage))
    assert by_group["a"] == [0.0] * 3
    assert by_group["b"] == [0.0] * 7
    assert 1 < max(map(abs, by_group["c"])) < 10
    (finding,) = [f for f in doctor(TrajectoryBatch(rows)) if f.check == "zero-variance-group"]
    assert finding.rows == 10
    rounded = [
        completed(group_id="d", reward=r) for r in (0.3, 0.1 + 0.2, 0.3)
    ]  # a sum's rounding is no signal
    frame = survey(TrajectoryBatch(rounded)).frame
    assert metrics.groups(frame)["zero_variance"].to_list() == [True]
    assert metrics.advantages(frame).tolist() == [0.0] * 3


def test_G04_a_constant_group_has_no_signal_whatever_its_mean(case: Any) -> None:
    rows = [completed(group_id=name, reward=r) for name, rewards in case["groups"].items() for r in rewards]
    found = metrics.groups(facts(TrajectoryBatch(rows)).frame)
    assert found.select("group_id", "rows", "zero_variance").rows() == [
        ("const", 4, True),
        ("mixed", 4, False),
    ]


def test_P01_a_row_of_three_versions_is_told(case: Any) -> None:
    at, segments = 0, []
    for part in case["segments"]:
        segments.append(VersionSegment(at, at + part["n_tokens"], PolicyVersion(part["version"])))
        at += part["n_tokens"]
    row = completed(id="x", response_tokens=[1] * at, version_segments=segments)
    found = {f.check: f for f in doctor(TrajectoryBatch([row]), at=case["trainer_version"])}
    assert "4 apart at most" in found["mixed-versions"].what
    assert "no-version-boundaries" not in found
    kept = forecast(
        facts(TrajectoryBatch([row]), at=case["trainer_version"]),
        Recipe(batch_size=1),
        max_staleness=case["max_staleness"],
    )
    assert kept.dropped == {"stale": 1}, "by the oldest token: a gap of 4"


def test_P03_a_row_of_the_future_has_a_negative_gap_and_a_finding(case: Any) -> None:
    rows = [completed(id=str(v), version=PolicyVersion(v)) for v in case["versions_uint32"]]
    batch = TrajectoryBatch(rows)
    assert facts(batch, at=case["trainer_version"]).frame["gap"].to_list() == [2, 0, -2]
    (finding,) = [f for f in doctor(batch, at=case["trainer_version"]) if f.check == "negative-gap"]
    assert finding.ids == ("7",)
    assert "by 2 at most" in finding.what


def test_P08_a_task_that_a_gate_starves_is_told() -> None:
    easy = completed(response_tokens=[1] * 500, version=PolicyVersion(4), source="easy")
    hard = completed(response_tokens=[1] * 8000, version=PolicyVersion(0), source="hard")
    batch = TrajectoryBatch([easy] * 50 + [hard] * 50)
    told = forecast(facts(batch), Recipe(batch_size=8), max_staleness=3)
    assert {t["task"]: (t["kept"], t["stale"]) for t in told.by_task.to_dicts()} == {
        "easy": (50, 0),
        "hard": (0, 50),
    }
    assert told.starved == ["hard"]
    (line,) = metrics.staleness(facts(batch).frame.filter(source="hard")).filter(max_staleness=0).to_dicts()
    assert (line["share"], line["dropped_length"]) == (0, 8000)


def test_P10_order_is_that_of_versions_and_of_the_store_never_of_clocks(case: Any) -> None:
    first, second = case["records"]
    early, late = (
        completed(id=r["traj_id"], version=PolicyVersion(r["policy_version"], timestamp=stamp))
        for r, stamp in ((first, 90.0), (second, 10.0))
    )
    batch = TrajectoryBatch([early, late])
    assert facts(batch).frame.select("id", "gap").rows() == [("x", 1), ("y", 0)]
    assert not [f for f in doctor(batch) if "backwards" in f.check]


def test_N03_a_nan_reward_is_an_error_of_its_own_and_in_no_mean() -> None:
    rows = [completed(id=str(i), reward=r) for i, r in enumerate([1.0, 2.0, math.nan, 3.0])]
    (finding,) = [f for f in doctor(TrajectoryBatch(rows)) if f.check == "nan-reward"]
    assert (finding.level, finding.ids) == ("error", ("2",))
    (age,) = metrics.ages(facts(TrajectoryBatch(rows)).frame).to_dicts()
    assert age["reward"] == pytest.approx(2.0)
    assert age["not_finite"] == 1
