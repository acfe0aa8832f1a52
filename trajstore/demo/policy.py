"""Owns the demo's policy: a small causal transformer, its log-probs and its published weights; knows no store.

Axis letters: B rows, T tokens of the longest row, V the vocabulary, D the width.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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
        count, width = tokens.shape
        end = (tokens == task.ASK).int().argmax(1, keepdim=True)
        place = torch.arange(width) - end  # below 0 in the prompt
        rates = 2.0 ** -torch.arange(FREQUENCIES // 2 * 2, dtype=torch.float32).div(2)
        angles = place.abs().unsqueeze(-1) * rates * torch.pi
        places = self.place(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.token(tokens) + self.side((place >= 0).long()) + places
        heads = self.attend(x).view(count, width, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        # Causal, and padding is on the right: no token ever looks at padding.
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(count, width, WIDTH))
        x = x + self.think(x)
        logits: Tensor = self.head(self.norm(x))
        logits[..., task.PAD] = -torch.inf
        return logits.log_softmax(-1)


def log_probs_of(policy: Policy, tokens: Tensor) -> Tensor:
    """Log-prob of each token given those before it, [B, T]; 0 on padding and at index 0, which nothing predicts."""
    after = tokens[:, 1:]
    predicted = policy(tokens[:, :-1]).gather(-1, after.unsqueeze(-1)).squeeze(-1)
    return F.pad(predicted.masked_fill(after == task.PAD, 0.0), (1, 0))
