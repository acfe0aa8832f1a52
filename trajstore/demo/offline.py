"""Owns the demo's offline half: an epoch of ILQL from the finished rows; samples and publishes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from statistics import mean

import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from trajstore.demo import task
from trajstore.demo.policy import WIDTH, Adam, Policy
from trajstore.loader import TrajectoryLoader
from trajstore.offline import ILQLBatch, ilql_dataset
from trajstore.offline.ilql_loss import ILQLConfig, ilql_loss
from trajstore.offline.ilql_model import CausalILQLModel
from trajstore.store import Scan

BATCH_ROWS = 64
BUCKET_WINDOW = 8
CONFIG = ILQLConfig(tau=0.8, gamma=0.99, alpha=0.1)
EDGE = 0.1
"""Part of the steps that the start and the end of the epoch are a mean over."""


@dataclass(frozen=True)
class Epoch:
    """One pass over the rows.

    Attributes:
        rows, actions: what it was trained on: trajectories, and tokens that a policy sampled.
        cut_off: rows that bootstrap from their last state.
        steps: of the optimizer.
        terms: each term of the loss, over the first and over the last steps.
    """

    rows: int
    actions: int
    cut_off: int
    steps: int
    terms: Mapping[str, tuple[float, float]]


class _Backbone(nn.Module):
    """The policy as heads want a model: it gives logits and hidden states."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = deepcopy(policy)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        states = self.policy.states(input_ids)
        return self.policy.predict(states), states


def ilql_epoch(scan: Scan, policy: Policy, seed: int) -> Epoch:
    """Trains fresh ILQL heads over a copy of the policy, each row once."""
    data = ilql_dataset(scan, pad_token_id=task.PAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CausalILQLModel(
            _Backbone(policy), hidden_size=WIDTH, vocab_size=task.VOCABULARY, alpha=CONFIG.alpha
        )
    optimizer = Adam(model, rate=2e-3)
    steps: list[dict[str, float]] = []
    for tensors in TrajectoryLoader(
        data, batch_size=BATCH_ROWS, shuffle=True, seed=seed, bucket_window=BUCKET_WINDOW
    ):
        batch = data.as_batch(tensors)
        assert isinstance(batch, ILQLBatch)
        outputs = model(batch.input_ids, batch.attention_mask, batch.states_ixs, batch.actions_ixs)
        loss, stats = ilql_loss(outputs, batch, CONFIG)
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        optimizer.step()
        steps.append(stats)
        if len(steps) % CONFIG.steps_for_target_q_sync == 0:
            model.sync_target_q_heads()
    some = max(1, round(EDGE * len(steps)))
    terms = {
        name: (
            mean(s[f"losses/{name}"] for s in steps[:some]),
            mean(s[f"losses/{name}"] for s in steps[-some:]),
        )
        for name in ("loss_q", "loss_v", "loss_cql", "loss_awac")
    }
    ended = int(pc.sum(pc.list_flatten(data.table["terminals"])).as_py() or 0)
    return Epoch(len(data), data.num_actions, len(data) - ended, len(steps), terms)
