"""Owns the sums over the tokens of each row that a survey is made of, block by block; reads no file."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajstore.query.blocks import Block, Values, blocks_of, count_runs, reduce_runs
from trajstore.selection import seeded_keys

CLIP = 0.2
"""PPO's epsilon: a ratio outside 1 ± CLIP is clipped (Schulman et al., 2017)."""

ROUNDING = 1e-3
"""Nats above 0 that a log-prob may be by rounding in half precision."""

MEASURES: dict[str, Any] = {
    "actions": np.int64,  # tokens the policy sampled (action_mask, else loss_mask, else the response)
    "loss_tokens": np.int64,  # tokens that are trained on (loss_mask, else the response)
    "has_split": np.bool_,  # a loss mask is given or follows from the split
    "loss_on_prompt": np.int64,  # loss tokens before the response
    "loss_off_action": np.int64,  # loss tokens that action_mask says the policy did not sample
    "loss_off_attention": np.int64,  # loss tokens that attention_mask hides
    "mask_shifted": np.bool_,  # loss_mask is that of the response, one place early
    "log_probs_shifted": np.bool_,  # behavior log-probs are those of the response, one place early
    "has_behavior": np.bool_,
    "has_log_probs": np.bool_,
    "behavior_zero": np.int64,  # action tokens whose behavior log-prob is exactly 0
    "behavior_positive": np.int64,  # ... is above 0, a probability above 1
    "not_finite": np.int64,  # action tokens whose log-prob of either kind is NaN or infinite
    "ratio_tokens": np.int64,  # action tokens with both log-probs, finite
    "log_ratio_sum": np.float64,  # of log_probs - behavior_log_probs over them
    "log_ratio_abs": np.float64,
    "log_ratio_max": np.float64,  # the largest absolute value
    "k2_sum": np.float64,
    "k3_sum": np.float64,
    "clipped_low": np.int64,  # ratios below 1 - CLIP
    "clipped_high": np.int64,  # ratios above 1 + CLIP
    "log_weight": np.float64,  # log of the sum of the ratios to 1e-6, -inf when there are none
    "log_weight_squared": np.float64,  # log of the sum of their squares, the same
    "prompt_hash": np.uint64,  # 64-bit hashes of the token ids in their order
    "response_hash": np.uint64,
}

DRIFT = (
    *("ratio_tokens", "log_ratio_sum", "log_ratio_abs", "log_ratio_max", "k2_sum", "k3_sum"),
    *("clipped_low", "clipped_high", "log_weight", "log_weight_squared"),
)
"""The measures that `metrics.drift` reads."""

RATIO_COLUMNS = ("loss_mask", "action_mask", "log_probs", "behavior_log_probs")


def columns_of(wanted: Collection[str]) -> list[str]:
    """The list columns that these measures read."""
    return list(dict.fromkeys(c for f in _FAMILIES if f.names & {*wanted} for c in f.columns))


def measure(table: pa.Table, wanted: Collection[str] = tuple(MEASURES)) -> dict[str, Values]:
    """Measures of N rows, [N] each.

    Args:
        table: `length`, `prompt_length` and `columns_of(wanted)`.
        wanted: which of MEASURES.
    """
    families = [f for f in _FAMILIES if f.names & {*wanted}]
    out = {name: np.zeros(table.num_rows, MEASURES[name]) for name in MEASURES if name in wanted}
    first = 0
    for block in blocks_of(table, columns_of(wanted)):
        rows = slice(first, first := first + len(block.lengths))
        for family in families:
            for name, values in family.compute(block).items():
                if name in out:
                    out[name][rows] = values
    return out


def _masks(block: Block) -> dict[str, Values]:
    loss, action = block.loss, block.action
    attention, _ = block.columns["attention_mask"]
    hidden = None if attention is None else loss & ~block.mask("attention_mask", lambda: np.ones_like(loss))
    counted = block.count(loss)
    return {
        "loss_tokens": counted,
        "actions": counted if action is loss else block.count(action),
        "has_split": block.columns["loss_mask"].given | (block.prompt >= 0),
        "loss_on_prompt": np.where(block.prompt >= 0, block.count(loss & ~block.response), 0),
        "loss_off_action": np.where(block.columns["action_mask"].given, block.count(loss & ~action), 0),
        "loss_off_attention": block.count(hidden),
        "mask_shifted": block.is_early("loss_mask", lambda values: values != 0),
    }


def _log_probs(block: Block) -> dict[str, Values]:
    behavior, has_behavior = block.columns["behavior_log_probs"]
    zero = positive = None
    if behavior is not None:
        with np.errstate(invalid="ignore"):
            zero, positive = block.action & (behavior == 0), block.action & (behavior > ROUNDING)
        if not has_behavior.all():
            zero &= np.repeat(has_behavior, block.lengths)
    return {
        "has_behavior": has_behavior,
        "has_log_probs": block.columns["log_probs"].given,
        "behavior_zero": block.count(zero),
        "behavior_positive": block.count(positive),
        "not_finite": block.count(block.not_finite),
        # A real log-prob of exactly 0 in mid-response happens, so only rows without one are judged.
        "log_probs_shifted": block.is_early("behavior_log_probs", lambda values: values != 0),
    }


def _log_ratios(block: Block) -> dict[str, Values]:
    current, behavior, counts = block.paired
    r = np.subtract(current, behavior, dtype=np.float64)
    size = np.abs(r)
    with np.errstate(over="ignore"):
        k3 = np.exp(r) - 1 - r
    low, high = r < np.log1p(-CLIP), r > np.log1p(CLIP)

    return {
        "log_ratio_sum": reduce_runs(np.add, r, counts, 0),
        "log_ratio_abs": reduce_runs(np.add, size, counts, 0),
        "log_ratio_max": reduce_runs(np.maximum, size, counts, 0),
        "k2_sum": reduce_runs(np.add, r * r, counts, 0) / 2,
        "k3_sum": reduce_runs(np.add, k3, counts, 0),
        "clipped_low": count_runs(low, counts),
        "clipped_high": count_runs(high, counts),
    }


def _weights(block: Block) -> dict[str, Values]:
    """Sums of ratios as logarithms; where float32 does not hold them, from the row's largest."""
    if block.ratios is not None:
        anchor, weight, lengths = np.zeros(len(block.lengths)), block.ratios, block.lengths
    else:
        current, behavior, lengths = block.paired
        r = np.subtract(current, behavior, dtype=np.float64)
        anchor = reduce_runs(np.maximum, r, lengths, 0)
        weight = np.exp(r - np.repeat(anchor, lengths))
    with np.errstate(divide="ignore"):
        return {
            "ratio_tokens": block.count(block.both),
            "log_weight": np.log(reduce_runs(np.add, weight, lengths, 0)) + anchor,
            "log_weight_squared": np.log(reduce_runs(np.add, weight * weight, lengths, 0)) + 2 * anchor,
        }


def ratio_sums(table: pa.Table) -> tuple[float, int]:
    """Sum of the importance ratios of all tokens that have one, to 1e-6, and their number.

    Args:
        table: `length`, `prompt_length` and the columns of `RATIO_COLUMNS`.
    """
    total, count = 0.0, 0
    for block in blocks_of(table, RATIO_COLUMNS):
        if block.both is None:
            continue
        if block.ratios is not None:
            total += float(block.ratios.sum(dtype=np.float64))
        else:
            current, behavior, _ = block.paired
            total += float(np.exp(np.subtract(current, behavior, dtype=np.float64)).sum())
        count += int(np.count_nonzero(block.both))
    return total, count


def _hashes(block: Block) -> dict[str, Values]:
    """Multilinear hashes: the sum over a part of (token + 1) times a random number of its place, mod 2^64.

    Two parts have the same hash with probability 2^-64, or 2^-33 at worst, when every difference of ids is a
    large power of two. Source: Lemire, Kaser, "Strongly universal string hashing is fast", 2014.
    """
    tokens, _ = block.columns["tokens"]
    assert tokens is not None  # the column is never null
    prompts = np.maximum(block.prompt, 0)
    parts = np.column_stack((prompts, block.lengths - prompts)).ravel()
    place = np.arange(len(tokens)) - np.repeat(np.cumsum(parts) - parts, parts)
    random = seeded_keys(np.arange(int(parts.max(initial=0))), 0)
    mixed = random.take(place)
    mixed *= np.add(tokens, 1, dtype=np.int64).view(np.uint64)
    both = reduce_runs(np.add, mixed, parts, 0).reshape(-1, 2)
    return {"prompt_hash": both[:, 0], "response_hash": both[:, 1]}


class _Family(NamedTuple):
    """Measures that are made together, and the columns they need."""

    compute: Callable[[Block], dict[str, Values]]
    columns: tuple[str, ...]
    names: frozenset[str]


_FAMILIES = (
    _Family(
        _masks,
        ("loss_mask", "action_mask", "attention_mask"),
        frozenset(
            {
                *("actions", "loss_tokens", "has_split", "loss_on_prompt"),
                *("loss_off_action", "loss_off_attention", "mask_shifted"),
            }
        ),
    ),
    _Family(
        _log_probs,
        RATIO_COLUMNS,
        frozenset(
            {
                *("log_probs_shifted", "has_behavior", "has_log_probs"),
                *("behavior_zero", "behavior_positive", "not_finite"),
            }
        ),
    ),
    _Family(
        _log_ratios,
        RATIO_COLUMNS,
        frozenset(
            {
                *("log_ratio_sum", "log_ratio_abs", "log_ratio_max", "k2_sum", "k3_sum"),
                *("clipped_low", "clipped_high"),
            }
        ),
    ),
    _Family(_weights, RATIO_COLUMNS, frozenset({"ratio_tokens", "log_weight", "log_weight_squared"})),
    _Family(_hashes, ("tokens",), frozenset({"prompt_hash", "response_hash"})),
)
