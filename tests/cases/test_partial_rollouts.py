"""Theme: aborted generations that are continued (cases A02, P*), and groups in the buffer (G*)."""

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from trajstore import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryBatch,
    TrajectoryBuffer,
    TrajectoryStatus,
    TrajectoryStore,
    ValidationError,
)
from trajstore.plan import Recipe
from trajstore.query import fresh, metrics
from trajstore.query.doctor import doctor
from trajstore.query.planner import forecast
from trajstore.query.survey import facts

ABORTED = TrajectoryStatus.ABORTED


def _begun(name: str, **given: Any) -> PartialTrajectory:
    return PartialTrajectory(id=name, prompt_tokens=[1], status=ABORTED, **given)


def test_A02_a_continuation_extends_the_mask_it_was_given(case: Any) -> None:
    first, second = case["segments"]
    version = PolicyVersion(first["version"])
    begun = _begun("a02", response_tokens=first["response_ids"], behavior_log_probs=first["logprobs"])
    begun.loss_mask, begun.version = first["loss_mask"], version
    done = begun.continue_with(second["response_ids"], second["logprobs"], second["version"])
    (back,) = TrajectoryBatch([done])
    assert back.loss_mask == [0, 0, 0, 0, 1, 1]
    assert back.response_length == 5


def test_P01_tokens_of_three_versions_keep_them(case: Any, tmp_path: Path) -> None:
    row = _begun("p01")
    for segment in case["segments"]:
        status = ABORTED if segment["finish"] == "abort" else TrajectoryStatus.COMPLETED
        tokens = [5] * segment["n_tokens"]
        row = row.continue_with(tokens, [-1.0] * len(tokens), segment["version"], status=status)
    per_token = [s.version.version_id for s in row.version_segments for _ in range(s.start, s.end)]
    assert per_token == [2] * 2 + [4] * 2 + [6] * 8
    assert len(row.version_segments) == 3
    buffer = TrajectoryBuffer(max_staleness=case["max_staleness"])
    buffer.add(row)
    assert len(buffer.get_available(case["trainer_version"])) == 0, "the oldest token decides"
    assert buffer.get_stats(case["trainer_version"])["max_staleness"] == 4


def test_P04_an_aborted_row_without_a_version_is_neither_old_nor_fresh(case: Any, tmp_path: Path) -> None:
    record = case["record"]
    row = _begun(record["traj_id"], response_tokens=record["response_ids"], version=None)
    store = TrajectoryStore.create(tmp_path / "s")
    with TrajectoryBuffer(store=store) as buffer:
        buffer.add_partial(row)
        assert buffer.get_partials_for_prompts(current_version=0) == []
        (back,) = buffer.get_partials_for_prompts()
        assert buffer.get_stats()["partial_size"] == 1
    assert (back.version, back.response_length) == (None, 0)
    assert len(store.partials()) == 1
    assert len(store.partials(0, 10)) == 0
    store.append([Trajectory(id="new", tokens=[1], prompt_length=1, version=PolicyVersion(0))])
    gated = store.scan(where=fresh(at=0, max_staleness=10**9))
    assert [t.id for t in gated.to_trajectories()] == ["new"]
    (gate,) = gated.explain()
    assert (gate.dropped, gate.unknown_version) == (1, 1)
    assert "unknown version: 0 of 1 kept" in str(gated.explain())
    survey = facts(store.scan(), at=0)
    (lengths,) = metrics.lengths(survey.frame).filter(pl.col("version_id").is_null()).to_dicts()
    assert (lengths["rows"], lengths["mean"]) == (1, 0)
    dropped = forecast(survey, Recipe(batch_size=2), max_staleness=0).dropped
    assert dropped == {"not completed": 2}
    store.append([Trajectory(id="done", tokens=[1], prompt_length=0, status=TrajectoryStatus.COMPLETED)])
    dropped = forecast(facts(store.scan(), at=0), Recipe(batch_size=2), max_staleness=0).dropped
    assert dropped == {"not completed": 2, "unknown version": 1}
    (finding,) = [f for f in doctor(store.scan()) if f.check == "unknown-version"]
    assert finding.rows == 2


def test_P05_an_empty_second_abort_wipes_nothing(case: Any, tmp_path: Path) -> None:
    row = _begun("p05")
    store = TrajectoryStore.create(tmp_path / "s")
    store.append([row])
    for event in case["events"]:
        tokens = event["response_ids"]
        status = TrajectoryStatus(event["status"])
        row = row.continue_with(tokens, [-1.0] * len(tokens), event["version"], status=status)
        store.append([row])
    (done,) = store.scan("status = 'completed'").to_trajectories()
    assert done.response_tokens == [9, 9, 9, 4, 2]
    assert [(s.start, s.end, s.version.version_id) for s in done.version_segments] == [(1, 4, 1), (4, 6, 3)]
    assert store.scan("start_rollout_id = 'p05' or id = 'p05'").count() == 4
    assert len(store.partials()) == 0


def test_P06_the_budget_counts_tokens_already_spent(case: Any) -> None:
    first, second = case["segments"]
    budget = case["max_response_len"]
    row = _begun("p06").continue_with([5] * first["n"], None, first["version"], status=ABORTED)
    with pytest.raises(ValidationError, match="14 response tokens exceed max_response_length 8"):
        row.continue_with([5] * second["n"], None, second["version"], max_response_length=budget)
    assert row.continue_with([5, 5], None, 2, max_response_length=budget).response_length == budget


def test_G04_a_buffer_never_gives_a_fraction_of_a_group(case: Any) -> None:
    buffer = TrajectoryBuffer()
    for name, rewards in case["groups"].items():
        buffer.add_batch(
            [
                Trajectory(
                    tokens=[1, 2], prompt_length=1, group_id=name, group_size=4, reward=reward,
                    version=PolicyVersion(0), status=TrajectoryStatus.COMPLETED,
                )
                for reward in rewards
            ]
        )  # fmt: skip
    for n in (1, 2, 3):
        drawn = Counter(t.group_id for t in buffer.sample(n, 0, whole_groups=True))
        assert set(drawn.values()) == {4}
        assert len(drawn) == min(n, 2)


def test_G05_a_stratum_that_is_too_small_is_taken_whole(case: Any) -> None:
    buffer = TrajectoryBuffer()
    for version, count in enumerate(case["strata"].values()):
        buffer.add_batch(
            [Trajectory(tokens=[1], version=PolicyVersion(version), status=TrajectoryStatus.COMPLETED)]
            * count
        )
    n = case["n_per_stratum"] * len(case["strata"])
    drawn = buffer.sample(n, 1, stratified=True)
    assert Counter(t.version.version_id for t in drawn if t.version) == {0: 3, 1: 13}
    assert len({t.id for t in drawn}) == n
    assert len(buffer.sample(100, 1, stratified=True)) == 23
    assert len(buffer.sample(0, 1, stratified=True)) == 0
    with pytest.raises(ValueError, match="n is -1"):
        buffer.sample(-1, 1)
