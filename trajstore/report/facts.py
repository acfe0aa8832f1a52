"""Owns the facts of a report: what the library's own verbs say of a store, in tables; draws nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
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

SHOWN_VERSIONS = 40
"""Versions, or gaps, that are shown each by itself; more are joined in steps of 2, 5, 10, ..."""

SHOWN_REWARDS = 24
"""Rewards that have a bar each; when there are more different ones, they share so many bins."""

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
        version_step, gap_step: how many versions, or gaps, the tables below show as one, named by the lowest
            (in `staleness` by the highest, so that what it says of a gate is exact); 1 when all are apart.
        mean_gap, near: of completed rows with a known version: their mean gap, and the share of all completed
            rows whose gap is -1, 0 or 1; None when no version is known.
        findings: the doctor's.
        rewards: completed rows by version; `rewards_by_task` by task and version, tasks of few rows joined;
            `tasks` by task.
        reward_histogram: low, high (the same, or a bin), rows; of finite rewards of completed rows.
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
    version_step: int
    gap_step: int
    mean_gap: float | None
    near: float | None
    findings: list[Finding]
    rewards: pl.DataFrame
    rewards_by_task: pl.DataFrame
    tasks: pl.DataFrame
    reward_histogram: pl.DataFrame
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
    exact = rows.finished
    versions, gaps = _step(rows.frame["version_id"]), _step(rows.frame["gap"], rows.frame["drift_gap"])
    joined = {name: pl.col(name) // versions * versions for name in ("version_id", "oldest_version_id")}
    joined |= {name: pl.col(name) // gaps * gaps for name in ("gap", "drift_gap")}
    done = exact.with_columns(**joined)
    tasked = _with_few_tasks(done)
    gated = _with_few_tasks(exact).with_columns(gap=-(-pl.col("gap") // gaps) * gaps)
    known = exact["gap"].drop_nulls()
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
        version_step=versions,
        gap_step=gaps,
        mean_gap=float(known.to_numpy().mean()) if len(known) else None,
        near=int(known.is_between(-1, 1).sum()) / len(exact) if len(known) else None,
        findings=examine(rows),
        rewards=metrics.ages(done, ("version_id",)),
        rewards_by_task=metrics.rewards(tasked),
        tasks=metrics.ages(tasked, ("task",)),
        reward_histogram=reward_histogram(done["reward"]),
        ages=metrics.ages(done),
        drift=metrics.drift(done),
        staleness=metrics.staleness(gated.with_columns(task=pl.lit("all"))),
        staleness_by_task=metrics.staleness(gated),
        outcomes=metrics.outcomes(rows.frame.with_columns(version_id=joined["version_id"])),
        lengths=metrics.lengths(done),
        length_histogram=length_histogram(rows),
        groups=metrics.groups(done),
        padding=paddings(exact),
        bytes=dict(sorted(store.column_bytes().items(), key=lambda item: -item[1])),
    )


def _step(*columns: pl.Series) -> int:
    """1, 2, 5, 10, 20, ...: the least that leaves at most SHOWN_VERSIONS of each column's values."""
    return max(_step_of(column.drop_nulls().unique().to_list()) for column in columns)


def _step_of(values: list[int]) -> int:
    if len(values) <= SHOWN_VERSIONS:
        return 1
    low, high = min(values), max(values)
    steps: Iterator[int] = (digit * 10**zeros for zeros in count() for digit in (1, 2, 5))
    for step in steps:
        if high // step - low // step < SHOWN_VERSIONS:
            return step
    raise AssertionError


def reward_histogram(rewards: pl.Series) -> pl.DataFrame:
    """Rows by reward: a line each where few rewards are different, else equal bins; low, high, rows."""
    finite = rewards.filter(rewards.is_finite())
    value = pl.col("reward")
    apart = finite.to_frame("reward").group_by(low=value, high=value).agg(rows=pl.len().cast(pl.Int64))
    if len(apart) <= SHOWN_REWARDS:
        return apart.sort("low")
    counts, edges = np.histogram(finite.to_numpy(), SHOWN_REWARDS)
    bins = pl.DataFrame({"low": edges[:-1], "high": edges[1:], "rows": counts.astype(np.int64)})
    return bins.filter(pl.col("rows") > 0)


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
