"""Owns which tokens of a row are kept and where its actions and states are; pure arrays, knows no rewards.

Axis letters: B rows of a block, N their tokens in one flat array, A the kept actions of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.offline.flat import Bools, Int64s, lists, ranges

Side = Literal["left", "right"]
Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class Windows:
    """The part `[start, end)` of each row that is kept, in flat positions, and what stands before it.

    Attributes:
        start, end: [B] int64.
        prefixed: [B] a token (bos, or the decoder's start) is put in front.
        cut_off: [B] actions are missing at the end, so the last state is not the end of the episode.
    """

    start: Int64s
    end: Int64s
    prefixed: Bools
    cut_off: Bools

    @property
    def lengths(self) -> Int64s:
        """[B] tokens of each row, the one in front included."""
        return self.end - self.start + self.prefixed

    def is_whole(self, offsets: Int64s) -> bool:
        """Whether every row is kept as it is, with nothing in front."""
        same = (self.start == offsets[:-1]).all() and (self.end == offsets[1:]).all()
        return bool(same and not self.prefixed.any())


def cut(actions: Bools, offsets: Int64s, max_length: int | None, side: Side, *, prefix: bool) -> Windows:
    """At most `max_length` tokens of each row, as trlX cuts them.

    Args:
        actions: [N] which tokens are actions.
        offsets: [B + 1] where the rows are.
        max_length: budget of a row; None = no limit.
        side: the side that is cut off.
        prefix: a row whose first kept token is an action gets one token in front. When that would pass the
            budget one more token goes: the first for "left", the last for "right".
    """
    start, end = offsets[:-1], offsets[1:]
    if max_length is not None:
        if side == "right":
            end = np.minimum(end, start + max_length)
        else:
            start = np.maximum(start, end - max_length)
    prefixed = np.zeros(len(start), np.bool_)
    if prefix:
        filled = end > start
        prefixed[filled] = actions[start[filled]]
        over = prefixed & (end - start == (max_length or -1))
        if side == "right":
            end = end - over
        else:
            start = start + over
    return Windows(start, end, prefixed, np.zeros(len(start), np.bool_))


def end_in_decisions(windows: Windows, at: Int64s, offsets: Int64s, terminal: Bools) -> Windows:
    """Windows whose last position is where V can be read: the episode's end, or where the policy decides.

    A row that is cut on the right bootstraps from the state before its first missing action. When that
    state is not in the window (the next prompt is cut), the last action goes too: without its next state it
    is no transition, and its own state is the last one of the row.

    Args:
        windows: what `cut` kept.
        at: flat positions of all actions, ascending.
        offsets: [B + 1] where the rows are.
        terminal: [B] the stored row ends with the end of its episode.
    """
    hi = np.searchsorted(at, windows.end)
    missing = np.searchsorted(at, offsets[1:]) > hi
    shortened = windows.end < offsets[1:]
    next_action = np.full(len(hi), -1, np.int64)
    next_action[missing] = at[hi[missing]]
    lost = shortened & np.where(missing, next_action > windows.end, ~terminal)
    some = hi > np.searchsorted(at, windows.start)
    lost &= some
    end = windows.end.copy()
    end[lost] = at[hi[lost] - 1]
    return replace(windows, end=end, cut_off=missing | lost)


@dataclass(frozen=True)
class Index:
    """Where the actions and states of each row are.

    Attributes:
        counts: [B] actions of each row.
        chosen: which of all actions of the block are kept; None = all of them.
        actions: [A] int32 positions that predict the actions, counted in the kept row.
        states: [A + B] int32, the same and the last position of each row.
    """

    counts: Int64s
    chosen: Int64s | None
    actions: Int32s
    states: Int32s


def index(at: Int64s, windows: Windows) -> Index:
    """Positions of actions and states from the flat positions of the action tokens.

    Args:
        at: flat positions of all actions of the block, ascending.
        windows: the kept part of each row.
    """
    lo = np.searchsorted(at, windows.start)
    counts = np.searchsorted(at, windows.end) - lo
    counts = np.maximum(counts, 0)
    chosen = None
    if int(counts.sum()) < len(at):
        chosen = ranges(lo, counts)
        at = at[chosen]
    # The token at `at` was predicted one position earlier, and a token in front moves all by one.
    shift = (windows.start - windows.prefixed + 1).astype(np.int32)
    actions = at.astype(np.int32)
    actions -= np.repeat(shift, counts)
    states = np.empty(len(actions) + len(counts), np.int32)
    last = last_of(counts + 1)
    is_action = np.ones(len(states), np.bool_)
    is_action[last] = False
    states[is_action] = actions
    states[last] = windows.lengths - 1
    return Index(counts, chosen, actions, states)


def last_of(counts: Int64s) -> Int64s:
    """Flat position of the last element of each row, [B]; rows must not be empty."""
    return np.cumsum(counts) - 1


def column(values: NDArray[Any], offsets: Int64s, windows: Windows, front: int) -> pa.ListArray:
    """The kept values of each row as a list column; over the same memory when all is kept."""
    whole = windows.is_whole(offsets)
    return lists(values if whole else take(values, windows, front), windows.lengths)


def take(values: NDArray[Any], windows: Windows, front: int) -> NDArray[Any]:
    """The kept values of each row in one flat array, `front` before those that are prefixed."""
    lengths = windows.lengths
    out = values[np.clip(ranges(windows.start - windows.prefixed, lengths), 0, max(len(values) - 1, 0))]
    out[(np.cumsum(lengths) - lengths)[windows.prefixed]] = front
    return out
