"""Runs the demo once and holds what it wrote and printed against what it claims."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from trajstore.cli.app import app
from trajstore.demo import run_demo, task
from trajstore.demo.offline import ilql_epoch
from trajstore.demo.policy import Policy, load, log_probs_of, newest
from trajstore.demo.rollout import Generation
from trajstore.demo.train import MAX_STALENESS
from trajstore.errors import StoreExistsError, TrajstoreError
from trajstore.query.doctor import doctor
from trajstore.query.metrics import drift
from trajstore.query.survey import survey
from trajstore.store import TrajectoryStore
from trajstore.trajectory import PartialTrajectory, PolicyVersion, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.slow


@dataclass
class Demo:
    path: Path
    store: TrajectoryStore
    rows: list[Trajectory]
    weights: Path
    current: int
    printed: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    weights = folder / "weights"
    weights.mkdir()
    out = io.StringIO()
    run_demo(folder / "the store", seed=0, console=Console(file=out, width=120), weights=weights)
    store = TrajectoryStore.open(folder / "the store")
    current = newest(weights)
    assert current is not None
    return Demo(store.path, store, store.scan().to_trajectories(), weights, current, out.getvalue())


def test_several_writers_append_at_the_same_time(demo: Demo) -> None:
    appends = [s for s in demo.store.history() if s.operation == "append"]
    writers = [s.writer_id for s in appends]
    assert len(set(writers)) >= 2
    changes = sum(a != b for a, b in itertools.pairwise(writers))
    # Each worker writes under the newest version before any may stop, and once more when it stops.
    assert changes >= len(set(writers)), "the commits of the writers are mixed, not one after the other"
    assert sum(s.rows for s in appends) == len(demo.rows)
    assert len({row.id for row in demo.rows}) == len(demo.rows)


def test_version_gaps_are_spread(demo: Demo) -> None:
    gaps = {row.get_version_gap(demo.current) for row in demo.rows}
    assert min(gaps) == 0
    assert len(gaps) >= 3
    assert any(row.has_version_boundaries for row in demo.rows)


def test_aborted_generations_are_continued_under_newer_weights(demo: Demo) -> None:
    by_id = {row.id: row for row in demo.rows}
    aborted = [row for row in demo.rows if row.status is TrajectoryStatus.ABORTED]
    continued = [row for row in demo.rows if row.parent_id is not None]
    assert aborted
    assert continued
    assert all(isinstance(row, PartialTrajectory) and row.continuation_prompt for row in aborted)
    for row in continued:
        assert isinstance(row, PartialTrajectory)
        assert row.parent_id is not None
        parent = by_id[row.parent_id]
        assert isinstance(parent, PartialTrajectory)
        assert parent.status is TrajectoryStatus.ABORTED
        assert row.continuation_count == parent.continuation_count + 1
        assert row.start_rollout_id == parent.start_rollout_id
        assert row.group_id == parent.group_id
        held = len(parent.tokens)
        assert len(row.tokens) > held
        assert row.tokens[:held] == parent.tokens
        assert row.behavior_log_probs[:held] == parent.behavior_log_probs
        after = [s.version.version_id for s in row.version_segments if s.end > held]
        assert min(after) > parent.version_segments[-1].version.version_id


def test_behavior_log_probs_are_those_of_the_version_that_sampled_each_token(demo: Demo) -> None:
    spanning = [row for row in demo.rows if row.has_version_boundaries][:12]
    continued = [row for row in demo.rows if row.parent_id is not None][:12]
    policies = [Policy() for _ in range(demo.current + 1)]
    versions = [load(policy, demo.weights, number) for number, policy in enumerate(policies)]
    for row in [*demo.rows[:12], *demo.rows[-12:], *spanning, *continued]:
        tokens = torch.tensor([row.tokens])
        stored = torch.tensor(row.behavior_log_probs)
        assert [s.start for s in row.version_segments] == [
            row.prompt_length,
            *(s.end for s in row.version_segments[:-1]),
        ]
        assert row.version_segments[-1].end == len(row.tokens)
        for segment in row.version_segments:
            number = segment.version.version_id
            assert versions[number] == segment.version
            with torch.no_grad():
                recomputed = log_probs_of(policies[number], tokens)[0, segment.start : segment.end]
            torch.testing.assert_close(stored[segment.start : segment.end], recomputed, rtol=0, atol=1e-4)


def test_rewards_are_verifiable_and_rise(demo: Demo) -> None:
    for row in demo.rows:
        word = row.prompt.removeprefix("reverse:").removesuffix("=")
        response = row.tokens[row.prompt_length :]
        assert row.reward == pytest.approx(sum(task.token_rewards_of(word, response)))
        assert (row.finish_reason == "stop") == (response[-1] == task.EOS) == row.terminated
    finished = [row for row in demo.rows if row.is_complete]

    def mean(versions: range) -> float:
        rewards = [row.reward for row in finished if row.version and row.version.version_id in versions]
        return sum(rewards) / len(rewards)

    first, last = mean(range(2)), mean(range(demo.current - 1, demo.current + 1))
    assert last > first + 0.1


def test_it_prints_the_tables_and_three_commands_that_work(demo: Demo) -> None:
    for said in (
        "How old is the data",
        "mean |log-ratio|",
        "How much of a batch of 32 is padding?",
        "A stratified sample",
        "input_ids",
        "Did it learn?",
        "Partial rollouts",
        "ESS / n",
        "stored log-probs under the newest weights",
        "What should one know before training on it?",
        "an epoch of ILQL from the same rows",
        "mixed-versions",
        f"max_staleness={MAX_STALENESS}",
    ):
        assert said in demo.printed
    assert "\x1b" not in demo.printed, "no colours in a pipe"
    commands = demo.printed.partition("Try next\n")[2].splitlines()
    assert len(commands) == 3
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "trajstore"
        assert str(demo.path) in arguments
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output


def test_an_ilql_epoch_takes_every_finished_row_and_learns(demo: Demo) -> None:
    finished = demo.store.scan("status = 'completed'")
    policy = Policy()
    load(policy, demo.weights, demo.current)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    epoch = ilql_epoch(finished, policy, seed=0)
    rows = [row for row in demo.rows if row.is_complete]
    assert epoch.rows == len(rows)
    assert epoch.actions == sum(row.response_length for row in rows)
    assert epoch.cut_off == sum(row.terminated is False for row in rows)
    assert f"{epoch.rows:,} rows, {epoch.actions:,} actions, {epoch.steps} steps" in demo.printed
    for term in ("loss_q", "loss_cql"):
        start, end = epoch.terms[term]
        assert end < start, term
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_stored_log_probs_are_those_of_the_newest_weights(demo: Demo) -> None:
    policy = Policy()
    load(policy, demo.weights, demo.current)
    finished = [row for row in demo.rows if row.is_complete]
    assert all(row.log_probs_version == demo.current for row in finished)
    assert not any(row.log_probs for row in demo.rows if not row.is_complete)
    for row in finished[::97]:
        with torch.no_grad():
            recomputed = log_probs_of(policy, torch.tensor([row.tokens]))[0]
        torch.testing.assert_close(torch.tensor(row.log_probs), recomputed, rtol=0, atol=1e-4)


def test_it_ends_with_findings_and_a_report_beside_the_store(demo: Demo) -> None:
    report = demo.path.with_name("the store-report.html")
    assert str(report) in demo.printed
    assert "</html>" in report.read_text()
    found = doctor(demo.store, at=demo.current, by="metadata.task")
    assert found, "a real run has something to tell"
    for finding in found:
        assert finding.check in demo.printed
    assert not [f for f in found if f.level == "error"]
    at_zero = drift(survey(demo.store).finished).row(0, named=True)
    assert at_zero["drift_gap"] == 0
    assert at_zero["abs_log_ratio"] < 1e-3, "the engine and the trainer are the same code here"


def test_a_store_that_exists_is_left_alone(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    with pytest.raises(StoreExistsError):
        run_demo(store.path, console=Console(file=io.StringIO()))
    assert TrajectoryStore.open(store.path).count() == 0


def test_a_worker_that_fails_is_reported_and_leaves_no_store(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "0099.pt").write_bytes(b"not weights")
    with pytest.raises(TrajstoreError, match=r"worker-\d ended with exit code 1: "):
        run_demo(tmp_path / "store", console=Console(file=io.StringIO()), weights=weights)
    assert not (tmp_path / "store").exists()
    assert not multiprocessing.active_children()


def test_a_generation_knows_which_version_sampled_each_token() -> None:
    word = "ab"
    generation = Generation("g", "group", word, task.tokens_of(task.prompt_of(word)))
    start = len(generation.prompt)
    right = task.answer_of(word)
    generation.add(right[0], -0.1, PolicyVersion(3), 1.0)
    generation.add(right[1], -0.2, PolicyVersion(3), 1.0)
    generation.add(right[2], -0.3, PolicyVersion(5), 1.0)
    row = generation.row()
    segments = [(s.start, s.end, s.version.version_id) for s in row.version_segments]
    assert segments == [(start, start + 2, 3), (start + 2, start + 3, 5)]
    assert row.version == PolicyVersion(3)
    assert row.status is TrajectoryStatus.COMPLETED
    assert row.response == "ba"
    assert row.reward == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("response", "reward"), [("ba", 2 / 3), ("b", 1 / 3), ("ab", 0.0), ("", 0.0), ("babbbb", 2 / 6)]
)
def test_the_reward_is_the_share_of_right_tokens(response: str, reward: float) -> None:
    assert sum(task.token_rewards_of("ab", task.tokens_of(response))) == pytest.approx(reward)
