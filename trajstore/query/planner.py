"""Owns what-if questions about batches: from logged lengths, versions and groups alone; makes no batch."""

from __future__ import annotations

import polars as pl

from trajstore import plan

BATCH_ROWS = 32
BUCKETS = 8


def paddings(frame: pl.DataFrame, batch_rows: int = BATCH_ROWS, buckets: int = BUCKETS) -> pl.DataFrame:
    lengths = frame["length"].to_numpy()
    plans = {
        "row order": plan.batches(lengths, batch_rows),
        f"{buckets} length buckets": plan.batches(lengths, batch_rows, bucket_window=buckets),
        "sorted by length": plan.batches(lengths, batch_rows, bucket_window=max(1, len(lengths))),
    }
    return pl.DataFrame(
        [
            {"plan": name, "batches": len(b), "padding": plan.padding_ratio(lengths, b)}
            for name, b in plans.items()
        ],
        {"plan": pl.String, "batches": pl.Int64, "padding": pl.Float64},
    )
