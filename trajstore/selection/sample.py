"""Owns the draw as a step of a scan: strata, weights and whole groups from columns; knows no store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import QueryError
from trajstore.selection.derived import GROUP_MEMBERS, SUPERSEDED, is_member
from trajstore.selection.draw import draw, race, seeded_keys, stratum_codes, whole_groups
from trajstore.selection.gates import stratum_values
from trajstore.selection.steps import Bounds, evaluate, refuse_unknown_key, scalar, scalar_columns
from trajstore.selection.versions import VERSION_OF, GapOf, freshness

if TYPE_CHECKING:
    import polars as pl

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Allocation = Literal["equal", "proportional"] | Mapping[Any, float]


@dataclass(frozen=True)
class Draw:
    """Keeps n rows, or whole groups, drawn without replacement; the same for one seed.

    What is drawn depends on the seed and on the rows' ids, never on files or their order. The meaning of
    the arguments is that of `trajstore.query.stratified_sample`.
    """

    n: int
    by: Any
    allocation: Allocation
    at: int | None
    seed: int
    weights: Any = None
    gap_of: GapOf = "oldest"
    whole_groups: bool = False

    bounds: ClassVar[Bounds] = {}

    @property
    def label(self) -> str:
        more = "" if self.weights is None else f", weights={self.weights!s}"
        more += ", whole_groups=True" if self.whole_groups else ""
        return f"stratified_sample({self.n}, by={self.by!s}{more}, seed={self.seed})"

    def expression(self) -> pl.Expr:
        """What a stratum is, as a polars expression."""
        import polars as pl

        if self.by is None:
            return pl.lit(0)
        if isinstance(self.by, str) and self.by == "version_gap":
            return self._gap()
        return scalar(self.by)

    def _gap(self) -> pl.Expr:
        import polars as pl

        if self.at is None:
            raise QueryError(
                "a version gap needs the current policy version", hint="pass at=PolicyVersion(...)"
            )
        return self.at - pl.col(VERSION_OF[self.gap_of])

    def _weight(self) -> pl.Expr | None:
        if isinstance(self.weights, str) and self.weights == "freshness":
            return self._gap()
        return None if self.weights is None else scalar(self.weights, "weights")

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        types = {**types, VERSION_OF[self.gap_of]: True}
        names = scalar_columns(self.expression(), types) | {"id", "id_hash"}
        if (weight := self._weight()) is not None:
            names |= scalar_columns(weight, types)
        if self.whole_groups:
            names |= {"group_id", "group_size", "status", SUPERSEDED, GROUP_MEMBERS}
        return names

    def keep(self, frame: pl.DataFrame) -> Int64s:
        if self.whole_groups:
            return self._keep_groups(frame)
        keys = seeded_keys(frame["id_hash"].to_numpy(), self.seed)
        strata = self._strata(frame)
        codes = stratum_codes(strata)
        return self._draw(codes, self._shares(codes, strata), keys, frame["id"], self._weights(frame))

    def _strata(self, frame: pl.DataFrame) -> pl.Series:
        """What stratum each row is in."""
        strata = evaluate(self.expression(), frame, str(self.by))
        refuse_unknown_key(self.by, strata, frame)
        return strata

    def _keep_groups(self, frame: pl.DataFrame) -> Int64s:
        rows = (is_member(frame) & frame["group_id"].is_not_null()).to_numpy().nonzero()[0]
        members = frame[rows]
        groups = stratum_codes(members["group_id"])
        whole = whole_groups(
            groups,
            members["group_size"].fill_null(0).to_numpy().astype(np.int64),
            members[GROUP_MEMBERS].to_numpy(),
            np.ones(len(rows), bool),
        )
        rows = rows[whole[groups]]
        if not len(rows):
            return rows
        members = frame[rows]
        names = members["group_id"]
        groups = stratum_codes(names)
        by_group = np.argsort(groups, kind="stable")
        first = np.searchsorted(groups[by_group], np.arange(int(groups.max()) + 1))
        hashes = np.add.reduceat(members["id_hash"].to_numpy()[by_group].view(np.uint64), first)
        strata = self._strata(members)
        codes = stratum_codes(strata)
        # The worst member decides: the greatest value, and null when one has none (its code is the lowest).
        group_code = np.maximum.reduceat(codes[by_group], first)
        if strata.null_count():
            group_code = np.where(np.minimum.reduceat(codes[by_group], first) == 0, 0, group_code)
        weights = self._weights(members)
        if weights is not None:
            weights = np.minimum.reduceat(weights[by_group], first)
        keys = seeded_keys(hashes.view(np.int64), self.seed)
        chosen = self._draw(
            group_code, self._shares(codes, strata), keys, names.gather(by_group[first]), weights
        )
        return rows[np.isin(groups, chosen)]

    def _draw(
        self, codes: Int64s, shares: Any, keys: NDArray[np.uint64], names: pl.Series, weights: Floats | None
    ) -> Int64s:
        times = None if weights is None else race(keys, weights)
        can = np.ones(len(keys), bool) if times is None else np.isfinite(times)
        if not isinstance(shares, str):
            can &= shares[codes] > 0
        among = None if can.all() else np.flatnonzero(can)
        return draw(codes, keys, names, self.n, shares, times=times, among=among)

    def _shares(self, codes: Int64s, strata: pl.Series) -> Any:
        """What `draw` takes as allocation: a word, or a weight for each stratum code."""
        if isinstance(self.allocation, str):
            return self.allocation
        wanted = {_key(value): weight for value, weight in self.allocation.items()}
        values = stratum_values(codes, strata)
        shares = np.zeros(max(values, default=-1) + 1)
        for code, value in values.items():
            shares[code] = wanted.get(_key(value), 0.0)
        if values and not shares.any():
            there = ", ".join(map(repr, list(values.values())[:10]))
            raise QueryError(
                f"allocation names {', '.join(map(repr, self.allocation))}, and no stratum is one of them",
                hint=f"strata of {self.by!s}: {there}",
            )
        return shares

    def _weights(self, frame: pl.DataFrame) -> Floats | None:
        """[N] weights of the rows, all finite and 0 or more."""
        expression = self._weight()
        if expression is None:
            return None
        import polars as pl

        try:
            values = evaluate(expression, frame, str(self.weights)).cast(pl.Float64)
        except pl.exceptions.PolarsError as error:
            raise QueryError(f"weights {self.weights!s} are no numbers: {error}") from error
        if isinstance(self.weights, str) and self.weights == "freshness":
            return freshness(values.fill_null(np.nan).to_numpy())
        weights = values.fill_null(np.nan).to_numpy()
        bad = ~(np.isfinite(weights) & (weights >= 0))
        if bad.any():
            row = int(bad.argmax())
            raise QueryError(
                f"the weight of row {frame['id'][row]!r} is {values[row]}, expected a number, 0 or more",
                hint="filter such rows out first, or pass an expression with fill_null(0)",
            )
        return weights


def _key(value: Any) -> Any:
    """A stratum's value as a key: all NaN are one."""
    return "NaN" if isinstance(value, float) and value != value else value
