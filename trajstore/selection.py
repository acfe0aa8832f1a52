"""Owns choosing rows from scalar columns: version gap, gates, strata, the seeded draw; pure, knows no store.

A step looks at a frame of scalar columns, one row a trajectory, and says which rows stay. Frames are
polars'; polars is imported when a step runs, so that `import trajstore` stays quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import QueryError
from trajstore.trajectory import PolicyVersion, version_number

if TYPE_CHECKING:
    import polars as pl

GapOf = Literal["oldest", "start", "newest"]
Allocation = Literal["equal", "proportional"]
Int64s = NDArray[np.int64]
Bounds = Mapping[str, tuple[int | None, int | None]]

VERSION_OF: Mapping[str, str] = {
    "oldest": "oldest_version_id",
    "start": "version_id",
    "newest": "newest_version_id",
}


class Step(Protocol):
    """One narrowing of the rows."""

    @property
    def label(self) -> str:
        """What the step keeps, in a few words."""
        ...

    @property
    def bounds(self) -> Bounds:
        """Per integer column the lowest and highest value a kept row can have: whole files go by it."""
        ...

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        """Columns it looks at; `types` says of every column whether it is a scalar."""
        ...

    def keep(self, frame: pl.DataFrame) -> Int64s:
        """Positions of the rows that stay, in order."""
        ...


@dataclass(frozen=True)
class Where:
    """Keeps rows for which a polars expression, or an SQL predicate, is true (null is not true)."""

    predicate: Any
    label: str

    bounds: ClassVar[Bounds] = {}

    def expression(self) -> pl.Expr:
        """The predicate as a polars expression."""
        import polars as pl

        if isinstance(self.predicate, pl.Expr):
            return self.predicate
        try:
            expression: pl.Expr = pl.sql_expr(self.predicate)
            return expression
        except (pl.exceptions.PolarsError, TypeError) as error:
            raise QueryError(
                f"cannot read the predicate {self.predicate!r}: {error}",
                hint="write it as in SQL's WHERE, e.g. \"reward > 0.5 and status = 'completed'\"",
            ) from error

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return scalar_columns(self.expression(), types)

    def keep(self, frame: pl.DataFrame) -> Int64s:
        import polars as pl

        kept = _evaluate(self.expression(), frame, self.label)
        if kept.dtype != pl.Boolean:
            raise QueryError(f"{self.label!r} gives {kept.dtype}, expected true or false for each row")
        return kept.fill_null(False).to_numpy().nonzero()[0]


@dataclass(frozen=True)
class Fresh:
    """Keeps rows whose version gap at `at` is at most `max_staleness`; an unknown version is never fresh.

    Negative gaps (rows newer than the trainer) are kept.
    """

    at: int
    max_staleness: int
    gap_of: GapOf = "oldest"

    @property
    def label(self) -> str:
        return f"fresh(at={self.at}, max_staleness={self.max_staleness}, gap_of={self.gap_of!r})"

    @property
    def bounds(self) -> Bounds:
        return {VERSION_OF[self.gap_of]: (self.at - self.max_staleness, None)}

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return {VERSION_OF[self.gap_of]}

    def keep(self, frame: pl.DataFrame) -> Int64s:
        version = frame[VERSION_OF[self.gap_of]]
        return (version >= self.at - self.max_staleness).fill_null(False).to_numpy().nonzero()[0]


def fresh(at: PolicyVersion | int, max_staleness: int, *, gap_of: GapOf = "oldest") -> Fresh:
    """The gate `version gap <= max_staleness`, where gap = at - version.

    Args:
        at: the trainer's policy version.
        max_staleness: largest gap that stays, in publications of the policy.
        gap_of: which version of a trajectory counts: of its oldest token (the safe one), the one it was
            started under, or of its newest token.

    Raises:
        QueryError: max_staleness is negative, or gap_of is unknown.
    """
    if gap_of not in VERSION_OF:
        raise QueryError(f"gap_of is {gap_of!r}, expected one of {', '.join(VERSION_OF)}")
    if max_staleness < 0:
        raise QueryError(f"max_staleness is {max_staleness}, expected 0 or more")
    return Fresh(version_number(at), max_staleness, gap_of)


@dataclass(frozen=True)
class Limit:
    """Keeps the first n rows in order of arrival."""

    n: int

    bounds: ClassVar[Bounds] = {}

    @property
    def label(self) -> str:
        return f"limit {self.n}"

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return set()

    def keep(self, frame: pl.DataFrame) -> Int64s:
        return np.arange(min(self.n, len(frame)))


@dataclass(frozen=True)
class Draw:
    """Keeps n rows drawn without replacement, so many of each stratum; the same for one seed.

    Which rows are drawn depends on the seed and on the rows' ids, never on files or their order.
    """

    n: int
    by: Any
    allocation: Allocation
    at: int | None
    seed: int

    bounds: ClassVar[Bounds] = {}

    @property
    def label(self) -> str:
        return f"stratified_sample({self.n}, by={self.by!s}, seed={self.seed})"

    def expression(self) -> pl.Expr:
        """What a stratum is, as a polars expression."""
        import polars as pl

        if not isinstance(self.by, str):
            return self.by  # type: ignore[no-any-return]  # a polars expression, by the sampler's check
        if self.by == "version_gap":
            if self.at is None:
                raise QueryError(
                    "a version gap needs the current policy version", hint="pass at=PolicyVersion(...)"
                )
            return self.at - pl.col(VERSION_OF["oldest"])
        return pl.col(self.by)

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return scalar_columns(self.expression(), types) | {"id", "id_hash"}

    def keep(self, frame: pl.DataFrame) -> Int64s:
        keys = seeded_keys(frame["id_hash"].to_numpy(), self.seed)
        order = _ranked(keys, frame)
        strata = stratum_codes(_evaluate(self.expression(), frame, str(self.by)))
        return draw(strata, keys, order, self.n, self.allocation)


def scalar_columns(expression: pl.Expr, types: Mapping[str, bool]) -> set[str]:
    """Columns an expression reads.

    Raises:
        QueryError: one is not a column, or is a list column (choosing rows reads no list column); the
            expression stands for several.
    """
    if expression.meta.has_multiple_outputs():
        raise QueryError(
            f"{str(expression)!r} stands for several columns", hint="name one column, or join them"
        )
    names = set(expression.meta.root_names())
    for name in sorted(names):
        if name not in types:
            scalars = ", ".join(sorted(n for n, scalar in types.items() if scalar))
            raise QueryError(f"there is no column {name!r}", hint=f"columns to choose by: {scalars}")
        if not types[name]:
            raise QueryError(
                f"column {name!r} is a list: rows are chosen by scalar columns only",
                hint="use length, prompt_length or reward, or SQL through trajstore.query.connect",
            )
    return names


def _evaluate(expression: pl.Expr, frame: pl.DataFrame, label: str) -> pl.Series:
    """The expression's value for each row; a constant is the same for all."""
    import polars as pl

    try:
        values = frame.select(expression.alias("value"))["value"]
    except pl.exceptions.PolarsError as error:
        raise QueryError(f"cannot evaluate {label!r}: {error}") from error
    if len(values) == 1 and not expression.meta.root_names():
        return values.new_from_index(0, len(frame))
    if len(values) != len(frame):
        raise QueryError(f"{label!r} gives {len(values)} values for {len(frame)} rows")
    return values


def seeded_keys(id_hash: Int64s, seed: int) -> NDArray[np.uint64]:
    """One uniform 64-bit key a row, [N] uint64: splitmix64 of the id's hash, offset by that of the seed.

    Source of the mixing constants: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014 (the variant of java.util.SplittableRandom).
    """
    salt = _splitmix64(np.array([seed % 2**64], np.uint64))
    return _splitmix64(id_hash.astype(np.int64).view(np.uint64) ^ salt)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = x + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _ranked(keys: NDArray[np.uint64], frame: pl.DataFrame) -> Int64s:
    """Positions by key, then by id: rows of one id stay in order of arrival."""
    order = np.argsort(keys, kind="stable")
    if len(order) and (keys[order][1:] == keys[order][:-1]).any():
        ids = np.array(frame["id"].to_list(), dtype=object)
        return np.array(sorted(range(len(ids)), key=lambda i: (keys[i], ids[i])))
    return order


def stratum_codes(strata: pl.Series) -> Int64s:
    """A small integer for each distinct value, [N] int64; null and NaN are values like any other.

    Codes follow the order of the values, so they do not depend on the order of the rows.
    """
    import polars as pl

    # Not a join: that of one sorted column with another leaves NaN without a partner.
    ranks = strata.rank("dense").cast(pl.Int64).fill_null(0).to_numpy()
    return ranks if strata.null_count() else ranks - 1


def draw(strata: Int64s, keys: NDArray[np.uint64], order: Int64s, n: int, allocation: Allocation) -> Int64s:
    """Positions of min(n, N) rows, ascending: in each stratum the rows that come first in `order`.

    Args:
        strata: [N] stratum codes, 0-based.
        keys: [N] seeded keys; they also break ties between strata.
        order: [N] positions by key.
        n: rows to draw.
        allocation: "equal" gives every stratum the same share and refills shortfalls evenly,
            "proportional" gives shares by size; both by largest remainder.
    """
    if not len(strata):
        return np.empty(0, np.int64)
    sizes = np.bincount(strata)
    first = np.full(len(sizes), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(first, strata, keys)
    # Mixed once more: the least key of many rows is small, and large strata would win every tie.
    quota = _QUOTAS[allocation](sizes, min(n, len(strata)), _splitmix64(first))
    by_stratum = order[np.argsort(strata[order], kind="stable")]
    starts = np.cumsum(sizes) - sizes
    rank = np.arange(len(strata)) - np.repeat(starts, sizes)
    return np.sort(by_stratum[rank < np.repeat(quota, sizes)])


def _equal(sizes: Int64s, n: int, tie: NDArray[np.uint64]) -> Int64s:
    """Water level: every stratum gets min(size, level), what is left goes one each by seeded order."""
    ascending = np.sort(sizes)
    filled = np.cumsum(ascending) - ascending + ascending * np.arange(len(sizes), 0, -1)
    below = int((filled <= n).sum())  # strata that are taken whole
    rest = n - int(ascending[:below].sum())
    level = rest // (len(sizes) - below) if below < len(sizes) else 0
    quota = np.minimum(sizes, max(level, int(ascending[below - 1]) if below else 0))
    return _one_each(quota, n - int(quota.sum()), np.where(quota < sizes, 0, 1), sizes, tie)


def _proportional(sizes: Int64s, n: int, tie: NDArray[np.uint64]) -> Int64s:
    total = int(sizes.sum())
    quota = sizes * n // total
    return _one_each(quota, n - int(quota.sum()), -(sizes * n % total), sizes, tie)


def _one_each(quota: Int64s, left: int, rank: Int64s, sizes: Int64s, tie: NDArray[np.uint64]) -> Int64s:
    chosen = np.lexsort((tie, rank))[:left]
    quota = quota.copy()
    quota[chosen] += 1
    return np.minimum(quota, sizes)


_QUOTAS: dict[str, Callable[[Int64s, int, NDArray[np.uint64]], Int64s]] = {
    "equal": _equal,
    "proportional": _proportional,
}
