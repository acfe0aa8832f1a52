"""Owns the tests of what formats can hold and the toy fixtures do not: holes, weights, filtered rewards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore import Trajectory, TrajectoryBatch
from trajstore.importers import ImportOptions, detect, open_importer

FIXTURES = Path(__file__).parents[1] / "formats"


def imported(path: Path, format: str) -> list[Trajectory]:
    assert detect(path).format == format
    return list(TrajectoryBatch([i.trajectory for i in open_importer(format)(path, ImportOptions())]))


def first_line(name: str) -> Any:
    return json.loads((FIXTURES / name).read_text().splitlines()[0])


def test_verl_padding_with_holes_is_cut_by_the_mask_and_rewards_less_the_penalty_are_kept(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    columns = {
        "prompts": torch.tensor([[0, 5, 6], [4, 0, 6]]),
        "responses": torch.tensor([[7, 8, 9, 0], [7, 0, 9, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 0, 1, 1, 0, 1, 0]]),
        "response_mask": torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0]]),
        "rollout_log_probs": torch.tensor([[-0.5, 0.0, -0.25, 0.0], [-1.0, -9.0, -2.0, 0.0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.5, 0.0]]),
        "token_level_rewards": torch.tensor([[-0.125, 0.0, 0.75, 0.0], [0.0, 0.0, 0.25, 0.0]]),
    }
    torch.save({"tensordict": columns, "global_steps": 3}, tmp_path / "tq_batch.pt")
    whole, holed = imported(tmp_path / "tq_batch.pt", "verl-tq")
    assert (list(whole.tokens), whole.prompt_length) == ([5, 6, 7, 8, 9], 2)
    assert list(whole.loss_mask) == [0, 0, 1, 0, 1]
    assert (whole.reward, list(whole.token_rewards)) == (1.0, [0.0, 0.0, -0.125, 0.0, 0.75])
    assert (list(holed.tokens), holed.prompt_length) == ([4, 6, 7, 9], 2)
    assert list(holed.behavior_log_probs) == [0.0, 0.0, -1.0, -2.0]
    assert (holed.reward, list(holed.token_rewards)) == (0.5, [])  # one number, at the end


def test_prime_rl_weighs_its_rewards(tmp_path: Path) -> None:
    episode = first_line("prime_rl/rollouts/step_8/train/all/traces.jsonl")
    episode["traces"][0]["rewards"] = {"right": {"score": 2.0, "weight": 0.5}, "form": {"score": 0.25}}
    (tmp_path / "traces.jsonl").write_text(json.dumps(episode) + "\n")
    row = imported(tmp_path / "traces.jsonl", "prime-rl")[0]
    assert row.reward == 1.25
    assert row.metadata is not None
    assert row.metadata["rewards"]["right"] == {"score": 2.0, "weight": 0.5}


def test_nemo_rl_takes_the_rewards_that_are_left_after_its_filter(tmp_path: Path) -> None:
    line = first_line("nemo_rl/exp_001/train_data_step8.jsonl")
    line |= {"rewards": [9.0, 8.0, 7.0], "filtered_rewards": [0.25]}  # of other rows, and more of them
    (tmp_path / "train_data_step8.jsonl").write_text(json.dumps(line) + "\n")
    (row,) = imported(tmp_path / "train_data_step8.jsonl", "nemo-rl")
    assert row.reward == 0.25
    assert row.metadata is not None
    assert row.metadata.keys().isdisjoint({"rewards", "filtered_rewards"})


def test_areal_versions_are_exact_where_the_prompt_has_none(tmp_path: Path) -> None:
    batch = {
        "input_ids": [[1, 2, 3, 4, 5]],
        "attention_mask": [[1, 1, 1, 1, 1]],
        "loss_mask": [[0, 0, 1, 1, 1]],
        "logprobs": [[0.0, 0.0, -0.5, -0.25, -1.0]],
        "versions": [[-1, -1, 6, 6, 7]],
        "rewards": [1.0],
    }
    (tmp_path / "batch.json").write_text(json.dumps(batch))
    (row,) = imported(tmp_path / "batch.json", "areal-batch")
    spans = [(s.start, s.end, s.version.version_id) for s in row.version_segments]
    assert spans == [(2, 4, 6), (4, 5, 7)]
    np.testing.assert_array_equal(row.behavior_log_probs, batch["logprobs"][0])
