"""Owns the polars namespace `traj`: the SQL macros under the same names, as expressions; reads no rows.

    pl.col("log_probs").traj.kl_k3(pl.col("behavior_log_probs"))

Importing this module registers the namespace; `import trajstore.query` does so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from trajstore.trajectory import PolicyVersion, version_number


@pl.api.register_expr_namespace("traj")
class Traj:
    """Metrics on the expression it is called on; formulas and their sources are those of sql/macros.sql.

    A result has the name of what it is called on, as polars' own expressions do.
    """

    def __init__(self, expression: pl.Expr) -> None:
        self._self = expression

    def version_gap(self, current_version: PolicyVersion | int) -> pl.Expr:
        """Of versions: current version minus version, int64; negative where newer than the trainer."""
        return -self._self.cast(pl.Int64) + version_number(current_version)

    def padding_ratio(self) -> pl.Expr:
        """Aggregate of lengths: padding / padded size when these rows are one batch; null without tokens."""
        lengths = self._self.cast(pl.Float64)
        size = lengths.count() * lengths.max()
        return -(lengths.sum() / pl.when(size != 0).then(size)) + 1

    def log_ratio(self, behavior_log_probs: Any) -> pl.Expr:
        """Of trainer log-probs: log p - log q, float64, with q the behaviour policy."""
        return self._self.cast(pl.Float64) - _column(behavior_log_probs).cast(pl.Float64)

    def importance_ratio(self, behavior_log_probs: Any) -> pl.Expr:
        """Of trainer log-probs: p / q."""
        return self.log_ratio(behavior_log_probs).exp()

    def truncated_importance_ratio(self, behavior_log_probs: Any, cap: float) -> pl.Expr:
        """The same, at most `cap`; NaN stays NaN."""
        ratio = self.importance_ratio(behavior_log_probs)
        return pl.when(ratio.is_nan()).then(ratio).when(ratio > cap).then(float(cap)).otherwise(ratio)

    def kl_k1(self, behavior_log_probs: Any) -> pl.Expr:
        """Of trainer log-probs: -log r, unbiased for KL(q || p), may be negative."""
        return -self.log_ratio(behavior_log_probs)

    def kl_k2(self, behavior_log_probs: Any) -> pl.Expr:
        """Of trainer log-probs: (log r)² / 2, biased, of low variance."""
        return self.log_ratio(behavior_log_probs) ** 2 * 0.5

    def kl_k3(self, behavior_log_probs: Any) -> pl.Expr:
        """Of trainer log-probs: r - 1 - log r, unbiased and never negative."""
        log_ratio = self.log_ratio(behavior_log_probs)
        return log_ratio.exp() - 1 - log_ratio

    def ess(self) -> pl.Expr:
        """Aggregate of weights: effective sample size (Σw)² / Σw²; null when all are 0."""
        weights = self._self.cast(pl.Float64)
        squares = (weights**2).sum()
        return weights.sum() ** 2 / pl.when(squares != 0).then(squares)

    def pass_at_k(self, passed: Any, k: int) -> pl.Expr:
        """Of group sizes: chance that one of k samples passes, unbiased; null where k is above the size.

        Args:
            passed: how many of the group passed.
            k: samples.
        """
        # The struct is named after its first field: after what it is called on.
        return pl.struct(self._self, _column(passed).alias(_PASSED)).map_batches(
            lambda rows: _pass_at_k(rows, k), return_dtype=pl.Float64, is_elementwise=True
        )


_PASSED = "__passed"


def _pass_at_k(rows: pl.Series, k: int) -> pl.Series:
    columns = rows.struct.unnest().get_columns()
    n, c = (column.cast(pl.Float64).fill_null(np.nan).to_numpy() for column in columns)
    failed = np.ones(len(n))
    with np.errstate(invalid="ignore", divide="ignore"):
        for i in range(max(k, 0)):  # C(n - c, k) / C(n, k), a factor at a time: no factorial is needed
            failed *= np.maximum(n - c - i, 0) / (n - i)
        known = (n >= k) & (k >= 1) & (c >= 0)
    return pl.Series("pass_at_k", np.where(known, 1 - failed, np.nan)).fill_nan(None)


def _column(value: Any) -> pl.Expr:
    return pl.col(value) if isinstance(value, str) else value
