"""Owns the sums over the tokens of each row, from flat buffers in blocks that fit a cache; reads no file.

Per-token columns are null or exactly as long as `tokens` (DESIGN §3), so all of them share one set of row
starts, and a sum a row is one `reduceat` over a flat buffer. No Python runs per row or per token.

Axis letters: N rows, T tokens of all of them row after row, K of the tokens that have an importance ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.selection import seeded_keys

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Values = NDArray[Any]

CLIP = 0.2
"""PPO's epsilon: a ratio outside 1 ± CLIP is clipped (Schulman et al., 2017)."""

ROUNDING = 1e-3
"""Nats above 0 that a log-prob may be by rounding in half precision."""

BLOCK = 1 << 16
"""Tokens of a block: large enough to hide the cost of a call, small enough for a cache."""

SAFE = 40.0
"""Log-ratios within ± SAFE have ratios, and squares of them, that float32 holds."""

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
    lengths = table["length"].to_numpy().astype(np.int64)
    prompt = table["prompt_length"].fill_null(-1).to_numpy().astype(np.int64)
    columns = {name: _flat(table[name], lengths) for name in columns_of(wanted)}
    for rows, block in _blocks(lengths, prompt, columns):
        for family in families:
            for name, values in family.compute(block).items():
                if name in out:
                    out[name][rows] = values
    return out


class _Column(NamedTuple):
    """A per-token column: values [T], 0 in rows that are null, and whether each row has them, [N].

    `values` is None where no row has any, which is most columns of most stores.
    """

    values: Values | None
    given: Bools


def _flat(column: pa.ChunkedArray, lengths: Int64s) -> _Column:
    if column.null_count == len(column):
        return _Column(None, np.zeros(len(column), np.bool_))
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    values = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if not column.null_count:
        return _Column(values, np.ones(len(column), np.bool_))
    given = column.is_valid().to_numpy().astype(np.bool_)
    whole = np.zeros(int(lengths.sum()), values.dtype)
    whole[np.repeat(given, lengths)] = values
    return _Column(whole, given)


def _blocks(
    lengths: Int64s, prompt: Int64s, columns: Mapping[str, _Column]
) -> Iterator[tuple[slice, _Block]]:
    """Runs of rows of about BLOCK tokens; a row is never cut."""
    ends = np.cumsum(lengths)
    first = at = 0
    while first < len(lengths):
        last = max(first + 1, int(np.searchsorted(ends, at + BLOCK, side="right")))
        rows, tokens = slice(first, last), slice(at, int(ends[last - 1]))
        cut = {
            name: _Column(None if c.values is None else c.values[tokens], c.given[rows])
            for name, c in columns.items()
        }
        yield rows, _Block(lengths[rows], prompt[rows], cut)
        first, at = last, int(ends[last - 1])


@dataclass(frozen=True)
class _Block:
    """Some rows as flat arrays.

    Attributes:
        lengths: [N].
        prompt: [N], -1 where the split is not known.
    """

    lengths: Int64s
    prompt: Int64s
    columns: Mapping[str, _Column]

    @cached_property
    def starts(self) -> Int64s:
        """Of each row in the flat arrays, [N]."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def split(self) -> Int64s:
        """Tokens before the response, [N]: all of them where the split is not known."""
        return np.where(self.prompt < 0, self.lengths, self.prompt)

    @cached_property
    def response(self) -> Bools:
        """Tokens from the split on, [T]; none where it is not known."""
        pairs = np.column_stack((self.split, self.lengths - self.split)).ravel()
        return np.repeat(np.tile([False, True], len(self.lengths)), pairs)

    @cached_property
    def loss(self) -> Bools:
        """Tokens that are trained on, [T]."""
        return self.mask("loss_mask", lambda: self.response)

    @cached_property
    def action(self) -> Bools:
        """Tokens that the policy sampled, [T]."""
        return self.mask("action_mask", lambda: self.loss)

    @cached_property
    def not_finite(self) -> Bools | None:
        """Action tokens whose log-prob of either kind is NaN or infinite, [T]; None when there are none."""
        bad = None
        for name in ("behavior_log_probs", "log_probs"):
            values, _ = self.columns[name]
            if values is not None and not (finite := np.isfinite(values)).all():
                bad = ~finite if bad is None else bad | ~finite
        return None if bad is None else bad & self.action

    @cached_property
    def paired(self) -> tuple[NDArray[np.float32], NDArray[np.float32], Int64s]:
        """log_probs and behavior_log_probs of the tokens that have both, [K] each; their number a row, [N]."""
        current, has_current = self.columns["log_probs"]
        behavior, has_behavior = self.columns["behavior_log_probs"]
        if current is None or behavior is None:
            nothing = np.zeros(0, np.float32)
            return nothing, nothing, np.zeros(len(self.lengths), np.int64)
        both = self.action
        rows = has_current & has_behavior
        if not rows.all():
            both = both & np.repeat(rows, self.lengths)
        if self.not_finite is not None:
            both = both & ~self.not_finite
        if both.all():
            return current, behavior, self.lengths
        kept = np.flatnonzero(both)
        return current.take(kept), behavior.take(kept), self.count(both)

    def mask(self, name: str, otherwise: Callable[[], Bools]) -> Bools:
        """The mask of that name, [T], or `otherwise` in rows that do not have it."""
        values, given = self.columns[name]
        if values is None:
            return otherwise()
        marked: Bools = values != 0
        if given.all():
            return marked
        has = np.repeat(given, self.lengths)
        return (has & marked) | (~has & otherwise())

    def count(self, marks: Bools | None) -> Int64s:
        """Marks of each row, [N]."""
        return np.zeros(len(self.lengths), np.int64) if marks is None else _count(marks, self.lengths)

    def is_early(self, name: str, marks: Callable[[Values], Bools]) -> Bools:
        """Rows with a prompt and a response, [N], whose marks are those of the response, one place early."""
        values, given = self.columns[name]
        there = given & (self.prompt > 0) & (self.prompt < self.lengths)
        if values is None or not there.any():
            return there & False
        # Most rows are told apart by two tokens; only when one is not are all of them looked at.
        first, last = (self.starts + self.prompt)[there] - 1, (self.starts + self.lengths)[there] - 1
        there[there] = marks(values[first]) & ~marks(values[last])
        if there.any():
            early = np.zeros(len(values), np.bool_)
            early[:-1] = self.response[1:]
            early[(self.starts + self.lengths - 1)[self.lengths > 0]] = False
            there &= self.count(marks(values) != early) == 0
        return there


def _count(marks: Bools, counts: Int64s) -> Int64s:
    """Marks in each stretch of `counts` of them, [N]."""
    return _reduce(np.add, marks, counts, 0) if marks.any() else np.zeros(len(counts), np.int64)


def _reduce(how: np.ufunc, values: Values, counts: Int64s, empty: float) -> Values:
    """One value for each stretch of `counts` values, [N]; `empty` for a stretch of none."""
    dtype = np.dtype(np.int64) if values.dtype == np.bool_ else values.dtype
    dtype = np.dtype(np.float64) if dtype == np.float32 else dtype
    starts = np.cumsum(counts) - counts
    some = counts > 0  # reduceat gives an empty stretch the value that follows it
    if some.all() and len(counts):
        return how.reduceat(values, starts, dtype=dtype)  # type: ignore[no-any-return]  # numpy says Any
    out = np.full(len(counts), empty, dtype)
    if some.any():
        out[some] = how.reduceat(values, starts[some], dtype=dtype)
    return out


def _masks(block: _Block) -> dict[str, Values]:
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


def _log_probs(block: _Block) -> dict[str, Values]:
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


def _log_ratios(block: _Block) -> dict[str, Values]:
    current, behavior, counts = block.paired
    r = np.subtract(current, behavior, dtype=np.float64)
    size = np.abs(r)
    with np.errstate(over="ignore"):
        k3 = np.exp(r) - 1 - r
    low, high = r < np.log1p(-CLIP), r > np.log1p(CLIP)

    return {
        "log_ratio_sum": _reduce(np.add, r, counts, 0),
        "log_ratio_abs": _reduce(np.add, size, counts, 0),
        "log_ratio_max": _reduce(np.maximum, size, counts, 0),
        "k2_sum": _reduce(np.add, r * r, counts, 0) / 2,
        "k3_sum": _reduce(np.add, k3, counts, 0),
        "clipped_low": _count(low, counts),
        "clipped_high": _count(high, counts),
    }


def _weights(block: _Block) -> dict[str, Values]:
    """Sums of ratios as logarithms; where float32 does not hold them, from the row's largest."""
    current, behavior, counts = block.paired
    with np.errstate(over="ignore"):
        r = current - behavior  # in float32 it is the exact difference, rounded once
    anchor = np.zeros(len(counts))
    if len(r) and not (-SAFE < r.min() and r.max() < SAFE):
        r = np.subtract(current, behavior, dtype=np.float64)
        anchor = _reduce(np.maximum, r, counts, 0)
        r -= np.repeat(anchor, counts)
    weight = np.exp(r)
    with np.errstate(divide="ignore"):
        return {
            "ratio_tokens": counts,
            "log_weight": np.log(_reduce(np.add, weight, counts, 0)) + anchor,
            "log_weight_squared": np.log(_reduce(np.add, weight * weight, counts, 0)) + 2 * anchor,
        }


def _hashes(block: _Block) -> dict[str, Values]:
    """Multilinear hashes: the sum over a part of (token + 1) times a random number of its place, mod 2^64.

    Two parts that differ by few ids have the same hash with probability 2^-64, or 2^-33 when every
    difference is a large power of two. Source: Lemire, Kaser, "Strongly universal string hashing is fast", 2014.
    """
    tokens, _ = block.columns["tokens"]
    assert tokens is not None  # the column is never null
    prompts = np.maximum(block.prompt, 0)
    parts = np.column_stack((prompts, block.lengths - prompts)).ravel()
    place = np.arange(len(tokens)) - np.repeat(np.cumsum(parts) - parts, parts)
    random = seeded_keys(np.arange(int(parts.max(initial=0))), 0)
    mixed = random.take(place)
    mixed *= np.add(tokens, 1, dtype=np.int64).view(np.uint64)
    both = _reduce(np.add, mixed, parts, 0).reshape(-1, 2)
    return {"prompt_hash": both[:, 0], "response_hash": both[:, 1]}


class _Family(NamedTuple):
    """Measures that are made together, and the columns they need."""

    compute: Callable[[_Block], dict[str, Values]]
    columns: tuple[str, ...]
    names: frozenset[str]


_SAMPLED = ("loss_mask", "action_mask")
_BOTH = (*_SAMPLED, "log_probs", "behavior_log_probs")

_FAMILIES = (
    _Family(
        _masks,
        (*_SAMPLED, "attention_mask"),
        frozenset(
            {
                *("actions", "loss_tokens", "has_split", "loss_on_prompt"),
                *("loss_off_action", "loss_off_attention", "mask_shifted"),
            }
        ),
    ),
    _Family(
        _log_probs,
        _BOTH,
        frozenset(
            {
                *("log_probs_shifted", "has_behavior", "has_log_probs"),
                *("behavior_zero", "behavior_positive", "not_finite"),
            }
        ),
    ),
    _Family(
        _log_ratios,
        _BOTH,
        frozenset(
            {
                *("log_ratio_sum", "log_ratio_abs", "log_ratio_max", "k2_sum", "k3_sum"),
                *("clipped_low", "clipped_high"),
            }
        ),
    ),
    _Family(_weights, _BOTH, frozenset({"ratio_tokens", "log_weight", "log_weight_squared"})),
    _Family(_hashes, ("tokens",), frozenset({"prompt_hash", "response_hash"})),
)
