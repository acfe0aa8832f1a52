"""Owns decoding with an ILQL model: the policy's logits moved by beta (Q - V); must not train.

Axis letters: B rows, T tokens of the prompt, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trajstore.errors import InputError
from trajstore.offline.elements import CausalILQLOutput, Seq2SeqILQLOutput
from trajstore.offline.ilql_model import CausalILQLModel, Seq2SeqILQLModel


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen; names and defaults are trlX's.

    Attributes:
        beta: weight of the advantage Q - V; 0 = the policy as it is. (The loss has a beta of its own.)
        temperature: 0 = the best token.
        top_k: tokens that may be drawn; ties with the k-th are kept.
        max_new_tokens: where a row without eos ends.
        logit_mask: [V, V] bool, True at [last, next] = the token `next` may not follow `last`.
    """

    beta: float = 1.0
    temperature: float = 1.0
    top_k: int = 20
    max_new_tokens: int = 32
    logit_mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("top_k", self.top_k, 1), ("max_new_tokens", self.max_new_tokens, 0)):
            if value < least:
                raise InputError(f"{name} is {value}, expected at least {least}")
        if self.temperature < 0:
            raise InputError(f"temperature is {self.temperature}, expected 0 or more")


def topk_mask(scores: Tensor, k: int) -> Tensor:
    """Scores [B, V] with all below the k-th largest at -inf; ties are kept, k above V keeps all.

    Raises:
        InputError: k is below 1 (trlX fails with an IndexError).
    """
    if k < 1:
        raise InputError(f"top_k is {k}, expected at least 1")
    if k > scores.shape[-1]:
        return scores
    least = scores.topk(k).values[..., -1:]
    return torch.where(scores < least, -torch.inf, scores)


def scores(outputs: CausalILQLOutput | Seq2SeqILQLOutput, last_tokens: Tensor, decoding: Decoding) -> Tensor:
    """[B, V] log pi(a) + beta (min target Q(a) - V) at the last position, -inf where not allowed."""
    assert outputs.logits is not None
    assert outputs.target_qs is not None
    assert outputs.value is not None
    logits = outputs.logits[:, -1]
    if decoding.logit_mask is not None:
        logits = logits.masked_fill(decoding.logit_mask.to(logits.device)[last_tokens], -torch.inf)
    q = reduce(torch.minimum, [head[:, -1] for head in outputs.target_qs])
    advantage = q - outputs.value[:, -1]
    return topk_mask(F.log_softmax(logits, -1) + decoding.beta * advantage, decoding.top_k)


def _choose(scored: Tensor, decoding: Decoding, generator: torch.Generator | None) -> Tensor:
    if decoding.temperature == 0:
        return scored.argmax(-1, keepdim=True)
    chances = F.softmax(scored / decoding.temperature, -1)
    return torch.multinomial(chances, 1, generator=generator)


@torch.no_grad()
def generate(
    model: CausalILQLModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    eos_token_id: int,
    decoding: Decoding | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continues prompts, which are padded on the left.

    A backbone that gives a cache is fed one token at a time, another one the whole row each time.

    Args:
        input_ids: [B, T].
        attention_mask: [B, T], 0 on padding; None = there is none. It is never guessed from a pad id.
        eos_token_id: ends a row, which then holds only eos, with attention 0.
        decoding: how tokens are chosen.
        generator: of the draws.

    Returns:
        [B, T + n] prompts and continuations; n is smaller than max_new_tokens when all rows ended.
    """
    decoding = decoding or Decoding()
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    tokens, fed, past = input_ids, input_ids, None
    finished = torch.zeros_like(input_ids[:, :1], dtype=torch.bool)
    for _ in range(decoding.max_new_tokens):
        out = model(fed, mask, position_ids=positions, past_key_values=past, use_cache=True)
        chosen = _choose(scores(out, tokens[:, -1], decoding), decoding, generator)
        chosen = torch.where(finished, eos_token_id, chosen)
        finished = chosen == eos_token_id
        tokens = torch.cat([tokens, chosen], 1)
        mask = torch.cat([mask, (~finished).to(mask.dtype)], 1)
        past, following = out.past_key_values, positions[:, -1:] + 1
        fed, positions = (
            (tokens, torch.cat([positions, following], 1)) if past is None else (chosen, following)
        )
        if finished.all():
            break
    return tokens


@torch.no_grad()
def generate_seq2seq(
    model: Seq2SeqILQLModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    decoder_start_token_id: int,
    eos_token_id: int,
    decoding: Decoding | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Answers encoder inputs [B, T]: [B, 1 + n] tokens, the start token first; else as `generate`."""
    decoding = decoding or Decoding()
    tokens = torch.full_like(input_ids[:, :1], decoder_start_token_id)
    finished = torch.zeros_like(tokens, dtype=torch.bool)
    told: dict[str, Any] = {"input_ids": input_ids}
    past = None
    for _ in range(decoding.max_new_tokens):
        fed = tokens if past is None else tokens[:, -1:]
        out = model(
            **told, attention_mask=attention_mask, decoder_input_ids=fed, past_key_values=past, use_cache=True
        )
        chosen = _choose(scores(out, tokens[:, -1], decoding), decoding, generator)
        chosen = torch.where(finished, eos_token_id, chosen)
        finished = chosen == eos_token_id
        tokens = torch.cat([tokens, chosen], 1)
        past = out.past_key_values
        if out.encoder_outputs is not None:
            told = {"encoder_outputs": out.encoder_outputs}
        if finished.all():
            break
    return tokens
