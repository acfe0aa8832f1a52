"""Owns the facts of a report: what the library's own verbs say of a store, in tables; draws nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import unquote

import numpy as np
import polars as pl

from trajstore.query import metrics
from trajstore.query.checks import Finding
from trajstore.query.doctor import examine
from trajstore.query.planner import paddings
from trajstore.query.survey import Survey, survey
from trajstore.store import TrajectoryStore
from trajstore.trajectory import PolicyVersion

SHOWN_TASKS = 6
"""Tasks that get a line of their own; those of the fewest rows are joined."""

OTHER_TASKS = "other tasks"
LENGTH_BINS = 40


@dataclass(frozen=True)
class Facts:
    """What a report shows, each table as `trajstore.query.metrics` makes it.

    Attributes:
        store: where the rows are, as a person writes it.
        snapshot, written: which state of them, and when it was committed.
        at: the policy version that gaps are counted from; None when no version is known.
        by: what a task is.
        rows, tokens, groups, versions: totals; versions is the number of different ones.
        findings: the doctor's.
        rewards: completed rows by version; `rewards_by_task` by task and version, tasks of few rows joined.
        ages: completed rows by version gap.
        drift: by gap at which log-probs were recomputed.
        staleness: what a gate keeps of all completed rows; `staleness_by_task` of each task.
        outcomes, lengths: by version.
        length_histogram: low, high, ended (how the response ended), rows.
        groups: one row a group of completed rows.
        padding: of batches made by several plans.
        bytes: compressed bytes by column, largest first.
    """

    store: str
    snapshot: int
    written: datetime
    at: int | None
    by: str
    rows: int
    tokens: int
    groups_count: int
    versions: int
    findings: list[Finding]
    rewards: pl.DataFrame
    rewards_by_task: pl.DataFrame
    ages: pl.DataFrame
    drift: pl.DataFrame
    staleness: pl.DataFrame
    staleness_by_task: pl.DataFrame
    outcomes: pl.DataFrame
    lengths: pl.DataFrame
    length_histogram: pl.DataFrame
    groups: pl.DataFrame
    padding: pl.DataFrame
    bytes: Mapping[str, int]


def gather(store: TrajectoryStore, *, at: PolicyVersion | int | None = None, by: str = "source") -> Facts:
    """The facts of a store at its snapshot, from one pass over its rows.

    Args:
        store: which rows; `store.at(...)` for an earlier state.
        at: the current policy version; the newest one in the rows unless given.
        by: what a task is: a scalar column, or `metadata.KEY`.

    Raises:
        QueryError: `by` is not a scalar column.
        CorruptFileError: a data file cannot be read.
    """
    rows = survey(store, at=at, by=by)
    done = rows.finished
    tasked = _with_few_tasks(done)
    (state,) = [s for s in store.history() if s.snapshot == store.snapshot]
    return Facts(
        store=unquote(store.uri.removeprefix("file://")),
        snapshot=state.snapshot,
        written=state.timestamp,
        at=rows.at,
        by=by,
        rows=len(rows),
        tokens=int(rows.frame["length"].sum()),
        groups_count=rows.frame["group_id"].drop_nulls().n_unique(),
        versions=rows.frame["version_id"].drop_nulls().n_unique(),
        findings=examine(rows),
        rewards=metrics.ages(done, ("version_id",)),
        rewards_by_task=metrics.rewards(tasked),
        ages=metrics.ages(done),
        drift=metrics.drift(done),
        staleness=metrics.staleness(done.with_columns(task=pl.lit("all"))),
        staleness_by_task=metrics.staleness(tasked),
        outcomes=metrics.outcomes(rows.frame),
        lengths=metrics.lengths(done),
        length_histogram=length_histogram(rows),
        groups=metrics.groups(done),
        padding=paddings(done),
        bytes=dict(sorted(store.column_bytes().items(), key=lambda item: -item[1])),
    )


def _with_few_tasks(done: pl.DataFrame) -> pl.DataFrame:
    """The tasks of most rows under their names, the others joined; no task is the empty name."""
    named = done.with_columns(pl.col("task").fill_null(""))
    most = named.group_by("task").len().sort("len", "task", descending=(True, False))["task"]
    if len(most) <= SHOWN_TASKS:
        return named
    kept = pl.col("task").is_in(most.head(SHOWN_TASKS - 1).to_list())
    return named.with_columns(task=pl.when(kept).then("task").otherwise(pl.lit(OTHER_TASKS)))


def length_histogram(rows: Survey) -> pl.DataFrame:
    """Rows by response length and by how the response ended: low, high (a half-open bin), ended, rows."""
    ended = (
        pl.when(metrics.is_truncated())
        .then(pl.lit("cut off"))
        .when(pl.col("status") == "completed")
        .then(pl.lit("finished"))
        .otherwise("status")
    )
    length = pl.coalesce("response_length", "length")
    frame = rows.frame.select(length=length, ended=ended)
    if not len(frame):
        return pl.DataFrame(schema={"low": pl.Int64, "high": pl.Int64, "ended": pl.String, "rows": pl.Int64})
    step = max(1, -(-int(np.max(frame["length"].to_numpy()) + 1) // LENGTH_BINS))
    low = pl.col("length") // step * step
    return (
        frame.group_by(low.alias("low"), "ended")
        .agg(rows=pl.len().cast(pl.Int64))
        .select("low", (pl.col("low") + step).alias("high"), "ended", "rows")
        .sort("low", "ended")
    )
