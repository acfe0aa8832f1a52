"""Owns the seeded draw on arrays: keys, weights, quotas, groups; knows no columns and no steps.

Axis letters: N rows, S strata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import polars as pl

Int64s = NDArray[np.int64]
Keys = NDArray[np.uint64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Shares = Literal["equal", "proportional"] | Floats


def seeded_keys(id_hash: Int64s, seed: int) -> Keys:
    """One uniform 64-bit key a row, [N] uint64: splitmix64 of the id's hash, offset by that of the seed.

    Source of the mixing constants: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014 (the variant of java.util.SplittableRandom).
    """
    salt = _splitmix64(np.array([seed % 2**64], np.uint64))
    return _splitmix64(id_hash.astype(np.int64).view(np.uint64) ^ salt)


def _splitmix64(x: Keys) -> Keys:
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def race(keys: Keys, weights: Floats) -> Floats:
    """Finishing times of a weighted draw without replacement, [N] float64: the first n rows are the sample.

    Each row's time is exponential with its weight as rate, so that at every step the next row is drawn in
    proportion to its weight among those that are left. Equal weights give the order of the keys; a weight
    of 0 never finishes (infinity).

    Source: Efraimidis, Spirakis, "Weighted random sampling with a reservoir", IPL 97 (2006), in the form
    -ln(u) / w.

    Args:
        keys: [N] seeded keys.
        weights: [N] finite weights, 0 or more.
    """
    uniform = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53
    with np.errstate(divide="ignore", invalid="ignore"):
        times = -np.log1p(-uniform) / weights
    return np.where(weights > 0, times, np.inf)


def ranked(keys: Keys, ids: pl.Series, times: Floats | None = None) -> Int64s:
    """Positions by time of a race, then by key, then by id; rows of one id stay in order of arrival.

    Args:
        keys: [N] seeded keys.
        ids: [N] names, looked at only where keys are equal.
        times: [N] finishing times; None goes by the keys alone.
    """
    order = np.argsort(keys, kind="stable") if times is None else np.lexsort((keys, times))
    if len(order) and (keys[order][1:] == keys[order][:-1]).any():
        first = np.zeros(len(keys)) if times is None else times
        names = ids.to_list()
        return np.array(sorted(range(len(names)), key=lambda i: (first[i], keys[i], names[i])))
    return order


def stratum_codes(strata: pl.Series) -> Int64s:
    """A small integer for each distinct value, [N] int64; null and NaN are values like any other.

    Codes follow the order of the values, so they do not depend on the order of the rows; null is the
    lowest, NaN the highest.
    """
    import polars as pl

    # Not a join: that of one sorted column with another leaves NaN without a partner.
    ranks = strata.rank("dense").cast(pl.Int64).fill_null(0).to_numpy()
    return ranks if strata.null_count() else ranks - 1


def draw(
    strata: Int64s,
    keys: Keys,
    ids: pl.Series,
    n: int,
    allocation: Shares,
    *,
    times: Floats | None = None,
    among: Int64s | None = None,
) -> Int64s:
    """Positions of min(n, available) rows, ascending: in each stratum those that come first, see `ranked`.

    Args:
        strata: [N] stratum codes, 0-based and dense.
        keys: [N] seeded keys; they break ties between strata.
        ids: [N] names, looked at only where keys are equal.
        n: rows to draw.
        allocation: "equal" gives every stratum the same share and refills shortfalls evenly,
            "proportional" gives shares by size, an array [S] shares by these weights (0 gives none), whose
            shortfalls are refilled in the same proportion; all by largest remainder.
        times: [N] finishing times of a race; None goes by the keys.
        among: positions of the rows that can be drawn; None: all.
    """
    count = int(strata.max(initial=-1)) + 1
    if among is not None:
        strata, keys, ids = strata[among], keys[among], ids.gather(among)
        times = None if times is None else times[among]
    if not len(strata):
        return np.empty(0, np.int64)
    sizes = np.bincount(strata, minlength=count)
    first = np.full(count, np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(first, strata, keys)
    quota = quotas(sizes, n, first, allocation)
    order = _ranked_where_drawn(strata, keys, ids, times, quota, sizes)
    by_stratum = order[np.argsort(strata[order], kind="stable")]
    ranks = np.bincount(strata[order], minlength=count)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(ranks) - ranks, ranks)
    rows = np.sort(by_stratum[rank < np.repeat(quota, ranks)])
    return rows if among is None else among[rows]


def _ranked_where_drawn(
    strata: Int64s, keys: Keys, ids: pl.Series, times: Floats | None, quota: Int64s, sizes: Int64s
) -> Int64s:
    """The order of at least those rows that a quota can reach, [at most N].

    Keys are uniform, so the first `quota` of a stratum lie, but for one draw in millions, below a bound
    that lets twice as many through: sorting those takes a tenth of sorting all of a large store.
    """
    if times is not None:
        return ranked(keys, ids, times)
    share = (2 * quota + 32) / np.maximum(sizes, 1)
    bound = np.where(share < 1, np.minimum(share, 0.5) * 2.0**64, 0).astype(np.uint64)
    bound[share >= 1] = np.iinfo(np.uint64).max
    near = np.flatnonzero(keys <= bound[strata])
    short = np.bincount(strata[near], minlength=len(sizes)) < quota
    if short.any():
        near = np.flatnonzero((keys <= bound[strata]) | short[strata])
    return near[ranked(keys[near], ids.gather(near))]


def quotas(sizes: Int64s, n: int, keys: Keys, allocation: Shares) -> Int64s:
    """How many rows each stratum gives, [S] int64; they add up to n, or to what is available.

    Args:
        sizes: [S] rows of each stratum.
        n: rows wanted in all.
        keys: [S] any key of each stratum that depends on the seed; it breaks ties.
        allocation: as in `draw`.
    """
    # Mixed once more: the least key of many rows is small, and large strata would win every tie.
    tie = _splitmix64(keys)
    n = min(n, int(sizes.sum()))
    if isinstance(allocation, str):
        return _proportional(sizes, n, tie) if allocation == "proportional" else _equal(sizes, n, tie)
    return _weighted(sizes, n, tie, np.asarray(allocation, np.float64))


def _equal(sizes: Int64s, n: int, tie: Keys) -> Int64s:
    """Water level: every stratum gets min(size, level), what is left goes one each by seeded order."""
    ascending = np.sort(sizes)
    filled = np.cumsum(ascending) - ascending + ascending * np.arange(len(sizes), 0, -1)
    below = int((filled <= n).sum())  # strata that are taken whole
    rest = n - int(ascending[:below].sum())
    level = rest // (len(sizes) - below) if below < len(sizes) else 0
    quota = np.minimum(sizes, max(level, int(ascending[below - 1]) if below else 0))
    return _one_each(quota, n - int(quota.sum()), np.where(quota < sizes, 0, 1), sizes, tie)


def _proportional(sizes: Int64s, n: int, tie: Keys) -> Int64s:
    total = int(sizes.sum())
    if not total:
        return sizes
    quota = sizes * n // total
    return _one_each(quota, n - int(quota.sum()), -(sizes * n % total), sizes, tie)


def _weighted(sizes: Int64s, n: int, tie: Keys, weights: Floats) -> Int64s:
    """Shares by weight; a stratum that is too small is taken whole and the rest is shared again."""
    share = np.zeros(len(sizes))
    open_ = weights > 0
    left = float(min(n, int(sizes[open_].sum())))
    n = int(left)
    while open_.any() and left > 0:
        wanted = np.where(open_, left * weights / weights[open_].sum(), 0.0)
        short = open_ & (wanted >= sizes)
        if not short.any():
            share[open_] = wanted[open_]
            break
        share[short] = sizes[short]
        left -= float(sizes[short].sum())
        open_ &= ~short
    quota = np.minimum(np.floor(share + 1e-9).astype(np.int64), sizes)
    room = (quota < sizes) & (weights > 0)
    rank = np.where(room, -np.round(share - quota, 9), np.inf)
    return _one_each(quota, n - int(quota.sum()), rank, sizes, tie)


def _one_each(quota: Int64s, left: int, rank: NDArray[Any], sizes: Int64s, tie: Keys) -> Int64s:
    chosen = np.lexsort((tie, rank))[:left]
    quota = quota.copy()
    quota[chosen] += 1
    return np.minimum(quota, sizes)


def whole_groups(groups: Int64s, sizes: Int64s, members: Int64s, counted: Bools) -> Bools:
    """Which groups can be drawn whole, [G] bool: nobody is missing and the group reached its size.

    Args:
        groups: [N] group codes, 0-based and dense (see `stratum_codes`).
        sizes: [N] how many the group was meant to have, 0 where not known.
        members: [N] counted members that the row's group has in the whole snapshot.
        counted: [N] rows that are members: completed, and not superseded by a continuation.
    """
    count = int(groups.max(initial=-1)) + 1
    here = np.bincount(groups[counted], minlength=count)
    meant = np.zeros(count, np.int64)
    np.maximum.at(meant, groups, sizes)
    there = np.zeros(count, np.int64)
    np.maximum.at(there, groups, members)
    whole: Bools = (here > 0) & (here >= meant) & (here == there)
    return whole
