"""Owns a step of a scan: what every step says of itself, predicates, limits; knows no versions, no draw."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import QueryError

if TYPE_CHECKING:
    import polars as pl

Int64s = NDArray[np.int64]
Bounds = Mapping[str, tuple[int | None, int | None]]


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

        kept = evaluate(self.expression(), frame, self.label)
        if kept.dtype != pl.Boolean:
            raise QueryError(f"{self.label!r} gives {kept.dtype}, expected true or false for each row")
        return kept.fill_null(False).to_numpy().nonzero()[0]


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


def evaluate(expression: pl.Expr, frame: pl.DataFrame, label: str) -> pl.Series:
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


def scalar(by: Any, name: str = "by") -> pl.Expr:
    """What a user names a scalar by, as a polars expression.

    Args:
        by: a column, `metadata.key` for a value inside the JSON of `metadata` (as text), or an expression.
        name: of the argument, for the error.

    Raises:
        QueryError: it is neither.
    """
    import polars as pl

    if isinstance(by, pl.Expr):
        return by
    if not isinstance(by, str):
        raise QueryError(f"{name} is {by!r}, expected a column's name or a polars expression")
    if by.startswith("metadata."):
        return pl.col("metadata").str.json_path_match(f"$.{by.removeprefix('metadata.')}")
    return pl.col(by)


def refuse_unknown_key(by: Any, values: pl.Series, frame: pl.DataFrame) -> None:
    """Names the keys there are, where `metadata.key` is of no row: all would be one null, in silence.

    Args:
        by: what was asked for.
        values: [N] of it.
        frame: the rows; with the column metadata, if that was asked for.

    Raises:
        QueryError: there are rows, and none has the key.
    """
    asked = isinstance(by, str) and by.startswith("metadata.")
    if not asked or not len(values) or values.null_count() < len(values):
        return
    found = (json.loads(text) for text in frame["metadata"].drop_nulls().head(100))
    names = sorted({key for one in found if isinstance(one, dict) for key in one})
    raise QueryError(
        f"no row has {by}",
        hint=f"keys of the metadata: {', '.join(names)}" if names else "the rows have no metadata",
    )
