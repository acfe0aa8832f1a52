"""Owns gates: staleness, what may be trained on, how often a row was used, groups with a signal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import QueryError
from trajstore.selection.derived import MASK_KNOWN, SUPERSEDED
from trajstore.selection.draw import stratum_codes
from trajstore.selection.steps import Bounds, evaluate, scalar, scalar_columns
from trajstore.selection.versions import VERSION_OF, GapOf
from trajstore.trajectory import PolicyVersion, version_number

if TYPE_CHECKING:
    import polars as pl

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

SAME = 1e-9
"""Rewards of a group that differ by less, relative to the largest, are the same reward."""


@dataclass(frozen=True)
class Fresh:
    """Keeps rows whose version gap at `at` is at most `max_staleness`; an unknown version is never fresh.

    Negative gaps (rows newer than the trainer) are kept. See `fresh`.
    """

    at: int
    max_staleness: int | Mapping[Any, int]
    gap_of: GapOf = "oldest"
    by: Any = None
    otherwise: int | None = None
    whole_groups: bool = False

    @property
    def label(self) -> str:
        limit = dict(self.max_staleness) if isinstance(self.max_staleness, Mapping) else self.max_staleness
        more = "" if self.by is None else f", by={self.by!s}"
        more += "" if self.otherwise is None else f", otherwise={self.otherwise}"
        more += ", whole_groups=True" if self.whole_groups else ""
        return f"fresh(at={self.at}, max_staleness={limit}, gap_of={self.gap_of!r}{more})"

    @property
    def bounds(self) -> Bounds:
        if self.whole_groups:
            return {}  # a file of stale rows only still says which groups are stale
        limits = [self.max_staleness] if isinstance(self.max_staleness, int) else []
        if isinstance(self.max_staleness, Mapping):
            if self.otherwise is None:
                return {}  # a value that has no limit is an error, wherever it is
            limits = [*self.max_staleness.values(), self.otherwise]
        # The newest version of a row is never below its mean version.
        column = VERSION_OF["newest" if self.gap_of == "mean" else self.gap_of]
        return {column: (self.at - max(limits), None)}

    @property
    def version(self) -> str:
        """Column of the version that it looks at."""
        return VERSION_OF[self.gap_of]

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        names = {self.version} | ({"group_id"} if self.whole_groups else set())
        return names if self.by is None else names | scalar_columns(scalar(self.by), types)

    def keep(self, frame: pl.DataFrame) -> Int64s:
        gap = self.at - frame[self.version]
        fresh = (gap <= self._limits(frame)).fill_null(False)
        if self.whole_groups:
            fresh = _whole(fresh, frame["group_id"])
        kept: Int64s = fresh.to_numpy().nonzero()[0]
        return kept

    def _limits(self, frame: pl.DataFrame) -> Any:
        """The tolerance of each row, or of all."""
        if not isinstance(self.max_staleness, Mapping):
            return self.max_staleness
        import polars as pl

        values = evaluate(scalar(self.by), frame, str(self.by))
        limits = np.zeros(len(values), np.int64)
        for code, value in stratum_values(codes := stratum_codes(values), values).items():
            limit = self.max_staleness.get(value, self.otherwise)
            if limit is None:
                raise QueryError(
                    f"max_staleness names no tolerance for {self.by!s} = {value!r}",
                    hint="name it, or give otherwise= for all values that are not named",
                )
            limits[codes == code] = limit
        return pl.Series(limits)


@dataclass(frozen=True)
class Stale:
    """Keeps rows whose version gap at `at` is known and above `max_staleness`: those that may be deleted."""

    at: int
    max_staleness: int
    gap_of: GapOf = "oldest"

    @property
    def label(self) -> str:
        return f"stale(at={self.at}, max_staleness={self.max_staleness}, gap_of={self.gap_of!r})"

    @property
    def bounds(self) -> Bounds:
        # The oldest version of a row is never above its mean version.
        column = VERSION_OF["oldest" if self.gap_of == "mean" else self.gap_of]
        return {column: (None, self.at - self.max_staleness - 1)}

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return {VERSION_OF[self.gap_of]}

    def keep(self, frame: pl.DataFrame) -> Int64s:
        gap = self.at - frame[VERSION_OF[self.gap_of]]
        return (gap > self.max_staleness).fill_null(False).to_numpy().nonzero()[0]


def fresh(
    at: PolicyVersion | int,
    max_staleness: int | Mapping[Any, int],
    *,
    gap_of: GapOf = "oldest",
    by: Any = None,
    otherwise: int | None = None,
    whole_groups: bool = False,
) -> Fresh:
    """The gate `version gap <= max_staleness`, where gap = at - version.

    Args:
        at: the trainer's policy version.
        max_staleness: largest gap that stays, in publications of the policy. A mapping gives one for each
            value of `by` (None for null).
        gap_of: which version of a trajectory counts: of its oldest token (the safe one), the one it was
            started under, of its newest token, or the mean over the tokens of its segments (which takes a
            row's segments to know; rows of which only a span is known have none).
        by: with a mapping, what it goes by: a scalar column, `metadata.key`, or a polars expression.
        otherwise: with a mapping, the tolerance of values it does not name; without it they are an error.
        whole_groups: drop every row of a group when one of them is stale (the worst member decides).

    Raises:
        QueryError: a tolerance is negative or no whole number, gap_of is unknown, or only one of mapping and
            `by` is given.
        ValidationError: at is no policy version.
    """
    if gap_of not in VERSION_OF:
        raise QueryError(f"gap_of is {gap_of!r}, expected one of {', '.join(VERSION_OF)}")
    mapped = isinstance(max_staleness, Mapping)
    if mapped != (by is not None):
        raise QueryError(
            "max_staleness as a mapping and by= go together",
            hint='fresh(at=10, max_staleness={"math": 2, "code": 8}, by="source")',
        )
    if otherwise is not None and not mapped:
        raise QueryError("otherwise= goes with a mapping as max_staleness")
    limits: int | Mapping[Any, int] = (
        {value: _tolerance(limit) for value, limit in max_staleness.items()}
        if isinstance(max_staleness, Mapping)
        else _tolerance(max_staleness)
    )
    rest = None if otherwise is None else _tolerance(otherwise)
    if by is not None:
        scalar(by)
    return Fresh(version_number(at), limits, gap_of, by, rest, whole_groups)


def _tolerance(limit: Any) -> int:
    """A staleness that can be asked for; whatever counts as a whole number becomes an int."""
    try:
        number = index(limit)
    except TypeError:
        raise QueryError(f"max_staleness is {limit!r}, expected a whole number") from None
    if number < 0:
        raise QueryError(f"max_staleness is {number}, expected 0 or more")
    return number


@dataclass(frozen=True)
class Trainable:
    """Keeps rows to train on: completed, not superseded by a continuation, and with a loss mask.

    A row has a loss mask when it was given one, or when its split into prompt and response is known.
    """

    label: ClassVar[str] = "trainable()"
    bounds: ClassVar[Bounds] = {}

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return {"status", SUPERSEDED, MASK_KNOWN}

    def keep(self, frame: pl.DataFrame) -> Int64s:
        kept = (frame["status"] == "completed") & ~frame[SUPERSEDED] & frame[MASK_KNOWN]
        return kept.to_numpy().nonzero()[0]


@dataclass(frozen=True)
class Unused:
    """Keeps rows that were trained on fewer than `k` times.

    Attributes:
        k: the limit.
        spent: ids of the rows that reached it.
        at: what was counted, for the label.
    """

    k: int
    spent: frozenset[str] = field(repr=False)
    at: str = ""

    bounds: ClassVar[Bounds] = {}

    @property
    def label(self) -> str:
        return f"max_times_sampled({self.k}{self.at and ', ' + self.at})"

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return {"id"}

    def keep(self, frame: pl.DataFrame) -> Int64s:
        import polars as pl

        spent = pl.Series(sorted(self.spent), dtype=pl.String)
        return (~frame["id"].is_in(spent.implode())).to_numpy().nonzero()[0]


@dataclass(frozen=True)
class InformativeGroups:
    """Keeps groups whose rewards differ, whole, and drops the others, whole; rows without a group go.

    Two rewards differ when they are further apart than 1e-9 of the larger: the standard deviation of equal
    rewards is not 0 in every engine. NaN and infinite rewards are not compared.
    """

    reward: Any = "reward"

    bounds: ClassVar[Bounds] = {}

    @property
    def label(self) -> str:
        return f"informative_groups(reward={self.reward!s})"

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return {"group_id"} | scalar_columns(scalar(self.reward, "reward"), types)

    def keep(self, frame: pl.DataFrame) -> Int64s:
        import polars as pl

        value = evaluate(scalar(self.reward, "reward"), frame, str(self.reward)).cast(pl.Float64)
        rows = pl.DataFrame({"g": frame["group_id"], "x": value})
        finite = pl.when(pl.col("x").is_finite()).then(pl.col("x"))
        rows = rows.select(
            "g", low=finite.min().over("g"), high=finite.max().over("g"), size=finite.abs().max().over("g")
        )
        varied = (rows["high"] - rows["low"]) > SAME * rows["size"]
        return (varied & rows["g"].is_not_null()).fill_null(False).to_numpy().nonzero()[0]


def _whole(kept: pl.Series, groups: pl.Series) -> pl.Series:
    """Rows whose whole group is kept; a row without a group goes by itself."""
    import polars as pl

    rows = pl.DataFrame({"kept": kept, "group": groups})
    return rows.select(
        pl.when(pl.col("group").is_null()).then(pl.col("kept")).otherwise(pl.col("kept").all().over("group"))
    ).to_series()


def stratum_values(codes: Int64s, values: pl.Series) -> dict[int, Any]:
    """The value behind each stratum code."""
    distinct, first = np.unique(codes, return_index=True)
    return dict(zip(distinct.tolist(), values.gather(first).to_list(), strict=True))
