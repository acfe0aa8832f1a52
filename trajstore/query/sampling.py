"""Owns samplers: a scan goes in, a scan with a seeded draw comes out; reads nothing itself."""

from __future__ import annotations

from typing import Any

from trajstore.errors import QueryError
from trajstore.selection import Allocation, Draw
from trajstore.store import Scan
from trajstore.trajectory import PolicyVersion, version_number


def stratified_sample(
    scan: Scan,
    n: int,
    *,
    by: Any = "version_gap",
    at: PolicyVersion | int | None = None,
    allocation: Allocation = "equal",
    seed: int = 0,
) -> Scan:
    """The scan narrowed to min(n, available) rows, drawn without replacement from each stratum.

    The result is a recipe: it is drawn when a terminal verb asks, always the same rows for one seed,
    whatever the files and their order.

    Args:
        scan: rows to draw from.
        n: rows to draw.
        by: what a stratum is: a scalar column, a polars expression of scalar columns, or
            "version_gap" (at - oldest version). Null and NaN are strata of their own.
        at: the current policy version, needed for "version_gap".
        allocation: "equal" gives each stratum the same share and refills shortfalls evenly,
            "proportional" gives shares by size; both by largest remainder.
        seed: chooses the draw.

    Raises:
        QueryError: n is negative; `by` is not a scalar column; a version gap without `at`.
    """
    if n < 0:
        raise QueryError(f"n is {n}, expected 0 or more")
    if allocation not in ("equal", "proportional"):
        raise QueryError(f"allocation is {allocation!r}, expected 'equal' or 'proportional'")
    if not isinstance(by, str) and type(by).__module__.partition(".")[0] != "polars":
        raise QueryError(f"by is {by!r}, expected a column's name or a polars expression")
    step = Draw(n, by, allocation, None if at is None else version_number(at), seed)
    return scan.filter(step)
