"""Owns the data classes of offline RL as trlX names them: elements, batches, model outputs; computes nothing.

The first fields of each class are those of the public page it implements, in its order. Fields that follow
are ours, optional, and None where trlX is reproduced.

Axis letters: B rows, T tokens, D decoder tokens, A actions, S = A + 1 states, Q and R tokens of query and
response, V tokens of the vocabulary, H the hidden size. Index i of `actions_ixs` is the position that
*predicts* the action: the action's token is `input_ids[actions_ixs[i] + 1]`. `dones` is a continuation mask
in spite of its name: 1 = the episode goes on, 0 = it ended (or padding). `terminals` says it straight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class PPORLElement:
    """One query and its response; index i of the floats belongs to response token i.

    Attributes:
        query_tensor: [Q] int64 prompt tokens.
        response_tensor: [R] int64 output tokens.
        logprobs, values, rewards: [n] float32, n <= R.
        response_mask: [R] int64, 1 = sampled and trained on; None = all.
    """

    query_tensor: Tensor
    response_tensor: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    response_mask: Tensor | None = None


@dataclass
class PPORLBatch:
    """Padded PPO elements; the floats may be narrower than the responses.

    Attributes:
        query_tensors: [B, Q] int64, padded left or right.
        response_tensors: [B, R] int64, padded right.
        logprobs, values, rewards: [B, n] float32, padded right with 0.
        response_masks: [B, R] int64, 0 on padding; None when no element has one.
    """

    query_tensors: Tensor
    response_tensors: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    response_masks: Tensor | None = None


@dataclass
class ILQLElement:
    """One trajectory for ILQL.

    Attributes:
        input_ids, attention_mask: [T] int64.
        rewards: [A] float32, received for each action.
        states_ixs: [S] int64, `actions_ixs` and the position of the state after the last action.
        actions_ixs: [A] int64, positions that predict the actions.
        dones: [S] int64, 1 = goes on, 0 = ended.
        terminals: [S] int64, 1 = the episode ended in this state.
        action_mask: [A] int64, 1 = the action is trained on.
    """

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor
    states_ixs: Tensor
    actions_ixs: Tensor
    dones: Tensor
    terminals: Tensor | None = None
    action_mask: Tensor | None = None


@dataclass
class ILQLSeq2SeqElement:
    """One trajectory for ILQL with an encoder and a decoder; indices count decoder tokens.

    Attributes:
        input_ids, attention_mask: [T] int64 encoder tokens.
        decoder_input_ids: [D] int64.
        rewards, states_ixs, actions_ixs, dones, terminals, action_mask: as in ILQLElement.
    """

    input_ids: Tensor
    attention_mask: Tensor
    decoder_input_ids: Tensor
    rewards: Tensor
    states_ixs: Tensor
    actions_ixs: Tensor
    dones: Tensor
    terminals: Tensor | None = None
    action_mask: Tensor | None = None


@dataclass
class ILQLBatch:
    """Right-padded ILQL elements: [B, T], [B, A] and [B, S]; `terminals` pads with 1, the rest with 0."""

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor
    states_ixs: Tensor
    actions_ixs: Tensor
    dones: Tensor
    terminals: Tensor | None = None
    action_mask: Tensor | None = None


@dataclass
class ILQLSeq2SeqBatch:
    """Right-padded ILQLSeq2SeqElements: [B, T], [B, D], [B, A] and [B, S]."""

    input_ids: Tensor
    attention_mask: Tensor
    decoder_input_ids: Tensor
    rewards: Tensor
    states_ixs: Tensor
    actions_ixs: Tensor
    dones: Tensor
    terminals: Tensor | None = None
    action_mask: Tensor | None = None


@dataclass
class CausalILQLOutput:
    """What a causal model with ILQL heads gives.

    Attributes:
        logits: [B, T, V].
        past_key_values: the backbone's cache, as the backbone gives it.
        hidden_states: the backbone's hidden states, the last one [B, T, H].
        value: [B, S, 1], or [B, T, 1] when no states were named.
        qs, target_qs: one [B, A, V] for each Q head, or [B, T, V] when no actions were named.
    """

    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    value: Tensor | None = None
    qs: tuple[Tensor, ...] | None = None
    target_qs: tuple[Tensor, ...] | None = None


@dataclass
class Seq2SeqILQLOutput:
    """What an encoder-decoder with ILQL heads gives; positions are the decoder's."""

    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    value: Tensor | None = None
    qs: tuple[Tensor, ...] | None = None
    target_qs: tuple[Tensor, ...] | None = None
    encoder_outputs: tuple[Any, ...] | None = None
