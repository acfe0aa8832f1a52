"""Owns version arithmetic on arrays: which version counts, freshness weights, fresh tokens; knows no steps.

Axis letters: N rows, K all tokens of the rows one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

GapOf = Literal["oldest", "start", "newest", "mean"]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

MEAN_VERSION = "__mean_version"
"""The derived scalar behind gap_of="mean"; `trajstore.selection.derived` makes it."""

VERSION_OF: Mapping[str, str] = {
    "oldest": "oldest_version_id",
    "start": "version_id",
    "newest": "newest_version_id",
    "mean": MEAN_VERSION,
}
"""Column of the version that each `gap_of` looks at."""


def freshness(gaps: Floats) -> Floats:
    """Sampling weights 1 / (gap + 1), [N] float64; 1 for rows newer than the trainer, 0 for unknown ones.

    Source of the formula: torchrl's StalenessAwareSampler.

    Args:
        gaps: [N] version gaps, NaN where the version is not known.
    """
    return np.nan_to_num(1.0 / (np.maximum(gaps, 0.0) + 1.0), nan=0.0)


def mean_versions(
    segments: pa.Array | pa.ChunkedArray, oldest: pa.Array | pa.ChunkedArray, newest: Any
) -> pa.Array:
    """Version of each row, averaged over the tokens of its segments, [N] float64.

    A row without segments whose oldest and newest version are the same has that one. Null otherwise: a span
    or a list of versions does not say how many tokens each produced.

    Args:
        segments: [N] lists of version segments, null where a row has none.
        oldest, newest: [N] int64, null where not known.
    """
    lists = segments.combine_chunks() if isinstance(segments, pa.ChunkedArray) else segments
    one = np.asarray(pc.equal(oldest, newest).fill_null(False))
    # Above 2^53 the nearest number that a float can be: versions may be nanoseconds.
    means = np.where(one, np.asarray(pc.cast(oldest, pa.float64(), safe=False).fill_null(np.nan)), np.nan)
    counts = np.asarray(pc.list_value_length(lists).fill_null(0)).astype(np.int64)
    has = counts > 0
    if has.any():
        flat = lists.flatten()
        start, end, version = _fields(flat)
        first = (np.cumsum(counts) - counts)[has]
        tokens = np.add.reduceat(end - start, first)
        # From the row's first version, so that large numbers lose no digit.
        base = version[first]
        steps = np.add.reduceat((version - np.repeat(base, counts[has])) * (end - start), first)
        with np.errstate(invalid="ignore"):
            means[has] = base + steps / tokens  # segments without any token say nothing: NaN
    return pa.array(means, mask=np.isnan(means))


def fresh_tokens(
    lengths: Int64s,
    segments: pa.Array | pa.ChunkedArray,
    oldest: pa.Array | pa.ChunkedArray,
    at: int,
    max_staleness: int,
) -> NDArray[np.int8]:
    """Which tokens may be trained on, [K] int8: 1 where the version gap is at most `max_staleness`.

    Each token of a segment goes by the segment's version. Tokens of no segment (prompt, tool output) have no
    version and stay. A row without segments goes by its oldest version, whole: versions without
    boundaries are not spread over tokens by guess. A row of unknown version is never fresh.

    Args:
        lengths: [N] tokens of each row.
        segments: [N] lists of version segments, null where a row has none.
        oldest: [N] int64, oldest version, null where not known.
        at: the trainer's policy version.
        max_staleness: largest gap that stays.
    """
    lists = segments.combine_chunks() if isinstance(segments, pa.ChunkedArray) else segments
    counts = np.asarray(pc.list_value_length(lists).fill_null(0)).astype(np.int64)
    known, version = np.asarray(pc.is_valid(oldest)), np.asarray(pc.fill_null(oldest, 0))
    whole = (known & (at - version <= max_staleness)) | (counts > 0)
    out = np.repeat(whole, lengths).astype(np.int8)
    flat = lists.flatten()
    if len(flat):
        begins = np.repeat(np.cumsum(lengths) - lengths, counts)
        start, end, version = _fields(flat)
        stale = np.nonzero(at - version > max_staleness)[0]
        # +1 where a stale segment opens, -1 where it closes: inside, the running sum is above 0.
        edges = np.zeros(len(out) + 1, np.int64)
        np.add.at(edges, (begins + start)[stale], 1)
        np.add.at(edges, (begins + end)[stale], -1)
        out[np.cumsum(edges[:-1]) > 0] = 0
    return out


def _fields(segments: pa.StructArray) -> tuple[Int64s, Int64s, Int64s]:
    """Start, end and version of each segment."""
    names = ("start", "end", "version_id")
    start, end, version = (segments.field(name).to_numpy().astype(np.int64) for name in names)
    return start, end, version
