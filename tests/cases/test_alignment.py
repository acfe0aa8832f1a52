"""Theme: alignment of masks, log-probs and padding (cases A*)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trajstore import (
    LengthMismatchError,
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryBatch,
    TrajectoryStatus,
    TrajectoryStore,
    VersionSegment,
)
from trajstore.layouts import Options, prompt_response
from trajstore.loader import TrajectoryLoader


def test_A02_a_continuation_has_a_mask_for_every_token_or_is_refused(case: Any, tmp_path: Path) -> None:
    first, second = case["segments"]
    tokens = first["response_ids"] + second["response_ids"]

    def continued(loss_mask: list[int]) -> PartialTrajectory:
        return PartialTrajectory(
            id="r",
            prompt_tokens=[1],
            response_tokens=tokens,
            behavior_log_probs=first["logprobs"] + second["logprobs"],
            loss_mask=loss_mask,
            action_mask=[1] * 5,
            version_segments=[
                VersionSegment(1, 4, PolicyVersion(first["version"])),
                VersionSegment(4, 6, PolicyVersion(second["version"])),
            ],
            status=TrajectoryStatus.COMPLETED,
            continuation_count=1,
        )

    store = TrajectoryStore.create(tmp_path / "s")
    with pytest.raises(LengthMismatchError, match=r"'loss_mask': has 3 values, expected 6 \(tokens\) or 5"):
        store.append([continued(first["loss_mask"])])
    assert store.count() == 0
    store.append([continued([*first["loss_mask"], 1, 1])])
    (back,) = store.scan().to_trajectories()
    assert back.response_length == 5
    assert back.loss_mask == [0, 0, 0, 0, 1, 1]


def test_A04_masks_come_from_lengths_when_pad_is_eos(case: Any) -> None:
    rows = case["rows"]
    batch = TrajectoryBatch(
        [Trajectory(prompt_tokens=r["prompt_ids"], response_tokens=r["response_ids"]) for r in rows]
    )
    tensors = batch.to_tensors(pad_token_id=case["pad_id"])
    assert tensors["attention_mask"].tolist() == [[1] * 6, [1] * 6]
    assert tensors["loss_mask"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]]
    assert tensors["attention_mask"].sum(1).tolist() == [6, 6]
    blocks = prompt_response(batch.rows(), Options(pad_token_id=case["pad_id"])).arrays
    assert blocks["prompts"].tolist() == [[2, 7, 2, 8], [2, 2, 2, 7]]
    assert blocks["attention_mask"][:, :4].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert blocks["attention_mask"][:, 4:].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert blocks["loss_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert blocks["responses"].tolist() == [[9, 2, 2, 2], [9, 9, 9, 2]]
    shorter = TrajectoryBatch(
        [
            Trajectory(prompt_tokens=r["prompt_ids"], response_tokens=r["response_ids"][:n])
            for r, n in zip(rows, (2, 1), strict=True)
        ]
    ).to_tensors(pad_token_id=2)
    assert shorter["input_ids"][1].tolist() == [2, 7, 9, 2, 2, 2]
    assert shorter["attention_mask"][1].tolist() == [1, 1, 1, 0, 0, 0]


def test_A05_pad_id_0_is_a_pad_id_and_content_zeros_stay(case: Any) -> None:
    batch = TrajectoryBatch([Trajectory(response_tokens=r["response_ids"]) for r in case["rows"]])
    tensors = batch.to_tensors(pad_token_id=case["pad_id"])
    assert tensors["input_ids"].tolist() == [[5, 0, 0, 2], [5, 0, 0, 0]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert tensors["loss_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    (loaded,) = TrajectoryLoader(batch, batch_size=2, layout="prompt_response", pad_token_id=case["pad_id"])
    assert loaded["responses"].tolist() == [[5, 0, 0, 2], [5, 0, 0, 0]]
    assert loaded["loss_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_A06_no_hole_between_prompt_and_response(case: Any) -> None:
    batch = TrajectoryBatch(
        [
            Trajectory(prompt_tokens=p, response_tokens=r, behavior_log_probs=lp)
            for p, r, lp in zip(case["prompts"], case["responses"], case["logprobs"], strict=True)
        ]
    )
    tensors = batch.to_tensors(pad_token_id=case["pad_id"])
    assert tensors["input_ids"].tolist() == [[1, 2, 3, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7]]
    starts = [3, 5]
    for row, start, given in zip(tensors["behavior_log_probs"], starts, case["logprobs"], strict=True):
        assert row[start : start + len(given)].tolist() == given
        assert not torch.count_nonzero(row[:start])
    assert np.array_equal(tensors["loss_mask"].argmax(1), starts)
    options = Options(pad_token_id=case["pad_id"], full_sequence=True)
    blocks = prompt_response(batch.rows(), options).arrays
    assert blocks["input_ids"].tolist() == [[0, 0, 1, 2, 3, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 0, 0]]
    assert blocks["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 0, 0]]
    assert blocks["behavior_log_probs"][:, 5].tolist() == [-1, -5]
