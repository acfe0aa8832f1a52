"""Owns samplers: a scan goes in, a scan with a seeded draw comes out; reads no rows itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import index
from typing import Any

import pyarrow.compute as pc

from trajstore.errors import QueryError
from trajstore.selection import Allocation, Draw, GapOf, InformativeGroups, Unused
from trajstore.selection.versions import VERSION_OF
from trajstore.store import Scan, side
from trajstore.trajectory import PolicyVersion, version_number


def stratified_sample(
    scan: Scan,
    n: int,
    *,
    by: Any = "version_gap",
    at: PolicyVersion | int | None = None,
    allocation: Allocation = "equal",
    weights: Any = None,
    gap_of: GapOf = "oldest",
    whole_groups: bool = False,
    seed: int = 0,
) -> Scan:
    """The scan narrowed to min(n, available) rows, drawn without replacement from each stratum.

    The result is a recipe: it is drawn when a terminal verb asks, always the same rows for one seed,
    whatever the files and their order.

    Args:
        scan: rows to draw from.
        n: rows to draw, or groups with `whole_groups`.
        by: what a stratum is: a scalar column, `metadata.key`, a polars expression of scalar columns,
            "version_gap" (at - version), or None for one stratum. Null and NaN are strata of their own.
        at: the current policy version, needed for "version_gap" and "freshness".
        allocation: "equal" gives each stratum the same share and refills shortfalls evenly,
            "proportional" gives shares by size, a mapping {value: weight} shares by weight: values that it
            does not name are not drawn from. All by largest remainder.
        weights: within a stratum, rows are drawn in proportion to: "freshness" (1 / (gap + 1), unknown
            versions never), a scalar column, or a polars expression; 0 is never drawn. None: all alike.
            (Efraimidis, Spirakis: each next row in proportion to its weight among those that are left.)
        gap_of: which version "version_gap" and "freshness" look at.
        whole_groups: draw groups of siblings, never split: all completed rows of a group that are not
            superseded. A group can be drawn when they reach its `group_size` and no step before has
            dropped one of them. Its stratum and its weight are those of its worst member: the greatest
            value, the least weight. Rows without a group are not drawn.
        seed: chooses the draw.

    Raises:
        QueryError: n is negative, or n or the seed is no whole number; `by` or `weights` is no scalar; a
            version gap without `at`; the allocation is neither a word nor weights of 0 or more.
    """
    n, seed = _whole(n, "n"), _whole(seed, "seed")
    if n < 0:
        raise QueryError(f"n is {n}, expected 0 or more")
    if isinstance(allocation, Mapping):
        for value, weight in allocation.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise QueryError(f"allocation of {value!r} is {weight!r}, expected a number, 0 or more")
    elif allocation not in ("equal", "proportional"):
        raise QueryError(
            f"allocation is {allocation!r}, expected 'equal' or 'proportional'",
            hint="or a mapping of weights by stratum: {0: 2, 1: 1}",
        )
    if gap_of not in VERSION_OF:
        raise QueryError(f"gap_of is {gap_of!r}, expected one of {', '.join(VERSION_OF)}")
    version = None if at is None else version_number(at)
    return scan.filter(Draw(n, by, allocation, version, seed, weights, gap_of, whole_groups))


def _whole(value: Any, name: str) -> int:
    try:
        return index(value)
    except TypeError:
        raise QueryError(f"{name} is {value!r}, expected a whole number") from None


def max_times_sampled(scan: Scan, k: int, *, ledger_rows: int | None = None) -> Scan:
    """The scan narrowed to rows that were trained on fewer than k times, by the training ledger.

    What counts is what the ledger says of this scan's snapshot and those before it, at the moment of the
    call: the gate is fixed then, whatever is recorded later.

    Args:
        scan: rows to choose from.
        k: how often a row may be used.
        ledger_rows: count the first so many entries only, in the order in which they were recorded; the
            gate's label names the number, so that a resumed run can draw exactly what it drew before.

    Raises:
        QueryError: k is below 1.
    """
    k = _whole(k, "k")
    if k < 1:
        raise QueryError(f"k is {k}, expected 1 or more", hint='filter("false") keeps no row')
    ledger = side.recorded(scan.place)
    if ledger_rows is not None:
        ledger = ledger.slice(0, ledger_rows)
    used = (
        ledger.filter(pc.less_equal(ledger["snapshot"], scan.snapshot))
        .group_by("id")
        .aggregate([([], "count_all")])
    )
    spent = used.filter(pc.greater_equal(used["count_all"], k))["id"].to_pylist()
    return scan.filter(Unused(k, frozenset(spent), f"ledger_rows={len(ledger)}"))


def informative_groups(reward: Any = "reward") -> InformativeGroups:
    """The gate that keeps groups whose rewards differ, whole, and drops the others, whole.

    Rewards that differ by less than 1e-9 of the larger are the same; rows without a group are dropped.

    Args:
        reward: what must differ: a scalar column, `metadata.key`, or a polars expression.
    """
    return InformativeGroups(reward)
