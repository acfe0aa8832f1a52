"""Owns the one pass over rows that metrics and doctor need; judges nothing, and leaves sums to `measures`.

A survey is a polars frame with one row a trajectory, in order of arrival: the scalars of the row and, when
tokens were asked for, sums over them. Everything that is then asked is a reduction of this frame, so a store
is read once, a row group at a time, and what stays in memory is a few numbers a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.batch import TrajectoryBatch
from trajstore.errors import QueryError
from trajstore.query.measures import MEASURES, RATIO_COLUMNS, columns_of, measure, ratio_sums
from trajstore.schema import BY_NAME
from trajstore.selection.steps import refuse_unknown_key, scalar
from trajstore.store import Scan, TrajectoryStore
from trajstore.trajectory import PolicyVersion, version_number

Int64s = NDArray[np.int64]
Source = TrajectoryStore | Scan | TrajectoryBatch

SCALARS = (
    *(
        "id",
        "id_hash",
        "group_id",
        "group_size",
        "length",
        "prompt_length",
        "response_length",
        "reward",
        "status",
    ),
    *("finish_reason", "terminated", "version_known", "version_id", "oldest_version_id", "newest_version_id"),
    *("log_probs_version", "tokens_retokenized", "parent_id", "source", "writer_id", "writer_seq"),
)
"""Columns that `facts` reads; none is a list."""


@dataclass(frozen=True)
class Survey:
    """Rows of a scan as one frame.

    Attributes:
        at: the policy version that gaps are counted from.
        by: what a task is: a scalar column, or `metadata.KEY`.
        frame: one row a trajectory, in order of arrival: SCALARS, `task` (text), `gap` (at - oldest version,
            null where not known), `drift_gap` (the same from the version that log_probs are of) and,
            from `survey`, the measures that were asked for.
    """

    at: int | None
    by: str
    frame: pl.DataFrame

    def __len__(self) -> int:
        return len(self.frame)

    @property
    def finished(self) -> pl.DataFrame:
        """Rows whose status is completed: what one trains on."""
        return self.frame.filter(pl.col("status") == "completed")


def facts(source: Source, *, at: PolicyVersion | int | None = None, by: str = "source") -> Survey:
    """The scalars of every row; no per-token column is read.

    Args:
        source: a store, a scan of it, or a batch in memory.
        at: the current policy version; the newest one in the rows unless given.
        by: what a task is: a scalar column, or `metadata.KEY` for a key of the JSON in `metadata`.

    Raises:
        QueryError: `by` is not a scalar column, or a key that no row has.
    """
    source = source.scan() if isinstance(source, TrajectoryStore) else source
    task = scalar(by)
    (root,) = task.meta.root_names()
    frame = _scalars(source, dict.fromkeys((*SCALARS, root)))
    if frame.schema[root].is_nested():
        raise QueryError(f"column {by!r} is a list", hint="name a scalar column, or metadata.KEY")
    newest = max(frame["newest_version_id"].drop_nulls().to_list(), default=None)
    now = newest if at is None else version_number(at)
    oldest, current = pl.col("oldest_version_id"), pl.lit(now, pl.Int64)
    lengths = ("length", "prompt_length", "response_length", "group_size")  # sums of int32 would wrap
    frame = frame.with_columns(
        task=task.cast(pl.String),
        gap=current - oldest,
        drift_gap=pl.coalesce("log_probs_version", current) - oldest,
        **{name: pl.col(name).cast(pl.Int64) for name in lengths},
    )
    refuse_unknown_key(by, frame["task"], frame)
    return Survey(now, by, frame if root in SCALARS else frame.drop(root))


def _scalars(source: Scan | TrajectoryBatch, names: Iterable[str]) -> pl.DataFrame:
    if isinstance(source, Scan):
        return source.columns(list(names)).to_polars()
    table = source.to_arrow()
    for name in names:
        if name not in table.schema.names:  # a batch has none of what the store stamps on a row
            if name not in BY_NAME:
                raise QueryError(f"there is no column {name!r}", hint=f"columns: {', '.join(BY_NAME)}")
            table = table.append_column(name, pa.nulls(len(table), BY_NAME[name].type))
    frame = pl.from_arrow(table.select(list(names)))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _pieces(source: Scan | TrajectoryBatch, names: Sequence[str]) -> Iterator[tuple[Int64s, pa.Table]]:
    if isinstance(source, Scan):
        yield from source.pieces(names)
        return
    at = 0
    for batch in source.to_arrow().select(names).to_batches():
        yield np.arange(at, at + batch.num_rows), pa.Table.from_batches([batch])
        at += batch.num_rows


def survey(
    source: Source,
    *,
    at: PolicyVersion | int | None = None,
    by: str = "source",
    measures: Collection[str] = tuple(MEASURES),
) -> Survey:
    """The scalars of every row and sums over its tokens; see `facts`.

    Args:
        source, at, by: as of `facts`.
        measures: which of MEASURES: fewer read fewer columns. `metrics.drift` needs `measures.DRIFT`.

    Raises:
        QueryError: `by` is not a scalar column, or a measure is not one.
        CorruptFileError: a data file cannot be read.
    """
    source = source.scan() if isinstance(source, TrajectoryStore) else source
    for name in measures:
        if name not in MEASURES:
            raise QueryError(f"there is no measure {name!r}", hint=f"measures: {', '.join(MEASURES)}")
    known = facts(source, at=at, by=by)
    whole = {name: np.zeros(len(known), MEASURES[name]) for name in MEASURES if name in measures}
    for positions, table in _pieces(source, ("length", "prompt_length", *columns_of(measures))):
        for name, values in measure(table, measures).items():
            whole[name][positions] = values
    return Survey(known.at, by, known.frame.with_columns(**{n: pl.Series(v) for n, v in whole.items()}))


def importance_ratio(source: Source) -> float:
    """Mean of exp(log_probs - behavior_log_probs) over the tokens the policy sampled that have both, to 1e-6.

    It keeps no sums a row, so it costs a fraction of a survey; `metrics.drift` says it at each version gap.
    NaN where no token has both.

    Raises:
        CorruptFileError: a data file cannot be read.
    """
    source = source.scan() if isinstance(source, TrajectoryStore) else source
    total, count = 0.0, 0
    for _, table in _pieces(source, ("length", "prompt_length", *RATIO_COLUMNS)):
        more, tokens = ratio_sums(table)
        total, count = total + more, count + tokens
    return total / count if count else float("nan")
