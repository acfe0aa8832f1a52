"""Owns the ILQL heads and the models that carry them over a backbone; must not know the data or the loss.

Axis letters: B rows, T tokens, A actions, S states, H the hidden size, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from trajstore.errors import InputError
from trajstore.offline.elements import CausalILQLOutput, Seq2SeqILQLOutput


def _head(hidden_size: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden_size, 2 * hidden_size), nn.ReLU(), nn.Linear(2 * hidden_size, out))


def _select(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, T, H] at positions [B, N] → [B, N, H]."""
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))


class ILQLHeads(nn.Module):
    """V, one or two Q heads, and target Q heads that follow them; parameters have trlX's names.

    Args:
        hidden_size: H of the backbone.
        vocab_size: V.
        two_qs: two Q heads, of which the lower one counts.
        alpha: step of the target heads at a sync; 1 = a hard copy.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, two_qs: bool = True, alpha: float = 0.001
    ) -> None:
        super().__init__()
        self.alpha = alpha
        self.v_head = _head(hidden_size, 1)
        self.q_heads = nn.ModuleList(_head(hidden_size, vocab_size) for _ in range(2 if two_qs else 1))
        self.target_q_heads = nn.ModuleList(deepcopy(head) for head in self.q_heads)
        self.target_q_heads.requires_grad_(False)

    def forward(
        self, hidden: Tensor, states_ixs: Tensor | None = None, actions_ixs: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Q values, target Q values and V.

        Args:
            hidden: [B, T, H] last hidden states.
            states_ixs: [B, S] positions to value; None = all.
            actions_ixs: [B, A] positions to give Q values for; None = all.

        Returns:
            qs and target_qs, a tuple of [B, A, V] each, and vs [B, S, 1].
        """
        states = hidden if states_ixs is None else _select(hidden, states_ixs)
        actions = hidden if actions_ixs is None else _select(hidden, actions_ixs)
        qs = tuple(head(actions) for head in self.q_heads)
        with torch.no_grad():
            targets = tuple(head(actions) for head in self.target_q_heads)
        return qs, targets, self.v_head(states)

    @torch.no_grad()
    def sync_target_q_heads(self, alpha: float | None = None) -> None:
        """Moves the target heads towards the Q heads: t ← alpha q + (1 - alpha) t (Polyak; 1 = a copy)."""
        step = self.alpha if alpha is None else alpha
        for target, source in zip(self.target_q_heads.parameters(), self.q_heads.parameters(), strict=True):
            target.mul_(1 - step).add_(source, alpha=step)


class _Backbone:
    """How a backbone is called: what it takes, and where in its answer the hidden states are."""

    def __init__(self, module: nn.Module) -> None:
        self.is_transformers = hasattr(getattr(module, "config", None), "is_encoder_decoder")
        self.takes = frozenset(inspect.signature(module.forward).parameters)

    def call(self, module: nn.Module, **given: Any) -> Any:
        told = {name: value for name, value in given.items() if value is not None and name in self.takes}
        if self.is_transformers:
            told |= {"output_hidden_states": True, "return_dict": True}
        return module(**told)


class _WithHeads(nn.Module):
    """A backbone and the heads over its hidden states; see CausalILQLModel."""

    def __init__(
        self,
        backbone: nn.Module,
        *,
        hidden_size: int | None = None,
        vocab_size: int | None = None,
        two_qs: bool = True,
        alpha: float = 0.001,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self._how = _Backbone(backbone)
        sizes = _sizes(backbone, hidden_size, vocab_size)
        self.ilql_heads = ILQLHeads(*sizes, two_qs=two_qs, alpha=alpha)

    def sync_target_q_heads(self) -> None:
        """See ILQLHeads."""
        self.ilql_heads.sync_target_q_heads()


class CausalILQLModel(_WithHeads):
    """A causal language model with ILQL heads on its last hidden state.

    Args:
        backbone: a transformers causal model, or any module whose forward takes `input_ids` (and whichever of
            `attention_mask`, `position_ids` and `past_key_values` it knows) and gives `(logits, hidden)`
            or `(logits, hidden, past_key_values)`: [B, T, V] and [B, T, H].
        hidden_size, vocab_size: of the backbone; read from the config of a transformers model.
        two_qs, alpha: see ILQLHeads.

    Raises:
        InputError: the sizes are neither given nor to be read from the backbone.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        states_ixs: Tensor | None = None,
        actions_ixs: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> CausalILQLOutput:
        """Logits everywhere; V and Q at the named positions, else everywhere."""
        out = self._how.call(
            self.backbone,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        if isinstance(out, tuple):
            logits, hidden_states = out[0], (out[1],)
            past = out[2] if len(out) > 2 else None
        else:
            logits, hidden_states, past = out.logits, out.hidden_states, out.past_key_values
        qs, targets, value = self.ilql_heads(hidden_states[-1], states_ixs, actions_ixs)
        return CausalILQLOutput(logits, past, hidden_states, value, qs, targets)


class Seq2SeqILQLModel(_WithHeads):
    """An encoder-decoder with ILQL heads on the decoder's last hidden state.

    Args:
        backbone: a transformers encoder-decoder, or any module whose forward takes `input_ids`,
            `attention_mask` and `decoder_input_ids` and gives `(logits, hidden)` of the decoder: [B, D, V]
            and [B, D, H].
        hidden_size, vocab_size, two_qs, alpha: as in CausalILQLModel.

    Raises:
        InputError: the sizes are neither given nor to be read from the backbone.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        states_ixs: Tensor | None = None,
        actions_ixs: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Seq2SeqILQLOutput:
        """As CausalILQLModel, at the decoder's positions; `encoder_outputs` spares the encoder."""
        out = self._how.call(
            self.backbone,
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        encoded = None
        if isinstance(out, tuple):
            logits, hidden_states, past = out[0], (out[1],), None
        else:
            logits, hidden_states, past = out.logits, out.decoder_hidden_states, out.past_key_values
            encoded = (out.encoder_last_hidden_state,)
        qs, targets, value = self.ilql_heads(hidden_states[-1], states_ixs, actions_ixs)
        return Seq2SeqILQLOutput(logits, past, hidden_states, value, qs, targets, encoded)


def _sizes(backbone: nn.Module, hidden_size: int | None, vocab_size: int | None) -> tuple[int, int]:
    config = getattr(backbone, "config", None)
    for name in ("hidden_size", "d_model", "n_embd"):
        hidden_size = hidden_size or getattr(config, name, None)
    vocab_size = vocab_size or getattr(config, "vocab_size", None)
    if not hidden_size or not vocab_size:
        raise InputError(
            f"hidden_size is {hidden_size} and vocab_size is {vocab_size}, and the backbone does not say",
            hint="pass hidden_size= and vocab_size=",
        )
    return hidden_size, vocab_size
