"""Owns what-if questions: what gates would drop and what batches would look like; makes no batch.

Answers come from logged lengths, versions and groups, through the same `trajstore.plan` that loaders use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trajstore.errors import QueryError
from trajstore.plan import Recipe, plan
from trajstore.query import metrics
from trajstore.query.survey import Survey
from trajstore.selection import seeded_keys

Int64s = NDArray[np.int64]

BATCH_ROWS = 32
BUCKETS = 8

REASONS = ("not completed", "unknown version", "stale", "group incomplete", "too long")
"""Why a row is dropped, in the order in which it is asked."""


@dataclass(frozen=True)
class Forecast:
    """What training on some rows would be like.

    Attributes:
        rows, kept: rows before and after the gates.
        dropped: rows by reason, those of `REASONS` that took any.
        by_task: task, rows, kept, a column for each reason, kept_length, dropped_length (mean tokens).
        batches: batches of an epoch, all ranks together.
        rows_per_batch, tokens_per_batch: means; tokens without padding.
        fewest_tokens, most_tokens: of a batch.
        padding: padding / padded size, 0 for packed and nested batches.
        ess_freshness: effective sample size over n of the weights 1 / (gap + 1) of a freshness-weighted draw;
            NaN when no version is known.
        ess_tokens, ess_rows: of the importance ratios, when the survey read log-probs; NaN otherwise.
    """

    rows: int
    kept: int
    dropped: Mapping[str, int]
    by_task: pl.DataFrame
    batches: int
    rows_per_batch: float
    tokens_per_batch: float
    fewest_tokens: int
    most_tokens: int
    padding: float
    ess_freshness: float
    ess_tokens: float
    ess_rows: float

    @property
    def starved(self) -> list[str | None]:
        """Tasks of which completed rows exist and none is kept."""
        gone = (pl.col("kept") == 0) & (pl.col("rows") > pl.col("not completed"))
        return self.by_task.filter(gone)["task"].to_list()


def forecast(
    rows: Survey,
    recipe: Recipe,
    *,
    max_staleness: int | None = None,
    group: int | None = None,
    seed: int = 0,
) -> Forecast:
    """What one epoch would be like after these gates, in these batches.

    Args:
        rows: from `facts`, or from `survey` for the effective sample sizes of importance ratios.
        recipe: how rows become batches. Rows that do not fit its max_tokens are dropped.
        max_staleness: largest version gap that stays; unknown versions go. None lets all stay.
        group: whole groups only: those with as many completed rows, or more, and with no stale one.
        seed: chooses the shuffle.

    Raises:
        QueryError: a number is out of range.
        InputError: a whole group is more than a batch.
    """
    if max_staleness is not None and max_staleness < 0:
        raise QueryError(f"max_staleness is {max_staleness}, expected 0 or more")
    if group is not None and group < 1:
        raise QueryError(f"group is {group}, expected at least 1")
    frame = rows.frame.with_columns(reason=reasons(rows.frame, recipe, max_staleness, group))
    kept = frame.filter(pl.col("reason").is_null())
    lengths = kept["length"].to_numpy()
    made = plan(
        lengths,
        recipe,
        keys=seeded_keys(kept["id_hash"].to_numpy(), seed),
        groups=_codes(kept["group_id"]),
        prompt_lengths=kept["prompt_length"].fill_null(-1).to_numpy(),
    )
    tokens = np.array([int(lengths[batch].sum()) for batch in made], np.int64)
    drift = metrics.drift(kept.with_columns(all=pl.lit(0)), "all") if "log_weight" in frame.columns else None
    known = drift.row(0, named=True) if drift is not None and len(drift) else {}
    gaps = kept["gap"].drop_nulls().clip(lower_bound=0).to_numpy()
    count = frame.group_by("reason").len()
    per_reason = dict(count.iter_rows())
    return Forecast(
        rows=len(frame),
        kept=len(kept),
        dropped={reason: per_reason[reason] for reason in REASONS if reason in per_reason},
        by_task=_by_task(frame),
        batches=len(tokens),
        rows_per_batch=len(made.rows) / len(tokens) if len(tokens) else 0.0,
        tokens_per_batch=float(tokens.mean()) if len(tokens) else 0.0,
        fewest_tokens=int(tokens.min()) if len(tokens) else 0,
        most_tokens=int(tokens.max(initial=0)),
        padding=made.padding_ratio(lengths) if recipe.layout in ("padded", "prompt_response") else 0.0,
        ess_freshness=metrics.ess(-np.log1p(gaps)),
        ess_tokens=known.get("ess_tokens", float("nan")),
        ess_rows=known.get("ess_rows", float("nan")),
    )


def reasons(frame: pl.DataFrame, recipe: Recipe, max_staleness: int | None, group: int | None) -> pl.Series:
    """The first of `REASONS` that takes each row, null for rows that stay.

    With `group`, staleness and length are those of the group's worst completed member, so that no group is
    ever split.
    """
    done = pl.col("status") == "completed"
    alone = pl.col("group_id").is_null()

    def worst(value: pl.Expr) -> pl.Expr:
        if group is None:
            return value
        of_group = value.filter(done).max().over("group_id")
        return pl.when(alone).then(value).otherwise(of_group)

    unknown, stale = pl.lit(False), pl.lit(False)
    if max_staleness is not None:
        unknown = worst(pl.col("gap").is_null())
        stale = worst(pl.col("gap")) > max_staleness
    incomplete = pl.lit(False)
    if group is not None:
        incomplete = alone | (done.sum().over("group_id") < group)
    too_long = pl.lit(False) if recipe.max_tokens is None else worst(pl.col("length")) > recipe.max_tokens
    tests = dict(zip(REASONS, (~done, unknown, stale, incomplete, too_long), strict=True))
    first = pl.coalesce(pl.when(test).then(pl.lit(reason)) for reason, test in tests.items())
    return frame.select(first.alias("reason"))["reason"]


def _codes(groups: pl.Series) -> Int64s:
    """A number for each group, -1 for rows that are in none."""
    codes = groups.rank("dense").cast(pl.Int64).fill_null(0) - 1
    return codes.to_numpy()


def _by_task(frame: pl.DataFrame) -> pl.DataFrame:
    kept = pl.col("reason").is_null()
    counts = {reason: (pl.col("reason") == reason).sum().cast(pl.Int64) for reason in REASONS}
    return (
        frame.group_by("task")
        .agg(
            rows=pl.len().cast(pl.Int64),
            kept=kept.sum().cast(pl.Int64),
            **counts,
            kept_length=pl.col("length").filter(kept).mean(),
            dropped_length=pl.col("length").filter(~kept).mean(),
        )
        .sort("task")
    )


def paddings(frame: pl.DataFrame, batch_rows: int = BATCH_ROWS, buckets: int = BUCKETS) -> pl.DataFrame:
    """Padding of an epoch of these rows by the usual plans, at about the same number of tokens a batch.

    Returns:
        plan, batches, tokens (mean of a batch, without padding), padding (over padded size).
    """
    lengths = frame["length"].to_numpy()
    if not lengths.sum():
        return pl.DataFrame(
            schema={"plan": pl.String, "batches": pl.Int64, "tokens": pl.Float64, "padding": pl.Float64}
        )
    shuffled = seeded_keys(frame["id_hash"].to_numpy(), 0)
    in_order = np.argsort(lengths, kind="stable").argsort().astype(np.uint64)
    budget = max(int(lengths.max()), batch_rows * int(np.ceil(lengths.mean())))
    by_rows, by_tokens = Recipe(batch_size=batch_rows), Recipe(max_tokens=budget)
    plans = {
        f"{batch_rows} rows, as they came": plan(lengths, by_rows),
        f"{batch_rows} rows, shuffled": plan(lengths, by_rows, keys=shuffled),
        f"{batch_rows} rows, {buckets} length buckets": plan(
            lengths, Recipe(batch_size=batch_rows, bucket_window=buckets), keys=shuffled
        ),
        f"{batch_rows} rows, sorted by length": plan(lengths, by_rows, keys=in_order),
        f"{budget:,} tokens, shuffled": plan(lengths, by_tokens, keys=shuffled),
        f"{budget:,} tokens, {buckets} length buckets": plan(
            lengths, Recipe(max_tokens=budget, bucket_window=buckets), keys=shuffled
        ),
    }
    return pl.DataFrame(
        [
            {
                "plan": name,
                "batches": len(made),
                "tokens": float(lengths.sum()) / len(made),
                "padding": made.padding_ratio(lengths),
            }
            for name, made in plans.items()
        ]
    )
