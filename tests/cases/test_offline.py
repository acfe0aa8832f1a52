"""Theme: offline training data (cases A04, A10, G03, G07, G08)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trajstore import Trajectory, TrajectoryBatch, ValidationError
from trajstore.offline import ilql_dataset
from trajstore.offline.decoding import Decoding, generate
from trajstore.offline.gae import whiten
from trajstore.offline.ilql_model import CausalILQLModel
from trajstore.offline.ppo import collate, ppo_dataset
from trajstore.offline.preference import preference_pairs


def rows_of(case: Any) -> list[Trajectory]:
    return [
        Trajectory(
            prompt_tokens=row["prompt_ids"],
            response_tokens=row["response_ids"],
            log_probs=[-1.0] * len(row["response_ids"]),
            values=[0.0] * len(row["response_ids"]),
        )
        for row in case["rows"]
    ]


def test_A04_masks_come_from_lengths_never_from_the_pad_id(case: Any) -> None:
    rows, pad = rows_of(case), case["pad_id"]
    assert pad == case["eos_id"]
    batch = ilql_dataset(TrajectoryBatch(rows), pad_token_id=pad).batch()
    assert batch.attention_mask.sum(1).tolist() == [6, 6]
    actions = batch.input_ids.gather(1, batch.actions_ixs + 1)
    trained = [a[m > 0].tolist() for a, m in zip(actions, batch.action_mask, strict=True)]
    assert trained == [row["response_ids"] for row in case["rows"]], "every real eos is an action"
    data = ppo_dataset(TrajectoryBatch(rows))
    responses = [len(element.response_tensor) for element in data]
    assert responses == [2, 4]
    masked = collate(
        [*data, ppo_dataset(TrajectoryBatch([row_without_the_last(rows[0])]))[0]], pad_token_id=pad
    )
    assert masked.response_masks.tolist()[:2] == [[1, 1, 0, 0], [1, 1, 1, 1]]


def row_without_the_last(row: Trajectory) -> Trajectory:
    """The same row with its last token not trained on, so that masks ride along."""
    return Trajectory(
        prompt_tokens=row.prompt_tokens,
        response_tokens=row.response_tokens,
        loss_mask=[0, 0, 0, 0, 1, 0],
        log_probs=row.log_probs,
        values=row.values,
    )


class Echo(torch.nn.Module):
    """A backbone that sees how many tokens it may attend to."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden = attention_mask.sum(1, keepdim=True)[:, None].expand(-1, input_ids.shape[1], 4).float()
        return torch.nn.functional.one_hot(attention_mask.sum(1), 12).float()[:, None], hidden


def test_A04_decoding_attends_to_real_eos_tokens_in_a_prompt(case: Any) -> None:
    prompts = torch.tensor([[2, 7, 2, 8], [2, 2, 2, 7]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    model = CausalILQLModel(Echo(), hidden_size=4, vocab_size=12)
    decoding = Decoding(temperature=0, beta=0, max_new_tokens=1)
    for given, expected in ((mask, [4, 2]), (None, [4, 4])):
        found = generate(model, prompts, given, eos_token_id=case["eos_id"], decoding=decoding)
        assert found[:, -1].tolist() == expected


def test_A05_a_pad_id_of_0_pads_with_0_and_content_zeros_are_trained_on(case: Any) -> None:
    rows = TrajectoryBatch(
        [
            Trajectory(
                prompt_tokens=[7],
                response_tokens=row["response_ids"],
                log_probs=[-1.0] * len(row["response_ids"]),
                values=[0.0] * len(row["response_ids"]),
                reward=float(-i),
                group_id="g",
                terminated=True,
            )
            for i, row in enumerate(case["rows"])
        ]
    )
    pad = case["pad_id"]
    ilql = ilql_dataset(rows, pad_token_id=pad).batch()
    assert ilql.input_ids.tolist() == [[7, 5, 0, 0, 2], [7, 5, 0, 0, 0]]
    assert ilql.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert ilql.action_mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    ppo = ppo_dataset(rows).batch(pad_token_id=pad)
    assert ppo.response_tensors.tolist() == [[5, 0, 0, 2], [5, 0, 0, 0]]
    (pair,) = preference_pairs(rows).table.to_pylist()
    assert (pair["chosen_input_ids"], pair["rejected_input_ids"]) == ([5, 0, 0, 2], [5])


def test_A10_a_token_that_nobody_sampled_is_not_trained_on(case: Any) -> None:
    given = {
        "prompt_tokens": [1],
        "response_tokens": case["response_ids"],
        "values": [0.0] * 3,
        "loss_mask": [0, *case["loss_mask"]],
    }
    null = Trajectory(**given, log_probs=case["logprobs"])
    with pytest.raises(ValidationError, match="column 'log_probs': found None at index 2"):
        TrajectoryBatch([null])
    stored = TrajectoryBatch([null], nulls="nan")
    with pytest.raises(ValidationError, match="the log-prob of a trained token is not finite"):
        ppo_dataset(stored)
    data = ppo_dataset(stored, not_finite="mask")
    assert data[0].response_mask.tolist() == [1, 1, 0]
    assert not (data[0].logprobs == 0).any()
    assert data.zero_log_probs == 0
    zero = TrajectoryBatch([Trajectory(**given, log_probs=[-0.1, -0.2, 0.0])])
    assert ppo_dataset(zero).zero_log_probs == 1


def test_G03_equal_rewards_of_a_group_give_zero_not_noise(case: Any) -> None:
    rows = [
        Trajectory(prompt_tokens=[1], response_tokens=[2], reward=reward, group_id=group, terminated=True)
        for group, rewards in case["groups"].items()
        for reward in rewards
    ]
    data = ilql_dataset(TrajectoryBatch(rows), scale="group")
    by_group = {
        group: data.batch([i for i, row in enumerate(rows) if row.group_id == group]).rewards
        for group in case["groups"]
    }
    assert (by_group["a"] == 0).all()
    assert (by_group["b"] == 0).all()
    assert 0 < by_group["c"].abs().max() < 10
    flat = {row.group_id: std for row, std in zip(rows, data.table["return_std"].to_pylist(), strict=True)}
    assert (flat["a"], flat["b"]) == (0, 0), "and the set says that they are"
    # Equal but for the rounding of a sum: the noise is no signal either.
    rounded = [0.3, 0.1 + 0.2, 0.3]
    assert len(set(rounded)) == 2
    for rewards in (case["groups"]["a"], case["groups"]["b"], rounded):
        assert (whiten(np.array(rewards)) == 0).all()
    group = [replace(rows[0], reward=reward) for reward in rounded]
    assert (ilql_dataset(TrajectoryBatch(group), scale="group").batch().rewards == 0).all()


def g07(case: Any, max_length: int, **options: Any) -> Any:
    row = Trajectory(
        prompt_tokens=case["prompt_ids"],
        response_tokens=case["output_ids"],
        reward=case["reward"],
        terminated=True,
    )
    return ilql_dataset(TrajectoryBatch([row]), max_length=max_length, **options)


def test_G07_actions_and_their_ends_survive_truncation(case: Any) -> None:
    whole, cut, _ = case["max_lengths"]
    (element,) = g07(case, whole)
    assert element.input_ids.tolist() == [1, 2, 3, 4, 5, 2]
    assert element.actions_ixs.tolist() == [2, 3, 4]
    assert element.states_ixs.tolist() == [2, 3, 4, 5]
    assert element.dones.tolist() == [1, 1, 1, 0]
    assert element.rewards.tolist() == [0, 0, 1]
    (as_trlx,) = g07(case, cut, compat="trlx")
    (sound,) = g07(case, cut)
    for found in (as_trlx, sound):
        assert len(found.states_ixs) == len(found.actions_ixs) + 1 == 3
        assert found.states_ixs.max() < len(found.input_ids) == cut
    assert as_trlx.dones.tolist() == [1, 1, 0]
    # The default is sounder than the case asks for: the end was cut off, so the row bootstraps, and the
    # reward that was paid at the end is not paid at the cut.
    assert sound.terminals.tolist() == [0, 0, 0]
    assert sound.rewards.tolist() == [0, 0]


def test_G07_a_row_without_actions_is_dropped_and_counted(case: Any) -> None:
    data = g07(case, case["max_lengths"][2])
    assert len(data) == 0
    assert data.report.dropped == {"no action left after truncation": 1}


def test_G07_one_sample_makes_no_nan(case: Any) -> None:
    for options in ({"scale": "global"}, {"compat": "trlx"}):
        assert g07(case, 6, **options).batch().rewards.tolist() == [[0, 0, 0]]
    (as_trlx,) = g07(case, 5, compat="trlx")
    assert as_trlx.rewards.tolist() == [0, 0]


def test_G08_pairs_that_truncation_makes_identical_are_dropped_and_counted(case: Any) -> None:
    def rows(good: float, bad: float) -> TrajectoryBatch:
        return TrajectoryBatch(
            [
                Trajectory(
                    group_id="g", prompt_tokens=case["prompt_ids"], response_tokens=case[which], reward=reward
                )
                for which, reward in (("chosen", good), ("rejected", bad))
            ]
        )

    cut = preference_pairs(rows(1.0, 0.0), max_length=case["max_len"])
    assert (len(cut), cut.dropped) == (0, {"identical after truncation": 1})
    kept = preference_pairs(rows(1.0, 0.0), max_length=10)
    assert kept.table["chosen_input_ids"].to_pylist() == [case["chosen"]]
    assert kept.table["rejected_input_ids"].to_pylist() == [case["rejected"]]
    for pairing in ("best_worst", "all"):
        assert len(preference_pairs(rows(0.5, 0.5), pairing=pairing)) == 0
