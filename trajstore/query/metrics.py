"""Owns the numbers one asks of logged rollouts, reduced from a survey's frame; reads and judges nothing.

Every function takes a polars frame with one row a trajectory (`trajstore.query.survey`) and gives a frame
with one row a group, or a number. A reward that is NaN or infinite is left out of means and counted beside
them.

Log-ratio of a token: r = log_probs - behavior_log_probs, over tokens the policy sampled. Its expectation is
over the behavior policy b, and log_probs are of the current policy p. Sources of the formulas:

- KL(b || p) by k1 = -r, k2 = r^2 / 2, k3 = exp(r) - 1 - r: J. Schulman, "Approximating KL divergence",
  2020. k1 is unbiased and noisy, k2 biased with little noise, k3 unbiased and never negative.
- Effective sample size over n: (sum w)^2 / (n sum w^2): A. Kong, "A note on importance sampling using
  standardized weights", 1992. Of tokens w = exp(r); of rows w = exp(sum of r over the row), the weight of
  exact importance sampling.
- Clip fraction: share of tokens whose ratio exp(r) is outside 1 ± `measures.CLIP`: Schulman et al., "Proximal
  policy optimization algorithms", 2017.
- Group advantage: (reward - mean) / std within a group: Shao et al., "DeepSeekMath" (GRPO), 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SAME = 1e-9
"""Rewards of a group are the same when they differ by less than this times the largest of them: the standard
deviation of three times 0.1 is 1.7e-17 in one engine and 0 in another."""


def ages(frame: pl.DataFrame, by: Sequence[str] = ("gap",)) -> pl.DataFrame:
    """Rows, tokens and rewards at each version gap (or whatever `by` names); null is not known.

    Returns:
        by..., rows, tokens, reward (mean of the finite ones), reward_std, not_finite (rewards).
    """
    return frame.group_by(by).agg(rows=_count(), tokens=pl.col("length").sum(), **_rewards()).sort(by)


def _count() -> pl.Expr:
    return pl.len().cast(pl.Int64)  # unsigned counts wrap when they are subtracted


def _rewards() -> dict[str, pl.Expr]:
    known = pl.col("reward").filter(pl.col("reward").is_finite())
    return {
        "reward": known.mean(),
        "reward_std": known.std(),
        "not_finite": (~pl.col("reward").is_finite()).sum().cast(pl.Int64),
    }


def rewards(frame: pl.DataFrame) -> pl.DataFrame:
    """Rewards of each task at each version a row was started under: task, version_id and as `ages`."""
    return ages(frame, ("task", "version_id"))


def drift(frame: pl.DataFrame, by: str = "drift_gap") -> pl.DataFrame:
    """How far the current policy is from the one that sampled, at each version gap.

    Only rows with both kinds of log-probs take part. A row whose log_probs do not say of which version they
    are counts as of the current one.

    Returns:
        by, rows, tokens; log_ratio, abs_log_ratio, max_log_ratio (mean, mean absolute and largest absolute,
        nats a token); k1, k2, k3 (KL, nats a token); ratio (mean importance ratio); ess_tokens, ess_rows
        (over n); clipped_low, clipped_high (shares of the tokens).
    """
    n = pl.col("ratio_tokens").sum()
    w, w2 = _log_sum_exp(pl.col("log_weight")), _log_sum_exp(pl.col("log_weight_squared"))
    s = pl.col("log_ratio_sum")
    out = (
        frame.filter(pl.col("ratio_tokens") > 0)
        .group_by(by)
        .agg(
            rows=_count(),
            tokens=n,
            log_ratio=s.sum() / n,
            abs_log_ratio=pl.col("log_ratio_abs").sum() / n,
            max_log_ratio=pl.col("log_ratio_max").max(),
            k1=-s.sum() / n,
            k2=pl.col("k2_sum").sum() / n,
            k3=pl.col("k3_sum").sum() / n,
            ratio=(w - n.log()).exp(),
            ess_tokens=(2 * w - w2 - n.log()).exp(),
            ess_rows=(2 * _log_sum_exp(s) - _log_sum_exp(2 * s) - pl.len().log()).exp(),
            clipped_low=pl.col("clipped_low").sum() / n,
            clipped_high=pl.col("clipped_high").sum() / n,
        )
    )
    return out.sort(by)


def _log_sum_exp(x: pl.Expr) -> pl.Expr:
    top = x.max()
    return (x - top).exp().sum().log() + top


def ess(log_weights: Floats) -> float:
    """Effective sample size over n of weights given by their logarithms; NaN when there are none."""
    if not len(log_weights):
        return float("nan")
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def groups(frame: pl.DataFrame) -> pl.DataFrame:
    """Each group of the frame (usually of completed rows), in the order of its first row.

    Returns:
        group_id, task, version (the oldest of its members), rows, group_size (as meant), reward (mean),
        reward_std (sample standard deviation, exactly 0 when the rewards are the same to `SAME`),
        zero_variance (of the finite ones; null when fewer than two are), responses (different ones, null
        when no token is known), prompts (different ones), not_finite.
    """
    finite = pl.col("reward").filter(pl.col("reward").is_finite())
    low, high = finite.min(), finite.max()
    judged = finite.len() > 1
    same = (high - low) <= SAME * pl.max_horizontal(low.abs(), high.abs())
    known = [pl.col(c) for c in ("response_hash", "prompt_hash") if c in frame.columns]
    has_tokens = pl.col("length").max() > 0
    names = {"response_hash": "responses", "prompt_hash": "prompts"}
    distinct = {
        names[c.meta.output_name()]: pl.when(has_tokens).then(c.n_unique().cast(pl.Int64)) for c in known
    }
    out = (
        frame.filter(pl.col("group_id").is_not_null())
        .group_by("group_id", maintain_order=True)
        .agg(
            task=pl.col("task").first(),
            version=pl.col("oldest_version_id").min(),
            rows=_count(),
            group_size=pl.col("group_size").max(),
            zero_variance=pl.when(judged).then(same),
            **_rewards(),
            **distinct,
        )
    )
    return out.with_columns(reward_std=pl.when("zero_variance").then(0.0).otherwise("reward_std"))


def advantages(frame: pl.DataFrame) -> Floats:
    """Group-relative advantage of each row, [N]: (reward - mean) / std, all 0 in a group of zero variance.

    NaN for a row whose reward is not finite, that has no group, or whose group has no other finite reward.
    """
    of = groups(frame).select("group_id", "zero_variance", mean="reward", std="reward_std")
    joined = frame.select("group_id", "reward").join(of, on="group_id", how="left", maintain_order="left")
    value = (
        pl.when(~pl.col("reward").is_finite())
        .then(float("nan"))
        .when("zero_variance")
        .then(0.0)
        .when(pl.col("zero_variance").is_not_null())
        .then((pl.col("reward") - pl.col("mean")) / pl.col("std"))
        .otherwise(float("nan"))
    )
    return joined.select(value.alias("advantage"))["advantage"].to_numpy()


def outcomes(frame: pl.DataFrame, by: str = "version_id") -> pl.DataFrame:
    """How generations ended: by, rows, and the shares completed, truncated, aborted, failed.

    Truncated rows are completed ones that the engine cut off: finish_reason "length", or terminated false.
    """
    status = pl.col("status")
    return (
        frame.group_by(by)
        .agg(
            rows=_count(),
            completed=(status == "completed").mean(),
            truncated=is_truncated().mean(),
            aborted=(status == "aborted").mean(),
            failed=(status == "failed").mean(),
        )
        .sort(by)
    )


def is_truncated() -> pl.Expr:
    """Whether a completed row was cut off by a limit; false where nothing says so."""
    cut = (pl.col("finish_reason") == "length").fill_null(False) | ~pl.col("terminated").fill_null(True)
    return (pl.col("status") == "completed") & cut


def lengths(frame: pl.DataFrame, by: str = "version_id") -> pl.DataFrame:
    """Response lengths (total where the split is not known): by, rows, mean, p50, p90, p99, longest."""
    length = pl.coalesce("response_length", "length")
    return (
        frame.group_by(by)
        .agg(
            rows=_count(),
            mean=length.mean(),
            p50=length.quantile(0.5, "nearest"),
            p90=length.quantile(0.9, "nearest"),
            p99=length.quantile(0.99, "nearest"),
            longest=length.max(),
        )
        .sort(by)
    )


def staleness(frame: pl.DataFrame, by: str = "task") -> pl.DataFrame:
    """What a gate `gap <= max_staleness` keeps of each task, at every max_staleness that makes a difference.

    Rows without a known version are never kept; negative gaps always are.

    Returns:
        by, max_staleness, rows (kept), share (of the task's rows), kept_length, dropped_length (mean tokens).
    """
    gaps = frame["gap"].drop_nulls().unique().to_list()
    steps = pl.DataFrame(
        {"max_staleness": sorted({0, *(g for g in gaps if g > 0)})}, {"max_staleness": pl.Int64}
    )
    per_gap = frame.group_by(by, "gap").agg(rows=_count(), tokens=pl.col("length").sum())
    kept = (pl.col("gap") <= pl.col("max_staleness")).fill_null(False)
    n, t = pl.col("rows"), pl.col("tokens")
    return (
        per_gap.join(steps, how="cross")
        .group_by(by, "max_staleness")
        .agg(
            rows=n.filter(kept).sum(),
            share=n.filter(kept).sum() / n.sum(),
            kept_length=t.filter(kept).sum() / n.filter(kept).sum(),
            dropped_length=t.filter(~kept).sum() / n.filter(~kept).sum(),
        )
        .sort(by, "max_staleness")
    )
