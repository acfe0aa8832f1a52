"""Owns the demo's policy: a small transformer, its log-probs and its published weights; knows no store.

Axis letters: B rows, T tokens of the longest row, V the vocabulary, D the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trajstore.demo import task
from trajstore.trajectory import PolicyVersion

WIDTH = 48
HEADS = 2
FREQUENCIES = 12


class Policy(nn.Module):
    """One attention layer over characters whose places are counted from the prompt's end, in both directions.

    It sees nothing but the tokens, so decoding, recomputing log-probs and training are one function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(task.VOCABULARY, WIDTH)
        self.side = nn.Embedding(2, WIDTH)
        self.place = nn.Linear(2 * FREQUENCIES, WIDTH, bias=False)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, task.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Log-probs of the token after each position, [B, T, V], of right-padded tokens [B, T]."""
        return self.predict(self.states(tokens))

    def predict(self, states: Tensor) -> Tensor:
        """Log-probs [B, T, V] from hidden states [B, T, D]."""
        logits: Tensor = self.head(states)
        logits[..., task.PAD] = -torch.inf
        return logits.log_softmax(-1)

    def states(self, tokens: Tensor) -> Tensor:
        """Last hidden states, [B, T, D]."""
        count, width = tokens.shape
        end = (tokens == task.ASK).int().argmax(1, keepdim=True)
        place = torch.arange(width) - end  # [B, T], below 0 in the prompt
        rates = torch.pi * 2.0 ** (-torch.arange(FREQUENCIES) / 2)
        angles = place.abs().unsqueeze(-1) * rates
        places = self.place(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.token(tokens) + self.side((place >= 0).long()) + places
        heads = self.attend(x).view(count, width, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        # Causal, and padding is on the right: no token ever looks at padding.
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(count, width, WIDTH))
        x = x + self.think(x)
        hidden: Tensor = self.norm(x)
        return hidden


def log_probs_of(policy: Policy, tokens: Tensor) -> Tensor:
    """Log-prob of each token given those before it, [B, T]; 0 on padding and at index 0."""
    after = tokens[:, 1:]
    predicted = policy(tokens[:, :-1]).gather(-1, after.unsqueeze(-1)).squeeze(-1)
    return F.pad(predicted.masked_fill(after == task.PAD, 0.0), (1, 0))


class Adam:
    """The optimizer of that name; torch.optim's imports a compiler first, which is slower than all of this.

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.rate = rate
        self.steps = 0
        trained = [p for p in model.parameters() if p.requires_grad]
        self.state = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in trained]

    @torch.no_grad()
    def step(self) -> None:
        """One step down the gradients at hand, their norm clipped to 1."""
        self.steps += 1
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p, _, _ in self.state]
        shrink = max(1.0, float(torch.stack([grad.norm() for grad in grads]).norm()))
        rate = self.rate * (1 - 0.999**self.steps) ** 0.5 / (1 - 0.9**self.steps)
        for (parameter, mean, square), grad in zip(self.state, grads, strict=True):
            mean.lerp_(grad / shrink, 0.1)
            square.lerp_((grad / shrink) ** 2, 0.001)
            parameter.addcdiv_(mean, square.sqrt() + 1e-8, value=-rate)


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Right-padded token ids, [B, T] int64."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[task.PAD] * (width - len(row))] for row in rows])


def publish(policy: Policy, folder: Path, version: PolicyVersion) -> None:
    """Writes the weights of a version; a reader sees all of them or nothing."""
    unfinished = folder / f"{version.version_id:04d}.unfinished"
    stamp = {"version_id": version.version_id, "timestamp": version.timestamp, "step": version.step}
    torch.save({"weights": policy.state_dict(), "version": stamp}, unfinished)
    unfinished.rename(weights_path(folder, version.version_id))


def weights_path(folder: Path, version_id: int) -> Path:
    """Where the weights of a version are."""
    return folder / f"{version_id:04d}.pt"


def load(policy: Policy, folder: Path, version_id: int) -> PolicyVersion:
    """Gives the policy the weights of a published version."""
    found = torch.load(weights_path(folder, version_id), weights_only=True)
    policy.load_state_dict(found["weights"])
    return PolicyVersion(**found["version"])


def newest(folder: Path) -> int | None:
    """The newest published version, None before the first one."""
    return max((int(path.stem) for path in folder.glob("*.pt")), default=None)
