"""Owns random draws from strata of known sizes, without looking at their members; knows no rows.

Axis letter: S strata, whose members are numbered from 0 in the strata laid end to end. A draw is without
replacement and gives the numbers of min(n, all) members, ascending; within a stratum every set of so
many members is equally likely.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trajstore.selection import quotas

Int64s = NDArray[np.int64]


def uniform(rng: np.random.Generator, sizes: Int64s, n: int) -> Int64s:
    """Every member is equally likely, whatever its stratum [S]."""
    total = int(sizes.sum())
    return np.sort(rng.choice(total, min(n, total), replace=False, shuffle=False))


def stratified(rng: np.random.Generator, sizes: Int64s, n: int) -> Int64s:
    """The same share of each stratum [S], shortfalls refilled evenly.

    What does not divide goes one each to strata chosen at random. It is the rule of `selection.quotas`,
    which is asked when a stratum falls short.
    """
    level, rest = divmod(n, len(sizes))
    if sizes.min() <= level:
        keys = rng.integers(0, 2**64, len(sizes), np.uint64)
        return _members(rng, sizes, quotas(sizes, n, keys, "equal"))
    counts = np.full(len(sizes), level)
    counts[rng.permutation(len(sizes))[:rest]] += 1
    return _members(rng, sizes, counts)


def weighted(rng: np.random.Generator, sizes: Int64s, weights: NDArray[np.float64], n: int) -> Int64s:
    """The next member is always drawn in proportion to its weight among those that are left.

    Members race with their weight as rate (Efraimidis, Spirakis, "Weighted random sampling with a
    reservoir", 2006). The times of m members of one weight are m sorted exponentials, made one after
    another: the k-th gap has rate (m - k + 1) * weight (Rényi, 1953). So n of a stratum are enough.

    Args:
        rng: source of randomness.
        sizes: [S] members of each stratum.
        weights: [S] weight of each member of a stratum; none is drawn at 0.
        n: members to draw.
    """
    racing = np.where(weights > 0, sizes, 0)
    n = min(n, int(racing.sum()))
    entered = np.minimum(racing, n)
    stratum = np.repeat(np.arange(len(sizes)), entered)
    ahead = np.arange(len(stratum)) - np.repeat(np.cumsum(entered) - entered, entered)
    gaps = rng.standard_exponential(len(stratum)) / ((sizes[stratum] - ahead) * weights[stratum])
    times = np.concatenate([np.cumsum(part) for part in np.split(gaps, np.cumsum(entered))])
    first = np.argsort(times)[:n]
    return _members(rng, sizes, np.bincount(stratum[first], minlength=len(sizes)))


def _members(rng: np.random.Generator, sizes: Int64s, counts: Int64s) -> Int64s:
    """`counts[s]` members of each stratum; where more than half of them are wanted, a shuffle costs less."""
    edges = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=edges[1:])
    dense = 2 * counts > sizes
    if not dense.any():
        return _few(rng, sizes, edges, counts)
    drawn = _few(rng, sizes, edges, np.where(dense, 0, counts))
    whole = [edges[s] + rng.permutation(sizes[s])[: counts[s]] for s in np.flatnonzero(dense).tolist()]
    return np.sort(np.concatenate([drawn, *whole]))


def _few(rng: np.random.Generator, sizes: Int64s, edges: Int64s, counts: Int64s) -> Int64s:
    """At most half of each stratum, drawn again until all differ.

    The first n different values of a uniform sequence are a uniform set of n.
    """
    starts = edges[:-1]

    def some(counts: Int64s) -> Int64s:
        # A third of the cost of rng.integers with bounds of their own; its bias is below sizes / 2**53.
        inside = rng.random(int(counts.sum())) * sizes.repeat(counts)
        return starts.repeat(counts) + inside.astype(np.int64)

    drawn = some(counts)
    drawn.sort()
    while (again := drawn[1:] == drawn[:-1]).any():
        drawn = np.concatenate([drawn[:1], drawn[1:][~again]])
        drawn = np.concatenate([drawn, some(counts - np.diff(drawn.searchsorted(edges)))])
        drawn.sort()
    return drawn
