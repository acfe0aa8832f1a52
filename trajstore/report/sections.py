"""Owns what each part of a report says: sentence, plots, numbers and formulas; no HTML tags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from trajstore.query.measures import CLIP
from trajstore.report import charts
from trajstore.report.facts import Facts
from trajstore.report.text import cut, number, numbers, percent, short, size, tokens

SHOWN_COLUMNS = 12


@dataclass(frozen=True)
class Section:
    """One part of the page: a heading, a sentence, plots and the numbers beside each, how they are made.

    A panel without a plot is numbers alone: one point, or one bar, shows nothing.
    """

    name: str
    says: str
    panels: Sequence[tuple[dict[str, Any] | None, str]]
    caption: str


def all_of(facts: Facts) -> list[Section]:
    """The parts for which there are rows."""
    makers = (_rewards, _ages, _drift, _staleness, _lengths, _padding, _groups, _sizes)
    return [section for make in makers for section in make(facts)]


def _text(value: Any) -> str:
    return "unknown" if value is None else str(value) if value != "" else "not named"


def _two_places(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _sum(values: pl.Series) -> int:
    return sum(values.to_list())


def _range(step: int) -> Callable[[Any], str]:
    """How a version or a gap is written when so many are shown as one, named by the lowest."""
    return lambda low: _text(low) if low is None or step == 1 else f"{low} to {low + step - 1}"


def _legend(table: pl.DataFrame) -> pl.DataFrame:
    """The table with names of tasks that fit a legend; two that look alike are numbered."""
    seen: dict[str, str] = {}
    for task in table["task"].unique(maintain_order=True).to_list():
        name = cut(_text(task))
        seen[task] = name if name not in seen.values() else f"{name} ({len(seen) + 1})"
    return table.with_columns(pl.col("task").replace_strict(seen)) if seen else table


def _by_task(table: pl.DataFrame, index: str, value: str) -> tuple[pl.DataFrame, dict[str, str]]:
    """The value of each task in a column of its own: the table, and the columns by the tasks' names."""
    tasks = table["task"].unique(maintain_order=True).to_list()
    names = {task: f"task {i}" for i, task in enumerate(tasks)}  # a task may have any name
    wide = table.with_columns(pl.col("task").replace_strict(names)).pivot("task", index=index, values=value)
    return wide, names if len(tasks) > 1 else {}


def _rewards(facts: Facts) -> Iterator[Section]:
    tasks = facts.tasks.filter(pl.col("reward").is_not_null())
    if not len(tasks):
        return
    counts = tasks["rows"] - tasks["not_finite"]
    says = f"Mean reward {number(_sum(tasks['reward'] * counts) / _sum(counts))} of {_sum(counts):,} rows"
    known = facts.rewards.filter(pl.col("version_id").is_not_null() & pl.col("reward").is_not_null())
    if len(known) > 1:
        first, last = known.row(0, named=True), known.row(-1, named=True)
        at = _range(facts.version_step)
        says = (
            f"Mean reward {number(first['reward'])} at version {at(first['version_id'])}, "
            f"{number(last['reward'])} at version {at(last['version_id'])}"
        )
    columns = {
        "task": ("task", _text),
        "rows": ("rows", number),
        "mean": ("reward", number),
        "std": ("reward_std", number),
        "NaN": ("not_finite", number),
    }
    spread = charts.reward_histogram(facts.reward_histogram) if len(facts.reward_histogram) > 1 else None
    panels = [(spread, numbers(facts.tasks, columns))]
    if len(known) > 1:
        panels.insert(0, _rewards_by_version(facts))
    yield Section(
        "Reward",
        says,
        panels,
        f"Completed rows{', by the policy version they were started under' if len(known) > 1 else ''}. "
        "Rewards that are NaN or infinite are left out of the mean and counted beside it.",
    )


def _rewards_by_version(facts: Facts) -> tuple[dict[str, Any], str]:
    by_task = _legend(facts.rewards_by_task)
    wide, tasks = _by_task(by_task, "version_id", "reward")
    table = facts.rewards.join(wide, on="version_id", how="left", nulls_equal=True, maintain_order="left")
    columns = {
        "version": ("version_id", _range(facts.version_step)),
        "rows": ("rows", number),
        "mean": ("reward", number),
        "std": ("reward_std", number),
        **{task: (name, number) for task, name in tasks.items()},
        "NaN": ("not_finite", number),
    }
    return charts.rewards(by_task, facts.version_step), numbers(table, columns, last=True)


def _ages(facts: Facts) -> Iterator[Section]:
    if facts.at is None or facts.mean_gap is None:
        return
    columns = {
        "gap": ("gap", _range(facts.gap_step)),
        "rows": ("rows", number),
        "tokens": ("tokens", short),
        "mean reward": ("reward", number),
    }
    yield Section(
        "Version gaps",
        f"Mean gap {tokens(facts.mean_gap)} from version {facts.at}; {percent(facts.near)} of rows are "
        "within one version of it",
        [
            (
                charts.ages(facts.ages, facts.gap_step) if len(facts.ages) > 1 else None,
                numbers(facts.ages, columns),
            )
        ],
        "Version gap: the current version less that of the row's oldest token. Below 0: newer than the "
        "current one.",
    )


def _drift(facts: Facts) -> Iterator[Section]:
    known = facts.drift.filter(pl.col("drift_gap").is_not_null())
    if not len(known):
        return
    first, last = known.row(0, named=True), known.row(-1, named=True)
    at = _range(facts.gap_step)
    says = f"|log-ratio| is {number(first['abs_log_ratio'])} nats a token at gap {at(first['drift_gap'])}"
    if len(known) > 1:
        says += f", {number(last['abs_log_ratio'])} at gap {at(last['drift_gap'])}"
    gap = {"gap": ("drift_gap", at)}
    nats = {
        "tokens": ("tokens", short),
        "mean r": ("log_ratio", number),
        "mean |r|": ("abs_log_ratio", number),
        "max |r|": ("max_log_ratio", number),
        "k1": ("k1", number),
        "k2": ("k2", number),
        "k3": ("k3", number),
    }
    shares = {
        "rows": ("rows", number),
        "ESS / n, tokens": ("ess_tokens", percent),
        "ESS / n, rows": ("ess_rows", percent),
        "clipped below": ("clipped_low", percent),
        "above": ("clipped_high", percent),
    }
    step = facts.gap_step
    yield Section(
        "Off-policy drift",
        says,
        [
            (charts.drift(known, step) if len(known) > 1 else None, numbers(facts.drift, gap | nats)),
            (charts.ess(known, step) if len(known) > 1 else None, numbers(facts.drift, gap | shares)),
        ],
        "r = log_probs − behavior_log_probs of sampled tokens of completed rows, by the gap between the "
        "version that log_probs are of and the row's oldest. KL(behavior || current): k1 = −r, k2 = r²/2, "
        "k3 = eʳ − 1 − r (Schulman 2020). ESS / n = (Σw)² / (n Σw²), w = eʳ of a token, or of a row's sum. "
        f"Clipped: eʳ outside 1 ± {CLIP}. At gap 0 what is left is the mismatch of engine and trainer.",
    )


def _staleness(facts: Facts) -> Iterator[Section]:
    if facts.at is None or not len(facts.staleness):
        return
    says = "Every row is as fresh as can be"
    bitten = facts.staleness.filter(pl.col("share") < 1)
    if len(bitten):
        at = bitten.row(len(bitten) // 2, named=True)
        says = (
            f"max_staleness={at['max_staleness']} keeps {percent(at['share'])} of the rows: mean length "
            f"{tokens(at['kept_length'])} kept, {tokens(at['dropped_length'])} dropped"
        )
    by_task = _legend(facts.staleness_by_task)
    wide, tasks = _by_task(by_task, "max_staleness", "share")
    table = facts.staleness.join(wide, on="max_staleness", how="left", maintain_order="left")
    columns = {
        "gap ≤": ("max_staleness", _text),
        "kept": ("share", percent),
        **{task: (name, percent) for task, name in tasks.items()},
        "length kept": ("kept_length", tokens),
        "dropped": ("dropped_length", tokens),
    }
    yield Section(
        "What a staleness gate costs",
        says,
        [
            (
                charts.staleness(by_task, facts.gap_step) if len(facts.staleness) > 1 else None,
                numbers(table, columns),
            )
        ],
        "Completed rows with version gap ≤ max_staleness. Slow tasks and long responses go first: a task "
        "whose line is below the others is starved. Rows of an unknown version are never kept.",
    )


def _lengths(facts: Facts) -> Iterator[Section]:
    if not facts.tokens:
        return
    known = facts.lengths.filter(pl.col("version_id").is_not_null())
    at = _range(facts.version_step)
    off = _sum(facts.length_histogram.filter(pl.col("ended") == "cut off")["rows"])
    says = f"{percent(off / max(1, _sum(facts.lengths['rows'])))} of completed responses were cut off"
    if len(known) > 1:
        says += (
            f"; mean length {tokens(known['mean'][0])} at version {at(known['version_id'][0])}, "
            f"{tokens(known['mean'][-1])} at version {at(known['version_id'][-1])}"
        )
    bins = facts.length_histogram
    ends = bins.group_by("ended").agg(
        rows=pl.col("rows").sum(),
        shortest=pl.col("low").min(),
        below=pl.col("high").max(),
    )
    ends = ends.with_columns(share=pl.col("rows") / pl.col("rows").sum()).sort("rows", descending=True)
    ended = {
        "ended": ("ended", _text),
        "rows": ("rows", number),
        "share": ("share", percent),
        "from": ("shortest", tokens),
        "below": ("below", tokens),
    }
    table = facts.lengths.join(
        facts.outcomes.select("version_id", "truncated", "aborted"),
        on="version_id",
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    columns = {
        "version": ("version_id", at),
        "rows": ("rows", number),
        "mean": ("mean", tokens),
        "p50": ("p50", tokens),
        "p90": ("p90", tokens),
        "p99": ("p99", tokens),
        "max": ("longest", tokens),
        "cut off": ("truncated", percent),
        "aborted": ("aborted", percent),
    }
    yield Section(
        "Lengths and ends",
        says,
        [
            (
                charts.length_histogram(bins) if bins["low"].n_unique() > 1 else None,
                numbers(ends, ended),
            ),
            (
                charts.lengths(known, facts.version_step) if len(known) > 1 else None,
                numbers(table, columns, last=True),
            ),
        ],
        "Response tokens (all tokens where the split is not known). Lengths are of completed rows, "
        "shares of all rows of the version. Cut off: finish_reason length, or terminated false.",
    )


def _padding(facts: Facts) -> Iterator[Section]:
    if not len(facts.padding):
        return
    most, least = facts.padding["padding"].max(), facts.padding["padding"].min()
    columns = {
        "plan": ("plan", _text),
        "batches": ("batches", number),
        "tokens": ("tokens", tokens),
        "padding": ("padding", percent),
    }
    yield Section(
        "Padding",
        f"{percent(most)} of a padded batch is padding at worst, {percent(least)} at best"
        if most
        else "No batch of these plans has padding",
        [(charts.padding(facts.padding) if most else None, numbers(facts.padding, columns))],
        "Padding / padded size over an epoch of completed rows, each batch as wide as its longest row. "
        "Packed batches have none.",
    )


def _groups(facts: Facts) -> Iterator[Section]:
    judged = facts.groups.filter(pl.col("zero_variance").is_not_null())
    if not len(judged):
        return
    told = pl.col("responses").is_not_null()
    drawn = judged.filter(pl.col("reward_std").is_finite())  # that of rewards like 1e300 is not
    table = (
        judged.group_by("version")
        .agg(
            groups=pl.len().cast(pl.Int64),
            flat=pl.col("zero_variance").mean(),
            solved=(pl.col("zero_variance") & (pl.col("reward") > 0)).mean(),
            std=pl.col("reward_std").mean(),
            responses=pl.col("responses").sum() / pl.col("rows").filter(told).sum(),
        )
        .sort("version")
    )
    columns = {
        "version": ("version", _range(facts.version_step)),
        "groups": ("groups", number),
        "no signal": ("flat", percent),
        "no signal, reward > 0": ("solved", percent),
        "mean std": ("std", number),
        "different responses": ("responses", percent),
    }
    share = judged["zero_variance"].mean()
    yield Section(
        "Groups",
        f"{percent(share)} of {len(judged):,} groups have the same reward for all members",
        [
            (
                charts.groups(drawn) if len(drawn) else None,
                numbers(table, columns, last=True),
            )
        ],
        "Groups of two completed rows or more. No signal: the rewards differ by less than a billionth of the "
        "largest, so a group-relative advantage is 0. Version: of the group's oldest token.",
    )


def _sizes(facts: Facts) -> Iterator[Section]:
    total = sum(facts.bytes.values())
    unit, units = ("token", facts.tokens) if facts.tokens else ("row", facts.rows)
    table = pl.DataFrame(
        {
            "column": list(facts.bytes),
            "bytes": list(facts.bytes.values()),
            "share": [count / max(1, total) for count in facts.bytes.values()],
            "each": [count / max(1, units) for count in facts.bytes.values()],
        },
        {"column": pl.String, "bytes": pl.Int64, "share": pl.Float64, "each": pl.Float64},
    ).head(SHOWN_COLUMNS)
    if not len(table):
        return
    columns = {
        "column": ("column", _text),
        "bytes": ("bytes", number),
        "share": ("share", percent),
        f"bytes / {unit}": ("each", _two_places),
    }
    yield Section(
        "Bytes",
        f"{size(total)} on disk, {_two_places(total / max(1, units))} bytes a {unit}",
        [(charts.sizes(table), numbers(table, columns))],
        "Compressed bytes of the snapshot's Parquet files, by column, largest first.",
    )
