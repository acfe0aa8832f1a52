"""Owns the ILQL loss and its statistics (research/ilql.md §1.8); must not know the model or the rows.

Implicit Language Q-Learning: Snell et al. 2022, arXiv:2206.11871, in trlX's form.

Axis letters: B rows, T tokens, A actions, S = A + 1 states, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from trajstore.errors import InputError
from trajstore.offline.elements import (
    CausalILQLOutput,
    ILQLBatch,
    ILQLSeq2SeqBatch,
    Seq2SeqILQLOutput,
)


@dataclass(frozen=True)
class ILQLConfig:
    """Weights of the loss and the rhythm of the target heads; names and defaults are trlX's.

    Attributes:
        tau: expectile of V over Q; 0.5 = the mean over the data's actions, towards 1 = the best of them.
        gamma: discount of one action.
        cql_scale, awac_scale: weights of the conservative and of the policy term.
        beta: sharpness of the policy term's weights exp(beta (Q - V)); 0 = behaviour cloning. The beta of
            decoding is another knob.
        alpha: step of the target heads towards the Q heads at a sync; 1 = a hard copy.
        steps_for_target_q_sync: optimizer steps between syncs.
        two_qs: two Q heads, of which the lower one counts.
    """

    tau: float = 0.7
    gamma: float = 0.99
    cql_scale: float = 0.1
    awac_scale: float = 1.0
    alpha: float = 0.001
    beta: float = 0.0
    steps_for_target_q_sync: int = 5
    two_qs: bool = True


def ilql_loss(
    outputs: CausalILQLOutput | Seq2SeqILQLOutput, batch: ILQLBatch | ILQLSeq2SeqBatch, config: ILQLConfig
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch: the mean over its trained actions.

    With m the trained actions, n = max(1, sum m), tQ = min_i target_q_i(a) and no gradient through tQ and V':

        L_q    = sum_i  mean (q_i(a) - (r + gamma V'))^2
        L_v    = mean w (tQ - V)^2,  w = tau where tQ >= V, else 1 - tau
        L_cql  = sum_i  mean cross_entropy(q_i, a)
        L_awac = mean cross_entropy(logits, a) exp(beta (tQ - V))

    m is `action_mask`; a batch of trlX has none, and its `dones` mask the actions.

    Args:
        outputs: logits [B, T, V], value [B, S, 1], qs and target_qs [B, A, V] each.
        batch: the batch they were computed from.
        config: the weights.

    Returns:
        The loss, and per term and per quantity statistics under trlX's names (`losses/loss_q`, ...).

    Raises:
        InputError: outputs lack the heads' values.
    """
    if outputs.logits is None or outputs.value is None or not outputs.qs or not outputs.target_qs:
        raise InputError("the outputs have no values or no Q values", hint="use a model with ILQL heads")
    tokens = batch.decoder_input_ids if isinstance(batch, ILQLSeq2SeqBatch) else batch.input_ids
    actions = tokens[:, 1:].gather(1, batch.actions_ixs)
    mask = (batch.dones[:, :-1] if batch.action_mask is None else batch.action_mask) > 0
    n = mask.sum().clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0).sum() / n

    def of_actions(q: Tensor) -> Tensor:
        return q.gather(-1, actions[..., None])[..., 0]

    def cross_entropy(logits: Tensor) -> Tensor:
        flat = F.cross_entropy(logits.flatten(0, 1), actions.flatten(), reduction="none")
        return flat.view_as(actions)

    q = [of_actions(head) for head in outputs.qs]
    target = reduce(torch.minimum, [of_actions(head) for head in outputs.target_qs]).detach()
    v = outputs.value[:, :-1, 0]
    goes_on = batch.dones[:, 1:] > 0
    following = torch.where(goes_on, outputs.value[:, 1:, 0].detach(), 0)
    aim = batch.rewards + config.gamma * following
    advantage = target - v
    expectile = torch.where(advantage >= 0, config.tau, 1 - config.tau)
    weight = (config.beta * advantage.detach()).exp()
    at_actions = outputs.logits.gather(
        1, batch.actions_ixs[..., None].expand(-1, -1, outputs.logits.shape[-1])
    )

    losses = {
        "loss_q": torch.stack([mean((one - aim) ** 2) for one in q]).sum(),
        "loss_v": mean(expectile * advantage**2),
        "loss_cql": torch.stack([mean(cross_entropy(head)) for head in outputs.qs]).sum(),
        "loss_awac": mean(cross_entropy(at_actions) * weight),
    }
    loss = (
        losses["loss_q"]
        + losses["loss_v"]
        + config.cql_scale * losses["loss_cql"]
        + config.awac_scale * losses["loss_awac"]
    )
    stats = {"losses/loss": loss, **{f"losses/{name}": term for name, term in losses.items()}}
    watched = {"values": v, **{f"qvalues/{i}": one for i, one in enumerate(q)}, "awac_weight": weight}
    for name, x in watched.items():
        stats |= {f"{name}/{what}": value for what, value in _summary(x.detach(), mask, n).items()}
    values = torch.stack(
        [value.detach().float() for value in stats.values()]
    ).tolist()  # one copy to the host
    return loss, dict(zip(stats, values, strict=True))


def _summary(x: Tensor, mask: Tensor, n: Tensor) -> dict[str, Tensor]:
    mean = torch.where(mask, x, 0).sum() / n
    return {
        "mean": mean,
        "min": torch.where(mask, x, torch.inf).min(),
        "max": torch.where(mask, x, -torch.inf).max(),
        "std": (torch.where(mask, x - mean, 0) ** 2).sum().div(n).sqrt(),
    }
