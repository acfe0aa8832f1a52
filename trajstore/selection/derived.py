"""Owns scalars that steps may ask for and no file stores: what they are made from, and how; reads nothing.

Their names start with two underscores: they are no columns of the table, and no predicate names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from trajstore.selection.versions import MEAN_VERSION, mean_versions

if TYPE_CHECKING:
    import polars as pl

MASK_KNOWN = "__mask_known"
SUPERSEDED = "__superseded"
GROUP_MEMBERS = "__group_members"


@dataclass(frozen=True)
class PerRow:
    """A scalar of one row, so that it can be kept for each immutable file.

    Attributes:
        sources: columns it is made from; here a list column may be one, and only here.
        compute: rows of the sources → one value a row.
        always: an integer column; where a file has no null of it, the value is true and no source is read.
    """

    sources: tuple[str, ...]
    compute: Callable[[pa.Table], pa.Array]
    always: str | None = None


@dataclass(frozen=True)
class PerSnapshot:
    """A scalar that takes all rows of the snapshot to know, whatever the steps before have dropped."""

    sources: tuple[str, ...]
    compute: Callable[[pl.DataFrame], pl.Series]


def _mean_version(rows: pa.Table) -> pa.Array:
    return mean_versions(
        rows["version_segments"],
        rows["oldest_version_id"].combine_chunks(),
        rows["newest_version_id"].combine_chunks(),
    )


def _mask_known(rows: pa.Table) -> pa.Array:
    return pc.or_(pc.is_valid(rows["loss_mask"]), pc.is_valid(rows["prompt_length"])).combine_chunks()


def superseded(frame: pl.DataFrame) -> pl.Series:
    """Rows that another row continues, by `id` and `parent_id`."""
    import polars as pl

    parents = frame["parent_id"].drop_nulls().unique()
    if not len(parents):
        return pl.repeat(False, len(frame), dtype=pl.Boolean, eager=True)
    return frame["id"].is_in(parents.implode())


def is_member(frame: pl.DataFrame) -> pl.Series:
    """Rows that count as members of their group: completed, and not superseded by a continuation."""
    return (frame["status"] == "completed") & ~frame[SUPERSEDED]


def _group_members(frame: pl.DataFrame) -> pl.Series:
    """How many counted members the row's group has; 0 for a row without a group."""
    import polars as pl

    counted = frame.select("group_id", is_member(frame).cast(pl.Int64).alias("n"))
    return counted.select(
        pl.when(pl.col("group_id").is_null()).then(0).otherwise(pl.col("n").sum().over("group_id")).alias("n")
    )["n"]


PER_ROW: Mapping[str, PerRow] = {
    MEAN_VERSION: PerRow(("version_segments", "oldest_version_id", "newest_version_id"), _mean_version),
    MASK_KNOWN: PerRow(("loss_mask", "prompt_length"), _mask_known, always="prompt_length"),
}

PER_SNAPSHOT: Mapping[str, PerSnapshot] = {
    SUPERSEDED: PerSnapshot(("id", "parent_id"), superseded),
    GROUP_MEMBERS: PerSnapshot(("group_id", "status", SUPERSEDED), _group_members),
}
"""In the order in which they are made."""
