"""TrajectoryLogger: what a loop has in its arrays is what the store has in its rows."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trajstore import (
    InputError,
    LengthMismatchError,
    PolicyVersion,
    Trajectory,
    TrajectoryBuffer,
    TrajectoryStatus,
    TrajectoryStore,
    ValidationError,
    VersionSegment,
)
from trajstore.hooks import TrajectoryLogger
from trajstore.replay import replay


def rows_of(store: TrajectoryStore | Path) -> list[Trajectory]:
    opened = store if isinstance(store, TrajectoryStore) else TrajectoryStore.open(store)
    return opened.scan().to_trajectories()


@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["numpy", "torch", "lists"]),
)
def test_padded_and_ragged_arrays_give_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], side: str, kind: str
) -> None:
    rng = np.random.default_rng(len(sizes))
    prompts = [rng.integers(0, 99, p) for p, _ in sizes]
    responses = [rng.integers(0, 99, r) for _, r in sizes]
    log_probs = [-rng.random(r).astype(np.float32) for _, r in sizes]

    def padded(rows: list[np.ndarray], where: str, pad: float) -> tuple[object, object]:
        width = max(map(len, rows)) + 1
        values = np.full((len(rows), width), pad, rows[0].dtype)
        mask = np.zeros((len(rows), width), np.int64)
        for i, row in enumerate(rows):
            at = slice(width - len(row), width) if where == "left" else slice(0, len(row))
            values[i, at], mask[i, at] = row, 1
        if kind == "torch":
            return torch.from_numpy(values), torch.from_numpy(mask)
        return (values.tolist(), mask.tolist()) if kind == "lists" else (values, mask)

    path = tmp_path_factory.mktemp("s") / "s"
    with TrajectoryLogger(path) as logger:
        prompt_ids, prompt_mask = padded(prompts, "left", 7)
        ids, mask = padded(responses, side, 7)
        logger.log(
            ids, response_mask=mask, prompts=prompt_ids, prompt_mask=prompt_mask,
            behavior_log_probs=padded(log_probs, side, 5.0)[0], version=4, reward=[1.0] * len(sizes),
        )  # fmt: skip
        logger.log(responses, prompts=prompts, behavior_log_probs=log_probs, version=4, reward=1.0)
    found = rows_of(path)
    assert len(found) == 2 * len(sizes)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        for t in (found[i], found[i + len(sizes)]):
            assert t.tokens == [*prompt, *response]
            assert (t.prompt_length, t.response_length) == (len(prompt), len(response))
            assert t.behavior_log_probs[t.prompt_length :] == log_probs[i].tolist()
            assert (t.version, t.reward, t.status) == (PolicyVersion(4), 1.0, TrajectoryStatus.COMPLETED)


def test_fields_of_all_kinds(tmp_path: Path) -> None:
    with TrajectoryLogger(tmp_path / "s", source="mine") as logger:
        ids = logger.log(
            torch.tensor([[1, 2, 0], [3, 4, 5]]),
            response_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
            prompts=[[9], [9, 8]],
            version=np.array([[3, 4, -1], [-1, 4, 4]]),
            loss_mask=torch.tensor([[1, 0, 0], [0, 1, 1]]),
            advantages=torch.tensor([0.5, -0.5], dtype=torch.bfloat16, requires_grad=True),
            reward=torch.tensor([1.0, float("nan")]),
            terminated=np.array([True, False]),
            group_id="g",
            group_size=2,
            prompt="same for both",
            response=["a", "b"],
            metadata=[{"task": 1}, None],
            messages=[{"role": "user", "content": "x"}],
            ids=["one", "two"],
        )
    assert ids == ["one", "two"]
    one, two = rows_of(tmp_path / "s")
    assert one.version_segments == [
        VersionSegment(1, 2, PolicyVersion(3)),
        VersionSegment(2, 3, PolicyVersion(4)),
    ]
    assert two.version_segments == [VersionSegment(3, 5, PolicyVersion(4))]
    assert (one.loss_mask, two.loss_mask) == ([0, 1, 0], [0, 0, 0, 1, 1])
    assert (one.action_mask, two.action_mask) == ([0, 1, 1], [0, 0, 0, 1, 1]), "by the versions"
    assert (one.advantages, two.advantages) == ([0.0, 0.5, 0.5], [0.0, 0.0, -0.5, -0.5, -0.5])
    assert (one.terminated, two.terminated) == (True, False)
    assert one.reward == 1.0
    assert np.isnan(two.reward)
    assert (one.response, two.response, two.prompt, two.group_size) == ("a", "b", "same for both", 2)
    assert (one.metadata, two.metadata, one.source) == ({"task": 1}, None, "mine")
    assert one.messages == [{"role": "user", "content": "x"}]


def test_what_does_not_fit_is_refused_at_once(tmp_path: Path) -> None:
    logger = TrajectoryLogger(tmp_path / "s")
    ids, mask = np.array([[1, 2]]), np.array([[1, 1]])
    with pytest.raises(InputError, match="padded array"):
        logger.log(ids)
    with pytest.raises(InputError, match="no field 'rewards'"):
        logger.log([[1]], rewards=[1.0])
    for wrong in (
        {"behavior_log_probs": np.zeros((1, 3))},
        {"behavior_log_probs": np.zeros((2, 2))},
        {"reward": [1.0, 2.0]},
        {"ids": ["a", "b"]},
        {"prompts": [[1], [2]]},
        {"response_mask": np.ones((1, 3))},
        {"version": [[1]]},
    ):
        with pytest.raises(LengthMismatchError):
            logger.log(ids, **({"response_mask": mask} | wrong))
    with pytest.raises(ValidationError):
        logger.log([[-1]])
    logger.close()
    assert rows_of(tmp_path / "s") == []
    with pytest.raises(InputError, match="closed"):
        logger.log([[1]])


def test_a_buffer_gets_the_rows_and_has_no_ledger(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(seed=1)
    with TrajectoryLogger(buffer) as logger:
        logger.log([[1, 2], [3]], version=2)
        logger.flush()
        with pytest.raises(InputError, match="no training ledger"):
            logger.trained(1, ["x"])
    assert len(buffer.get_available(2)) == 2
    store = TrajectoryStore.create(tmp_path / "s")
    with TrajectoryBuffer(store=store) as durable, TrajectoryLogger(durable) as logger:
        logger.log([[1, 2], [3]], version=2)
        logger.flush()
        assert store.count() == 2


def test_steps_come_again(tmp_path: Path) -> None:
    with TrajectoryLogger(tmp_path / "s") as logger:
        first = logger.log([[1], [2]], version=0)
        logger.trained(1, first[::-1])
        second = logger.log([[3], [4]], version=1)
        logger.trained(2, [second[0], first[0]])
        logger.trained(2, [second[1]], micro_batch=1)
    store = TrajectoryStore.open(tmp_path / "s")
    assert [t.tokens for t in replay(store, step=1)] == [[2], [1]]
    assert [t.tokens for t in replay(store, step=2)] == [[3], [1], [4]]


def test_inside_an_event_loop_nothing_is_lost(tmp_path: Path) -> None:
    async def loop() -> None:
        logger = TrajectoryLogger(tmp_path / "s")
        for i in range(5):
            logger.log([[i]])
            await asyncio.sleep(0)
        logger.close()

    asyncio.run(loop())
    assert [t.tokens for t in rows_of(tmp_path / "s")] == [[i] for i in range(5)]


LOOP = """
import sys
from trajstore.hooks import TrajectoryLogger
logger = TrajectoryLogger(sys.argv[1], max_age=3600)
logger.log([[1], [2]])
logger.flush()
logger.log([[3]])
print("ready", flush=True)
if sys.argv[2] == "killed":
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exit", "killed"])
def test_exit_flushes_and_a_kill_loses_only_what_was_not(tmp_path: Path, end: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(tmp_path / "s"), end],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if end == "killed":
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept = [t.tokens for t in rows_of(tmp_path / "s")]
    assert kept == ([[1], [2]] if end == "killed" else [[1], [2], [3]])
