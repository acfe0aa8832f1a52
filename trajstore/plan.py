"""Owns order and batches: pure functions of lengths, groups and seeded keys; knows no rows, store or tensors.

Words: a *unit* is never split, a row or a whole group; a *step* is one batch on each of `world_size` ranks.
Axis letters: N rows, U units, K batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import InputError, ValidationError
from trajstore.orders import by_key, in_order, ranges

Int64s = NDArray[np.int64]
Keys = NDArray[np.uint64]
Tail = Literal["keep", "drop", "repeat"]
Layout = Literal["padded", "packed", "nested", "prompt_response"]


@dataclass(frozen=True)
class Recipe:
    """How rows become batches.

    Attributes:
        batch_size: rows of one rank's batch. With whole groups, the most rows.
        max_tokens: instead, the most token positions of one rank's batch in its layout, padding counted.
        layout: what max_tokens counts: rows times width when padded, the sum of lengths when packed.
        bucket_window: batches (of all ranks) in a window whose rows are sorted by length before they are
            cut, so that rows of a batch are of like length. None cuts rows as they come.
        whole_groups: rows of one group go into one batch.
        world_size: ranks; each gets one batch a step, of near-equal tokens.
        tail: what happens to the rows that do not fill the last step: "keep" makes it smaller, so that
            every row comes once; "drop" leaves them out; "repeat" fills it with rows from the front.
        pad_to_multiple_of: widths are rounded up to it when max_tokens counts padding.

    Raises:
        InputError: a choice is unknown, a number is below 1, or not exactly one of batch_size and
            max_tokens is given.
    """

    batch_size: int | None = None
    max_tokens: int | None = None
    layout: Layout = "padded"
    bucket_window: int | None = None
    whole_groups: bool = False
    world_size: int = 1
    tail: Tail = "keep"
    pad_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.max_tokens is None):
            raise InputError("a batch is bounded by batch_size or by max_tokens", hint="give one of the two")
        for name in ("batch_size", "max_tokens", "bucket_window", "world_size", "pad_to_multiple_of"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}, expected at least 1")
        for name, kind in (("layout", Layout), ("tail", Tail)):
            if getattr(self, name) not in get_args(kind):
                expected = ", ".join(get_args(kind))
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {expected}")


@dataclass(frozen=True)
class Plan:
    """The batches of an epoch, on every rank.

    Attributes:
        rows: positions of rows, batch after batch; the batches of a step follow one another.
        bounds: [K + 1] int64, where each batch begins in `rows`, and the end.
        world_size: batches of a step.
        dropped, repeated: rows left out, and rows that come once more, for the sake of a full last step.
    """

    rows: Int64s
    bounds: Int64s
    world_size: int
    dropped: int
    repeated: int

    @property
    def steps(self) -> int:
        """Batches of each rank."""
        return (len(self.bounds) - 1) // self.world_size

    def __len__(self) -> int:
        return self.steps

    def batch(self, step: int, rank: int = 0) -> Int64s:
        """Positions of the rows of one rank's batch.

        Raises:
            IndexError: there is no such step or rank.
        """
        if not (0 <= step < self.steps and 0 <= rank < self.world_size):
            raise IndexError(f"no step {step} of rank {rank}: {self.steps} steps of {self.world_size} ranks")
        k = step * self.world_size + rank
        return self.rows[self.bounds[k] : self.bounds[k + 1]]

    def __iter__(self) -> Iterator[Int64s]:
        """The batches of all ranks, step after step."""
        ends = self.bounds.tolist()
        return (self.rows[a:b] for a, b in itertools.pairwise(ends))

    def padding_ratio(self, lengths: Int64s) -> float:
        """Padding / padded size over all batches, each padded to its longest row; 0.0 when there is none."""
        if not len(self.rows):
            return 0.0
        sizes = np.diff(self.bounds)
        taken = lengths[self.rows]
        size = int((np.maximum.reduceat(taken, self.bounds[:-1]) * sizes).sum())
        return 1 - int(taken.sum()) / size if size else 0.0


def plan(
    lengths: Int64s,
    recipe: Recipe,
    *,
    keys: Keys | None = None,
    groups: Int64s | None = None,
    prompt_lengths: Int64s | None = None,
) -> Plan:
    """The batches of one epoch: the same on every rank, whatever the order of the rows.

    Args:
        lengths: [N] tokens of each row, cut to max_length if the batches will be.
        recipe: what a batch is.
        keys: [N] seeded keys; units go in their order. None keeps the order of the rows.
        groups: [N] codes of the groups, -1 for a row that is in none; used with whole_groups.
        prompt_lengths: [N], for max_tokens in the prompt_response layout.

    Raises:
        ValidationError: a row is longer than max_tokens.
        InputError: whole_groups without groups, or a group is more than a batch; there are fewer units
            than ranks and tail="keep".
    """
    if keys is not None and len(keys) != len(lengths):
        raise InputError(f"{len(keys)} keys for {len(lengths)} rows")
    units = _units(lengths, recipe, keys, groups, prompt_lengths)
    if not len(lengths):
        return Plan(units.rows, np.zeros(1, np.int64), recipe.world_size, 0, 0)
    if recipe.batch_size is not None and not recipe.whole_groups:
        return _by_count(units, recipe, recipe.batch_size)
    return _by_budget(units, recipe)


# Units


@dataclass(frozen=True)
class _Units:
    """What is dealt out, in order: unit u is `rows[first[u] : first[u] + size[u]]`, all [U]."""

    rows: Int64s
    first: Int64s
    size: Int64s
    tokens: Int64s
    prompt: Int64s  # widths, rounded up: of the prompts, 0 unless the layout pads them apart
    rest: Int64s  # and of the rest
    key: Keys | None


def _units(
    lengths: Int64s, recipe: Recipe, keys: Keys | None, groups: Int64s | None, prompt_lengths: Int64s | None
) -> _Units:
    rows = np.arange(len(lengths)) if keys is None else by_key(keys)
    first = np.arange(len(lengths))
    if recipe.whole_groups:
        if groups is None:
            raise InputError("whole_groups needs to know the groups", hint="pass groups=")
        rows, first = _together(rows, groups[rows])
    size = np.diff(first, append=len(rows))
    taken = lengths[rows]
    if recipe.layout == "prompt_response" and recipe.max_tokens is not None:
        if prompt_lengths is None:
            raise InputError("max_tokens of this layout needs prompt_lengths", hint="pass prompt_lengths=")
        prompt = np.clip(prompt_lengths[rows], 0, taken)
    else:
        prompt = np.zeros(len(rows), np.int64)
    multiple = recipe.pad_to_multiple_of

    def widest(values: Int64s) -> Int64s:
        whole = np.maximum.reduceat(values, first) if len(first) < len(values) else values
        return -(-whole // multiple) * multiple

    return _Units(
        rows,
        first,
        size,
        np.add.reduceat(taken, first) if len(first) < len(rows) else taken,
        widest(prompt),
        widest(taken - prompt),
        None if keys is None else keys[rows[first]],
    )


def _together(rows: Int64s, groups: Int64s) -> tuple[Int64s, Int64s]:
    """Rows moved so that members of a group follow its first one, and where each group then begins."""
    alone = groups < 0
    codes = np.where(alone, groups.max(initial=0) + 1 + np.arange(len(groups)), groups)
    _, seen, inverse = np.unique(codes, return_index=True, return_inverse=True)
    place = seen[inverse]
    order = np.argsort(place, kind="stable")
    return rows[order], np.flatnonzero(np.diff(place[order], prepend=-1))


# Batches of so many rows


def _by_count(units: _Units, recipe: Recipe, batch_size: int) -> Plan:
    count, world = len(units.rows), recipe.world_size
    full = batch_size * world
    order = np.arange(count)
    over = count % full
    tail: list[int] = []
    if over and recipe.tail == "drop":
        order = order[: count - over]
    elif over and recipe.tail == "repeat":
        order = np.concatenate([order, np.resize(order, full - over)])
    elif over:
        tail = _smaller_steps(count, full, world)
    main = len(order) - sum(tail)
    if recipe.bucket_window is not None:
        order[:main] = _bucketed(units, order[:main], full, recipe.bucket_window)
    dealt, sizes = _dealt(units.tokens, order[:main].reshape(-1, full), world)
    parts, counts, at = [dealt], [sizes], main
    for step in tail:
        dealt, sizes = _dealt(units.tokens, order[at : at + step].reshape(1, step), world)
        parts.append(dealt)
        counts.append(sizes)
        at += step
    bounds = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    planned = len(order)
    return Plan(
        units.rows[np.concatenate(parts)], bounds, world, max(count - planned, 0), max(planned - count, 0)
    )


def _smaller_steps(count: int, full: int, world: int) -> list[int]:
    """Rows of the last steps, so that no rank is left without one: of the last step, or of the last two."""
    over = count % full
    if over >= world:
        return [over]
    if count >= full and full + over >= 2 * world:
        more = full + over
        return [more - more // 2, more // 2]
    raise _too_few(over, world)


def _too_few(units: int, world: int) -> InputError:
    return InputError(
        f"{units} rows or groups are left for {world} ranks, which is not one for each",
        hint='take tail="drop" or tail="repeat"',
    )


def _bucketed(units: _Units, order: Int64s, full: int, windows: int) -> Int64s:
    """Steps of like length: sorted in windows, then in the order of their keys."""
    window = np.arange(len(order)) // (full * windows)
    order = order[in_order(units.tokens[order], window)]
    if units.key is None:
        return order
    steps = order.reshape(-1, full)
    first = units.key[steps].min(axis=1, initial=np.iinfo(np.uint64).max)
    return steps[np.lexsort((first, window[::full]))].ravel()


def _dealt(tokens: Int64s, steps: Int64s, world: int) -> tuple[Int64s, Int64s]:
    """Rows of steps [steps, rows], moved so that each rank's follow one another; and how many each gets.

    The longest rows first, `world` at a time, each to the rank with the fewest tokens so far.
    """
    count, full = steps.shape
    sizes = np.tile(np.full(world, full // world) + (np.arange(world) < full % world), count)
    if world == 1:
        return steps.ravel(), sizes
    along = np.argsort(-tokens[steps], axis=1, kind="stable")
    steps = np.take_along_axis(steps, along, axis=1)
    rank = np.empty((count, full), np.int64)
    total = np.zeros((count, world), np.int64)
    for start in range(0, full, world):
        part = slice(start, min(start + world, full))
        least = np.argsort(total, axis=1, kind="stable")[:, : part.stop - start]
        rank[:, part] = least
        np.put_along_axis(
            total, least, np.take_along_axis(total, least, axis=1) + tokens[steps[:, part]], axis=1
        )
    by_rank = np.argsort(rank, axis=1, kind="stable")
    held = (rank[:, :, None] == np.arange(world)).sum(axis=1) if full % world else sizes
    return np.take_along_axis(steps, by_rank, axis=1).ravel(), held.ravel()


# Batches within a budget


def _by_budget(units: _Units, recipe: Recipe) -> Plan:
    world, count = recipe.world_size, len(units.first)
    padded = recipe.max_tokens is not None and recipe.layout in ("padded", "prompt_response")
    budget = recipe.batch_size or recipe.max_tokens or 0
    weight = units.size if recipe.max_tokens is None else units.tokens
    if recipe.max_tokens is not None and not padded:
        budget = budget // recipe.pad_to_multiple_of * recipe.pad_to_multiple_of
    _refuse_too_big(units, units.size * (units.prompt + units.rest) if padded else weight, budget, recipe)

    order, window = np.arange(count), np.zeros(count, np.int64)
    if recipe.bucket_window is not None:
        held = max(1, int(budget / max(weight.mean(), 1))) * world * recipe.bucket_window
        window = order // held
        width = units.prompt + units.rest
        # Every second window runs downwards, so that a batch across two windows is of like length too.
        order = in_order(np.where(window % 2, width.max() - width, width), window)
    bounds = _cut_padded(units, order, budget) if padded else _cut(weight[order], budget)

    batches = np.arange(len(bounds) - 1)
    tokens = np.add.reduceat(units.tokens[order], bounds[:-1])
    key = batches if units.key is None else np.minimum.reduceat(units.key[order], bounds[:-1])
    of = window[bounds[:-1]]
    batches = np.lexsort((key, of))
    start, held_units = bounds[:-1], np.diff(bounds)
    over = len(batches) % world
    dropped = repeated = 0
    more = np.empty((0, 2), np.int64)
    if over and recipe.tail == "drop":
        left, batches = batches[-over:], batches[:-over]
        dropped = int(sum(units.size[order[start[k] : start[k] + held_units[k]]].sum() for k in left))
    elif over and recipe.tail == "repeat":
        again = np.resize(batches, world - over)
        repeated = int(sum(units.size[order[start[k] : start[k] + held_units[k]]].sum() for k in again))
        more = np.stack([start, held_units], axis=1)[np.concatenate([batches[-over:], again])]
        batches = batches[:-over]
    elif over:
        batches, more = _smaller_batches(batches, start, held_units, tokens, world)
    if world > 1:
        batches = batches[np.lexsort((tokens[batches], of[batches]))]
        steps = batches.reshape(-1, world)
        batches = steps[np.lexsort((key[steps].min(axis=1, initial=key.max()), of[steps[:, 0]]))].ravel()
    start = np.concatenate([start[batches], more[:, 0]])
    held_units = np.concatenate([held_units[batches], more[:, 1]])
    chosen = order[ranges(start, held_units)]
    rows = units.rows[ranges(units.first[chosen], units.size[chosen])]
    ends = np.concatenate([[0], np.cumsum(held_units)])
    sizes = np.concatenate([[0], np.cumsum(units.size[chosen])])
    return Plan(rows, sizes[ends].astype(np.int64), world, dropped, repeated)


def _refuse_too_big(units: _Units, cost: Int64s, budget: int, recipe: Recipe) -> None:
    if not (cost > budget).any():
        return
    u = int((cost > budget).argmax())
    row, name = int(units.rows[units.first[u]]), "batch_size" if recipe.max_tokens is None else "max_tokens"
    asked = recipe.batch_size or recipe.max_tokens
    if units.size[u] > 1:
        raise InputError(
            f"the group of row {row} takes {cost[u]} of the {asked} of {name}",
            hint=f"raise {name}, or do without whole_groups",
        )
    raise ValidationError(
        f"it takes {cost[u]} tokens of the {asked} of max_tokens",
        row=row,
        column="length",
        hint="raise max_tokens, set max_length to cut such rows, or leave them out with where=",
    )


def _cut(weight: Int64s, budget: int) -> Int64s:
    """Bounds of runs whose weights sum to at most the budget, each as long as can be."""
    ends = np.concatenate([[0], np.cumsum(weight)])
    reach = (np.searchsorted(ends, ends[:-1] + budget, side="right") - 1).tolist()
    bounds, at = [0], 0
    while at < len(reach):
        at = reach[at]
        bounds.append(at)
    return np.array(bounds, np.int64)


def _cut_padded(units: _Units, order: Int64s, budget: int) -> Int64s:
    """Bounds of runs whose padded size is at most the budget, each as long as can be."""
    bounds, held, prompt, rest, most = [0], 0, 0, 0, budget
    each = zip(*(values[order].tolist() for values in (units.size, units.prompt, units.rest)), strict=True)
    for u, (size, p, r) in enumerate(each):
        held += size
        if p > prompt or r > rest:
            prompt, rest = max(p, prompt), max(r, rest)
            most = budget // (prompt + rest)
        if held > most:
            bounds.append(u)
            held, prompt, rest = size, p, r
            most = budget // (p + r or 1)
    return np.array([*bounds, len(order)], np.int64)


def _smaller_batches(
    batches: Int64s, start: Int64s, held: Int64s, tokens: Int64s, world: int
) -> tuple[Int64s, Int64s]:
    """All but the last batches; and those cut smaller, [more, 2] starts and units, to make whole steps."""
    take, wanted = len(batches) % world, world
    while held[batches[len(batches) - take :]].sum() < wanted and take + world <= len(batches):
        take, wanted = take + world, wanted + world
    last = batches[len(batches) - take :]
    if held[last].sum() < wanted:
        raise _too_few(int(held[last].sum()), wanted)
    pieces = np.ones(take, np.int64)
    for _ in range(wanted - take):
        share = np.where(pieces < held[last], tokens[last] / pieces, -1)
        pieces[int(share.argmax())] += 1
    more = [
        (int(start[k]) + int(part[0]), len(part))
        for k, n in zip(last, pieces, strict=True)
        for part in np.array_split(np.arange(held[k]), n)
    ]
    return batches[: len(batches) - take], np.array(more, np.int64)
