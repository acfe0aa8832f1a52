"""The loss against trlX's recorded one, and against what a mean over actions must be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.offline.goldens import golden
from trajstore import InputError, Trajectory, TrajectoryBatch
from trajstore.offline import ilql_dataset
from trajstore.offline.elements import CausalILQLOutput, ILQLBatch, ILQLSeq2SeqBatch, Seq2SeqILQLOutput
from trajstore.offline.ilql_loss import ILQLConfig, ilql_loss

RUNS = [
    pytest.param(case, run, id=f"{name}-{i}")
    for name, case in golden("ilql_loss")["cases"].items()
    for i, run in enumerate(case["runs"])
]


def test_there_are_55_runs() -> None:
    assert len(RUNS) == 55
    found = golden("ilql_loss")["default_config"]
    assert ILQLConfig(**{k: v for k, v in found.items() if k not in ("name", "gen_kwargs")}) == ILQLConfig()


@pytest.mark.parametrize(("case", "run"), RUNS)
def test_loss_statistics_and_gradients_are_trlx_s(case: dict[str, Any], run: dict[str, Any]) -> None:
    fields = {
        name: torch.tensor(value, dtype=torch.float32 if name == "rewards" else torch.int64)
        for name, value in case["batch"].items()
    }
    tensors = case["tensors"]
    config = ILQLConfig(**run["config"])
    logits = torch.tensor(tensors["logits"], requires_grad=True)
    qs = [torch.tensor(q, requires_grad=True) for q in tensors["qs"]]
    targets = [torch.tensor(q, requires_grad=True) for q in tensors["target_qs"]]
    vs = torch.tensor(tensors["vs"], requires_grad=True)
    seq2seq = "decoder_input_ids" in fields
    heads = 2 if config.two_qs else 1
    outputs = (Seq2SeqILQLOutput if seq2seq else CausalILQLOutput)(
        logits=logits, value=vs, qs=tuple(qs[:heads]), target_qs=tuple(targets[:heads])
    )
    loss, stats = ilql_loss(outputs, (ILQLSeq2SeqBatch if seq2seq else ILQLBatch)(**fields), config)

    def close(found: Any, expected: Any) -> None:
        torch.testing.assert_close(
            torch.as_tensor(found).detach(),
            torch.as_tensor(expected),
            rtol=1e-6,
            atol=1e-6,
            check_dtype=False,
        )

    close(loss, run["loss"])
    assert set(stats) == set(run["stats"])
    for name, value in run["stats"].items():
        close(stats[name], value)
    loss.backward()
    found = {"logits": logits, "q0": qs[0], "q1": qs[1], "vs": vs}
    for name, norm in run["grad_l2"].items():
        grad = found[name].grad
        close(0.0 if grad is None else grad.norm(), norm)
    close(torch.zeros_like(vs)[..., 0] if vs.grad is None else vs.grad[..., 0], run["grad_vs"])
    assert all(t.grad is None for t in targets)


def outputs_for(batch: ILQLBatch, seed: int) -> CausalILQLOutput:
    """Values that depend on the row and the position only, so that padding cannot change them."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(64, 5, 12, generator=draw)
    key = batch.input_ids[:, :1] % 64

    def at(positions: Tensor, k: int) -> Tensor:
        return table[(key * 7 + positions * 3 + k) % 64, k]

    everywhere = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    return CausalILQLOutput(
        logits=at(everywhere, 0),
        value=at(batch.states_ixs, 1)[..., :1],
        qs=(at(batch.actions_ixs, 2), at(batch.actions_ixs, 3)),
        target_qs=(at(batch.actions_ixs, 4), at(batch.actions_ixs, 0)),
    )


def rows() -> list[Trajectory]:
    made = []
    for i in range(12):
        size = 3 + i % 5
        mask = [0, *((i * 5 + t * 3) % 4 > 0 for t in range(size))]
        made.append(
            Trajectory(
                tokens=[i + 1, *((i * 3 + t) % 12 for t in range(size))],
                action_mask=list(map(int, mask)),
                loss_mask=[int(m and (i + t) % 3 > 0) for t, m in enumerate(mask)],
                reward=i / 5 - 1,
                terminated=(True, False, None)[i % 3],
            )
        )
    made.append(Trajectory(tokens=[1, 2, 3], action_mask=[0, 1, 1], loss_mask=[0, 0, 0]))
    return made


def test_a_batch_is_the_action_weighted_mean_of_its_rows() -> None:
    config = ILQLConfig(tau=0.8, beta=0.5)
    data = ilql_dataset(TrajectoryBatch(rows()))
    whole = data.batch()
    assert isinstance(whole, ILQLBatch)
    assert whole.dones[:, -1].any(), "some rows bootstrap"
    loss, stats = ilql_loss(outputs_for(whole, 1), whole, config)
    parts = [data.batch([i]) for i in range(len(data))]
    each = [ilql_loss(outputs_for(part, 1), part, config)[1] for part in parts]
    counts = [int(part.action_mask.sum()) for part in parts]
    assert 0 in counts, "a row without a trained action weighs nothing"
    for term in ("loss", "loss_q", "loss_v", "loss_cql", "loss_awac"):
        name = f"losses/{term}"
        expected = sum(n * one[name] for n, one in zip(counts, each, strict=True)) / sum(counts)
        assert stats[name] == pytest.approx(expected, rel=1e-5), term
    assert float(loss) == pytest.approx(stats["losses/loss"])


def test_padding_may_hold_anything() -> None:
    data = ilql_dataset(TrajectoryBatch(rows()))
    batch = data.batch()
    outputs = outputs_for(batch, 2)
    expected, _ = ilql_loss(outputs, batch, ILQLConfig())
    padding = batch.action_mask == 0
    for q in (*outputs.qs, *outputs.target_qs):
        q[padding] = math.nan
    # V of the state after an unmasked action is read, so only the states behind all actions are padding.
    behind = torch.arange(batch.states_ixs.shape[1]) > (batch.terminals == 0).sum(1, keepdim=True)
    outputs.value[behind] = math.nan
    loss, _ = ilql_loss(outputs, batch, ILQLConfig())
    torch.testing.assert_close(loss, expected)


def test_a_bootstrapping_row_gets_v_of_its_last_state() -> None:
    def loss_q(terminated: bool, last_v: float) -> float:
        row = Trajectory(prompt_tokens=[1], response_tokens=[2, 3], reward=1.0, terminated=terminated)
        batch = ilql_dataset(TrajectoryBatch([row])).batch()
        value = torch.tensor([0.0, 0.0, last_v])[None, :, None]
        zeros = torch.zeros(1, 2, 4)
        outputs = CausalILQLOutput(torch.zeros(1, 3, 4), None, None, value, (zeros,), (zeros,))
        return ilql_loss(outputs, batch, ILQLConfig(gamma=0.5))[1]["losses/loss_q"]

    assert loss_q(True, 8.0) == pytest.approx((0 + 1) / 2)
    assert loss_q(False, 8.0) == pytest.approx((0 + 5**2) / 2)


def test_outputs_without_heads_are_refused() -> None:
    batch = ilql_dataset(TrajectoryBatch([Trajectory(prompt_tokens=[1], response_tokens=[2])])).batch()
    with pytest.raises(InputError, match="no Q values"):
        ilql_loss(CausalILQLOutput(torch.zeros(1, 2, 4)), batch, ILQLConfig())
