"""Owns random draws from strata of known sizes, without looking at their members; knows no rows.

Axis letter: S strata. A draw is without replacement and gives, for each stratum, which of its members
0 .. size - 1 are drawn, ascending; within a stratum every set of so many members is equally likely.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trajstore.selection import quotas

Int64s = NDArray[np.int64]


def uniform(rng: np.random.Generator, sizes: Int64s, n: int) -> list[Int64s]:
    """min(n, all) members, as if the strata [S] were one."""
    total = int(sizes.sum())
    drawn = _distinct(rng, np.array([total]), np.array([min(n, total)]))
    return _split(drawn, sizes, np.diff(np.searchsorted(drawn, _edges(sizes))))


def stratified(rng: np.random.Generator, sizes: Int64s, n: int) -> list[Int64s]:
    """min(n, all) members: the same share of each stratum [S], shortfalls refilled evenly.

    What does not divide goes one each to strata chosen at random.
    """
    keys = rng.integers(0, 2**64, len(sizes), np.uint64)
    counts = quotas(sizes, n, keys, "equal")
    return _split(_distinct(rng, sizes, counts), sizes, counts)


def weighted(rng: np.random.Generator, sizes: Int64s, weights: NDArray[np.float64], n: int) -> list[Int64s]:
    """min(n, all) members: the next one always in proportion to its weight among those that are left.

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
    counts = np.bincount(stratum[first], minlength=len(sizes))
    return _split(_distinct(rng, sizes, counts), sizes, counts)


def _edges(sizes: Int64s) -> Int64s:
    return np.concatenate([[0], np.cumsum(sizes)])


def _split(drawn: Int64s, sizes: Int64s, counts: Int64s) -> list[Int64s]:
    """Positions in the strata laid end to end, as positions in each stratum."""
    edges = _edges(counts).tolist()
    starts = _edges(sizes).tolist()
    return [drawn[a:b] - start for start, a, b in zip(starts[:-1], edges[:-1], edges[1:], strict=True)]


def _distinct(rng: np.random.Generator, sizes: Int64s, counts: Int64s) -> Int64s:
    """Sorted positions in the strata laid end to end: `counts[s]` distinct ones of each.

    Draws are repeated until enough of them differ: the first n different values of a uniform sequence are
    a uniform set of n. Where more than half of the members are wanted, a shuffle costs less.
    """
    edges = _edges(sizes)
    dense = 2 * counts > sizes
    parts = [edges[s] + rng.permutation(sizes[s])[: counts[s]] for s in np.flatnonzero(dense).tolist()]
    missing = np.where(dense, 0, counts)
    sparse = np.empty(0, np.int64)
    while missing.any():
        stratum = np.repeat(np.arange(len(sizes)), missing)
        more = edges[stratum] + rng.integers(0, sizes[stratum])
        sparse = np.unique(np.concatenate([sparse, more]))
        missing = np.where(dense, 0, counts - np.diff(np.searchsorted(sparse, edges)))
    return np.sort(np.concatenate([sparse, *parts]))
