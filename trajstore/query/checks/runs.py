"""Owns the checks of a run as a whole: versions, writers, drift, groups, lengths; reads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from trajstore.query import metrics
from trajstore.query.checks.finding import Check, Finding, found, where
from trajstore.query.survey import Survey

MISMATCH_NATS = 0.05
"""Mean |log-ratio| at gap 0 above which engine and trainer disagree; about 0.01 is usual in bf16."""

MISMATCH_KL = 1e-2
"""k3 at gap 0 above which they do."""

SERVER_LAG = 3
"""Policy versions that a writer may be behind what others wrote before."""

MANY = 0.2
"""Share of rows or groups from which a note becomes a warning."""

GROWTH = 1.5
"""Ratio of mean response lengths, last versions to first, that is told."""

LOW_ESS = 0.1
"""Effective sample size over n below which importance weights rest on a few rows."""

ENOUGH = 32
"""Rows from which a ratio, a share or a trend says anything."""

BATCH = 2**32
"""writer_seq is batch_no * BATCH + position (DESIGN §3)."""


def _counted(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'s' if n != 1 else ''}"


def _most(values: pl.Series) -> int:
    """The largest, 0 when there is none."""
    return max(values.drop_nulls().to_list(), default=0)


# Policy versions and writers


def negative_gaps(survey: Survey) -> Iterator[Finding]:
    """Rows newer than the trainer."""
    rows = where(survey, pl.col("gap") < 0)
    yield from found(
        "warning",
        "negative-gap",
        rows,
        f"{{n}}: newer than the current version {survey.at}, by {_most(-rows['gap'])} at most",
        "the current version is wrong, or the trainer went back to a checkpoint and left their policy",
    )


def unknown_versions(survey: Survey) -> Iterator[Finding]:
    """Rows that no staleness gate lets through."""
    rows = where(survey, pl.col("oldest_version_id").is_null())
    yield from found(
        "note" if len(rows) == len(survey) else "warning",
        "unknown-version",
        rows,
        "{n}: policy version not known",
        "staleness gates drop them: log the version when a response is sampled",
    )


def vague_versions(survey: Survey) -> Iterator[Finding]:
    """Rows of several versions that do not say which token is whose."""
    mixed = pl.col("newest_version_id") > pl.col("oldest_version_id")
    yield from found(
        "note",
        "no-version-boundaries",
        where(survey, mixed & (pl.col("version_known") != "exact")),
        "{n}: sampled by several policy versions, and which token is whose is not known",
        "only the row as a whole can be called stale: log version_segments",
    )


def mixed_versions(survey: Survey) -> Iterator[Finding]:
    """Rows whose tokens are of several versions."""
    rows = where(survey, pl.col("newest_version_id") > pl.col("oldest_version_id"))
    spread = _most(rows["newest_version_id"] - rows["oldest_version_id"])
    yield from found(
        "note",
        "mixed-versions",
        rows,
        f"{{n}}: their tokens are of several policy versions, {spread} apart at most",
        "gates go by the oldest token; mask stale tokens out of the loss to keep the rest",
    )


def version_backwards(survey: Survey) -> Iterator[Finding]:
    """A writer whose batches go back to an earlier version: in its own order, never that of clocks."""
    batch = pl.col("writer_seq") // BATCH
    newest = pl.col("newest_version_id")
    batches = (
        survey.frame.filter(newest.is_not_null())
        .group_by("writer_id", batch.alias("batch"))
        .agg(newest=newest.max())
        .sort("writer_id", "batch")
        .with_columns(before=pl.col("newest").cum_max().shift(1).over("writer_id"))
        .filter(pl.col("newest") < pl.col("before"))
    )
    rows = survey.frame.with_columns(batch=batch).join(
        batches.select("writer_id", "batch"), on=("writer_id", "batch"), how="semi", maintain_order="left"
    )
    back = _most(batches["before"] - batches["newest"])
    writers = batches["writer_id"].n_unique()
    yield from found(
        "warning",
        "version-backwards",
        rows,
        f"{{n}} of {_counted(writers, 'writer')}: older, by {back} versions at most, than what the same "
        "writer wrote before",
        "a run that went back to a checkpoint reuses version numbers for other weights: give it a source or "
        "versions of its own; rows that merely arrive late are harmless",
    )


def stale_server(survey: Survey) -> Iterator[Finding]:
    """A writer whose last rows are far behind what others had written by then."""
    newest = pl.col("newest_version_id")
    seen = survey.frame.filter(newest.is_not_null()).with_columns(batch=pl.col("writer_seq") // BATCH)
    if seen["writer_id"].n_unique() < 2:
        return
    # What the store held before a row, in order of arrival; a writer's own rows change nothing for it.
    seen = seen.with_columns(lag=newest.cum_max().shift(1).fill_null(newest) - newest)
    last = (
        seen.group_by("writer_id", "batch", maintain_order=True)
        .agg(lag=pl.col("lag").min())
        .group_by("writer_id", maintain_order=True)
        .agg(lag=pl.col("lag").last(), batch=pl.col("batch").last())
        .filter(pl.col("lag") >= SERVER_LAG)
    )
    rows = seen.join(
        last.select("writer_id", "batch"), on=("writer_id", "batch"), how="semi", maintain_order="left"
    )
    names = ", ".join(last["writer_id"].head(3).to_list())
    yield from found(
        "warning",
        "stale-server",
        rows,
        f"{{n}}: the last batch of {_counted(len(last), 'writer')} ({names}) is "
        f"{_most(last['lag'])} versions behind what others had written before",
        "its engine missed a weight update, or its rollouts take too long: look at it, or gate by staleness",
    )


def starved_tasks(survey: Survey) -> Iterator[Finding]:
    """Tasks that only have old rows: a staleness gate would take them away as a whole."""
    done = survey.finished.filter(pl.col("gap").is_not_null())
    if done["task"].n_unique() < 2:
        return
    least = done.group_by("task", maintain_order=True).agg(least=pl.col("gap").min(), rows=pl.len())
    typical = int(np.median(done["gap"].to_numpy()))
    late = least.filter((pl.col("least") > typical) & (pl.col("rows") >= ENOUGH))
    rows = done.join(late.select("task"), on="task", how="semi", maintain_order="left")
    names = ", ".join(f"{task} (at least {gap})" for task, gap, _ in late.head(3).iter_rows())
    yield from found(
        "warning",
        "starved-task",
        rows,
        f"{{n}} of {_counted(len(late), 'task')} by {survey.by}, all staler than the median gap "
        f"{typical}: {names}",
        "slow tasks are dropped first by a staleness gate, which biases what is learnt: see `trajstore plan`",
    )


# Drift


def _recorded() -> pl.Expr:
    """Rows whose behavior log-probs are log-probs: those that are not have an error of their own."""
    return (pl.col("behavior_positive") == 0) & (pl.col("behavior_zero") < pl.col("actions"))


def engine_mismatch(survey: Survey) -> Iterator[Finding]:
    """The same weights give other log-probs in the engine and in the trainer."""
    rows = where(
        survey,
        (pl.col("drift_gap") == 0)
        & (pl.col("ratio_tokens") > 0)
        & (pl.col("newest_version_id") == pl.col("oldest_version_id"))
        & pl.col("log_probs_version").is_not_null()
        & _recorded(),
    )
    if len(rows) < ENOUGH:
        return
    (at_zero,) = metrics.drift(rows).iter_rows(named=True)
    nats, kl = at_zero["abs_log_ratio"], at_zero["k3"]
    if nats > MISMATCH_NATS or kl > MISMATCH_KL:
        yield from found(
            "warning",
            "engine-mismatch",
            rows,
            f"{{n}} at gap 0: log-probs of trainer and engine differ by {nats:.3f} nats a token "
            f"(k3 {kl:.2g}) under the same version",
            "kernels, precision, sampling temperature or the weight copy differ: correct by truncated "
            "importance ratios, and look for the cause",
        )


def low_ess(survey: Survey) -> Iterator[Finding]:
    """Importance weights that rest on a few tokens."""
    done = survey.finished.filter(_recorded())
    drift = metrics.drift(done).filter(
        pl.col("drift_gap").is_not_null() & (pl.col("rows") >= ENOUGH) & (pl.col("ess_tokens") < LOW_ESS)
    )
    rows = done.filter(pl.col("ratio_tokens") > 0).join(
        drift.select("drift_gap"), on="drift_gap", how="semi", maintain_order="left"
    )
    shares = ", ".join(f"{ess:.1%} at gap {gap}" for gap, ess in drift["drift_gap", "ess_tokens"].iter_rows())
    yield from found(
        "warning",
        "low-ess",
        rows,
        f"{{n}}: effective sample size of their tokens is {shares}",
        "a few tokens carry the importance weights: truncate the ratios, or lower max_staleness",
    )


# Groups


def group_of_one(survey: Survey) -> Iterator[Finding]:
    """Rows alone in their group, unless group_size says that this is how it should be."""
    of = metrics.groups(survey.finished)
    others = (of["rows"] > 1).any() or (of["group_size"] > 1).any()
    yield from found(
        "warning" if others else "note",
        "group-of-one",
        _members(survey, of.filter((pl.col("rows") == 1) & (pl.col("group_size") != 1).fill_null(True))),
        "{n}: alone in their group among completed rows",
        "a group-relative advantage is 0 or undefined there: "
        + (
            "read whole groups (whole_groups=True)" if others else "give all answers to a prompt one group_id"
        ),
    )


def incomplete_groups(survey: Survey) -> Iterator[Finding]:
    """Groups with fewer completed rows than they were meant to have, or more."""
    of = metrics.groups(survey.finished)
    short = of.filter((pl.col("rows") > 1) & (pl.col("rows") < pl.col("group_size")))
    yield from found(
        "note",
        "incomplete-group",
        _members(survey, short),
        f"{{n}} in {_counted(len(short), 'group')} with fewer completed rows than group_size says",
        "still in flight, aborted, or lost: read whole groups (whole_groups=True)",
    )
    over = of.filter(pl.col("rows") > pl.col("group_size"))
    yield from found(
        "warning",
        "oversized-group",
        _members(survey, over),
        f"{{n}} in {_counted(len(over), 'group')} with more completed rows than group_size says",
        "appended twice, or one group_id for several prompts: give writer_id and batch_no to append",
    )


def mixed_prompts(survey: Survey) -> Iterator[Finding]:
    """Groups whose members answer different prompts."""
    split = survey.finished.filter(pl.col("prompt_length").is_not_null() & (pl.col("length") > 0))
    mixed = metrics.groups(split).filter(pl.col("prompts") > 1)
    yield from found(
        "warning",
        "mixed-prompts",
        _members(survey, mixed),
        f"{{n}} in {_counted(len(mixed), 'group')} whose members have different prompts",
        "a group's mean is a baseline for one prompt: give each prompt its own group_id",
    )


def zero_variance(survey: Survey) -> Iterator[Finding]:
    """Groups in which every reward is the same."""
    judged = metrics.groups(survey.finished).filter(pl.col("zero_variance").is_not_null())
    flat = judged.filter("zero_variance")
    share = len(flat) / len(judged) if len(judged) else 0.0
    yield from found(
        "warning" if share > MANY and len(judged) >= ENOUGH else "note",
        "zero-variance-group",
        _members(survey, flat),
        f"{{n}} in {len(flat):,} of {len(judged):,} groups ({share:.0%}) whose rewards are all the same",
        "they give no gradient: drop whole groups, or sample harder and easier prompts",
    )


def _members(survey: Survey, groups: pl.DataFrame) -> pl.DataFrame:
    return survey.finished.join(groups.select("group_id"), on="group_id", how="semi", maintain_order="left")


# Repetition, ends and lengths


def duplicate_ids(survey: Survey) -> Iterator[Finding]:
    """Rows of one name."""
    yield from found(
        "warning",
        "duplicate-id",
        where(survey, pl.col("id").is_duplicated()),
        "{n} share their id with another row",
        "appended twice without writer_id and batch_no, most likely: delete all but one",
    )


def duplicate_responses(survey: Survey) -> Iterator[Finding]:
    """Rows of a group with the same response, token for token."""
    done = survey.finished.filter(
        pl.col("group_id").is_not_null() & (pl.coalesce("response_length", "length") > 0)
    )
    key = pl.struct("group_id", "prompt_hash", "response_hash")
    rows = done.filter(key.is_duplicated() & ~key.is_first_distinct())
    share = len(rows) / len(done) if len(done) else 0.0
    yield from found(
        "warning" if share > MANY and len(done) >= ENOUGH else "note",
        "duplicate-response",
        rows,
        f"{{n}} ({share:.0%} of completed rows) repeat a response of their group token for token",
        "the policy has little entropy there, or rows were appended twice",
    )


def truncated(survey: Survey) -> Iterator[Finding]:
    """Completed rows that a limit cut off."""
    rows = survey.frame.filter(metrics.is_truncated())
    share = len(rows) / max(1, len(survey.finished))
    yield from found(
        "warning" if share > MANY and len(rows) >= ENOUGH else "note",
        "truncated",
        rows,
        f"{{n}} ({share:.0%} of completed rows) were cut off by a limit",
        "their reward is of an unfinished answer: raise the limit, or mask them out of the loss",
    )


def not_completed(survey: Survey) -> Iterator[Finding]:
    """Rows that are not completed: aborted, failed, pending, generating."""
    rows = where(survey, pl.col("status") != "completed")
    by = rows.group_by("status").len().sort("len", "status", descending=(True, False))
    shares = ", ".join(f"{count:,} {status}" for status, count in by.iter_rows())
    failed = rows.filter(pl.col("status") == "failed")
    yield from found(
        "warning" if len(failed) > MANY * len(survey) else "note",
        "not-completed",
        rows,
        f"{{n}} ({len(rows) / max(1, len(survey)):.0%}) are not completed: {shares}",
        "train on where=\"status = 'completed'\"; aborted ones can be continued",
    )


def length_growth(survey: Survey) -> Iterator[Finding]:
    """Responses that grow from version to version."""
    done = survey.finished.filter(pl.col("version_id").is_not_null())
    by = metrics.lengths(done).filter(pl.col("rows") >= ENOUGH)
    if len(by) < 2:
        return
    first, last = by["mean"][0], by["mean"][-1]
    if first and last / first >= GROWTH:
        yield from found(
            "note",
            "length-growth",
            done.filter(pl.col("version_id") == by["version_id"][-1]),
            f"{{n}} of version {by['version_id'][-1]}: responses are {last / first:.1f} times as long as "
            f"those of version {by['version_id'][0]} ({first:,.0f} to {last:,.0f} tokens)",
            "check that reward does not pay for length, and that limits and token budgets still fit",
        )


CHECKS: Sequence[Check] = (
    negative_gaps,
    unknown_versions,
    vague_versions,
    mixed_versions,
    version_backwards,
    stale_server,
    starved_tasks,
    engine_mismatch,
    low_ess,
    group_of_one,
    incomplete_groups,
    mixed_prompts,
    zero_variance,
    duplicate_ids,
    duplicate_responses,
    truncated,
    not_completed,
    length_growth,
)
