"""Truncated episodes of a chain whose true V is known: the sound set learns it, trlX's cannot."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trajstore import Trajectory, TrajectoryBatch
from trajstore.offline import ilql_dataset
from trajstore.offline.ilql_loss import ILQLConfig, ilql_loss
from trajstore.offline.ilql_model import CausalILQLModel

START, STAY, ADVANCE = 1, 2, 3
GOAL, LONGEST, GAMMA = 3, 5, 0.9


def episodes() -> list[Trajectory]:
    """Every sequence of LONGEST coin flips between staying and advancing, cut where the goal is reached.

    All are equally likely, so the data's frequencies are the policy's own: there is no sampling noise.
    """
    made = []
    for flips in product([STAY, ADVANCE], repeat=LONGEST):
        taken: list[int] = []
        while len(taken) < LONGEST and taken.count(ADVANCE) < GOAL:
            taken.append(flips[len(taken)])
        reached = taken.count(ADVANCE) == GOAL
        made.append(
            Trajectory(
                prompt_tokens=[START], response_tokens=taken, reward=float(reached), terminated=reached
            )
        )
    return made


def true_values() -> list[float]:
    """V = (gamma V + advance) / 2, where advancing from the last state earns 1 and ends."""
    values: list[float] = []
    for state in reversed(range(GOAL)):
        advance = 1.0 if state == GOAL - 1 else GAMMA * values[0]
        values.insert(0, 0.5 * advance / (1 - 0.5 * GAMMA))
    return values


class Counter(nn.Module):
    """A backbone whose hidden state is the state of the chain, one-hot."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        state = (input_ids == ADVANCE).cumsum(1).clamp(max=GOAL)
        return torch.zeros(*input_ids.shape, 4), nn.functional.one_hot(state, GOAL + 1).float()


def learnt(steps: int, **options: Any) -> list[float]:
    batch = ilql_dataset(TrajectoryBatch(episodes()), **options).batch()
    if options:  # trlX normalises the returns, which is not the point here
        batch.rewards[batch.rewards != 0] = 0
        ends = batch.actions_ixs.argmax(1)
        batch.rewards[torch.arange(len(ends)), ends] = torch.tensor([e.reward for e in episodes()])
    torch.manual_seed(0)
    model = CausalILQLModel(Counter(), hidden_size=GOAL + 1, vocab_size=4, alpha=0.5)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 2e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, steps)
    config = ILQLConfig(tau=0.5, gamma=GAMMA, cql_scale=0, awac_scale=0)
    for _ in range(steps):
        out = model(batch.input_ids, states_ixs=batch.states_ixs, actions_ixs=batch.actions_ixs)
        loss, _ = ilql_loss(out, batch, config)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.sync_target_q_heads()
    with torch.no_grad():
        states = torch.tensor([[START, ADVANCE, ADVANCE]])
        return model(states).value[0, :, 0].tolist()


def test_truncated_episodes_bootstrap_to_the_true_values() -> None:
    assert learnt(400) == pytest.approx(true_values(), rel=0.01)


def test_the_check_above_can_fail() -> None:
    as_trlx = learnt(150, compat="trlx", bos_token_id=START)
    off = [abs(a - b) / b for a, b in zip(as_trlx, true_values(), strict=True)]
    assert max(off) > 0.1, "episodes that were cut off count as ended there"
