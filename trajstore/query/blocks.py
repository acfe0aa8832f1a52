"""Owns per-token columns as flat blocks of whole rows, and one value for each run of them; knows no measure.

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

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Values = NDArray[Any]

BLOCK = 1 << 16
"""Tokens of a block: large enough to hide the cost of a call, small enough for a cache."""

SAFE = 40.0
"""Log-ratios within ± SAFE have ratios, and squares of them, that float32 holds."""


class Column(NamedTuple):
    """A per-token column: values [T], 0 in rows that are null, and whether each row has them, [N].

    `values` is None where no row has any, which is most columns of most stores.
    """

    values: Values | None
    given: Bools


def _flat(column: pa.ChunkedArray, lengths: Int64s) -> Column:
    if column.null_count == len(column):
        return Column(None, np.zeros(len(column), np.bool_))
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    values = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if not column.null_count:
        return Column(values, np.ones(len(column), np.bool_))
    given = column.is_valid().to_numpy().astype(np.bool_)
    whole = np.zeros(int(lengths.sum()), values.dtype)
    whole[np.repeat(given, lengths)] = values
    return Column(whole, given)


def blocks_of(table: pa.Table, names: Collection[str]) -> Iterator[Block]:
    """Runs of rows of about BLOCK tokens; a row is never cut."""
    lengths = table["length"].to_numpy().astype(np.int64)
    prompt = table["prompt_length"].fill_null(-1).to_numpy().astype(np.int64)
    columns = {name: _flat(table[name], lengths) for name in names}
    ends = np.cumsum(lengths)
    first = at = 0
    while first < len(lengths):
        last = max(first + 1, int(np.searchsorted(ends, at + BLOCK, side="right")))
        rows, tokens = slice(first, last), slice(at, int(ends[last - 1]))
        cut = {
            name: Column(None if c.values is None else c.values[tokens], c.given[rows])
            for name, c in columns.items()
        }
        yield Block(lengths[rows], prompt[rows], cut)
        first, at = last, int(ends[last - 1])


@dataclass(frozen=True)
class Block:
    """Some rows as flat arrays.

    Attributes:
        lengths: [N].
        prompt: [N], -1 where the split is not known.
    """

    lengths: Int64s
    prompt: Int64s
    columns: Mapping[str, Column]

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
    def both(self) -> Bools | None:
        """Action tokens that have both log-probs, finite, [T]; None where no row has both."""
        current, has_current = self.columns["log_probs"]
        behavior, has_behavior = self.columns["behavior_log_probs"]
        if current is None or behavior is None:
            return None
        both = self.action
        rows = has_current & has_behavior
        if not rows.all():
            both = both & np.repeat(rows, self.lengths)
        return both if self.not_finite is None else both & ~self.not_finite

    @cached_property
    def paired(self) -> tuple[NDArray[np.float32], NDArray[np.float32], Int64s]:
        """log_probs and behavior_log_probs of tokens that have both, [K] each; their number a row, [N]."""
        current, behavior = self.columns["log_probs"].values, self.columns["behavior_log_probs"].values
        if self.both is None or current is None or behavior is None:
            nothing = np.zeros(0, np.float32)
            return nothing, nothing, np.zeros(len(self.lengths), np.int64)
        if self.both.all():
            return current, behavior, self.lengths
        kept = np.flatnonzero(self.both)
        return current.take(kept), behavior.take(kept), self.count(self.both)

    @cached_property
    def ratios(self) -> NDArray[np.float32] | None:
        """exp(log_probs - behavior_log_probs), [T], 0 where not `both`; None if float32 cannot hold one."""
        current, behavior = self.columns["log_probs"].values, self.columns["behavior_log_probs"].values
        if self.both is None or self.not_finite is not None or current is None or behavior is None:
            return None
        with np.errstate(over="ignore"):
            r = current - behavior  # in float32 it is the exact difference, rounded once
        if max(-r.min(initial=0), r.max(initial=0)) >= SAFE:
            return None
        ratio: NDArray[np.float32] = np.exp(r, out=r)
        ratio *= self.both
        return ratio

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
        return np.zeros(len(self.lengths), np.int64) if marks is None else count_runs(marks, self.lengths)

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


def count_runs(marks: Bools, counts: Int64s) -> Int64s:
    """Marks in each stretch of `counts` of them, [N]."""
    return reduce_runs(np.add, marks, counts, 0) if marks.any() else np.zeros(len(counts), np.int64)


def reduce_runs(how: np.ufunc, values: Values, counts: Int64s, empty: float) -> Values:
    """One value for each stretch of `counts` values, [N]; `empty` for a stretch of none."""
    dtype = np.dtype(np.int64) if values.dtype == np.bool_ else values.dtype
    dtype = np.dtype(np.float64) if dtype == np.float32 else dtype
    starts = np.cumsum(counts) - counts
    some = counts > 0  # reduceat gives an empty stretch the value that follows it
    if some.all() and len(counts):
        return how.reduceat(values, starts, dtype=dtype)
    out = np.full(len(counts), empty, dtype)
    if some.any():
        out[some] = how.reduceat(values, starts[some], dtype=dtype)
    return out
