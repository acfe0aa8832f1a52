"""Owns orders of a million rows, what np.argsort and np.lexsort give in half the time; knows no plans."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


def by_key(keys: NDArray[np.uint64]) -> Int64s:
    """Positions in the order of their keys, equal ones as they come."""
    order = np.argsort(keys)  # much faster than a stable sort, and the same where no two keys are equal
    held = keys[order]
    return np.argsort(keys, kind="stable") if (held[1:] == held[:-1]).any() else order


def in_order(within: Int64s, first: Int64s) -> Int64s:
    """Positions in the order of `first`, then of `within`, equal ones as they come; none is negative."""
    order = np.argsort(_short(within), kind="stable")
    return order[np.argsort(_short(first)[order], kind="stable")]


def _short(values: Int64s) -> NDArray[Any]:
    """In 16 bits if they fit: numpy sorts these by their digits, in linear time."""
    return values.astype(np.uint16) if values.max(initial=0) < 2**16 else values


def ranges(start: Int64s, count: Int64s) -> Int64s:
    """start[i], start[i] + 1, … count[i] of them, for every i."""
    before = np.cumsum(count) - count
    return np.repeat(start - before, count) + np.arange(count.sum())
