"""Owns trajstore's own columns as Parquet (an export for `datasets`, a copied data file) → trajectories.

A row is read as a store would give it back; columns that are not the row's go to metadata. Like all importers
it knows no Arrow: rows come as plain values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trajstore.importers.head import Format, Head
from trajstore.importers.records import Imported, ImportOptions
from trajstore.importers.rows import Origin, convert, plain
from trajstore.importers.tables import read_parquet
from trajstore.schema import BY_NAME, TOKEN_FLOATS, TOKEN_MASKS
from trajstore.trajectory import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryStatus,
    VersionSegment,
)

_SAME = (
    *("id", "group_id", "group_size", "prompt", "response", "log_probs_version", "bootstrap_value", "reward"),
    *("version_known", "finish_reason", "terminated", "generation_time_ms", "parent_id", "source"),
    "tokens_retokenized",
)
_MARKS = ("id", "tokens", "length", "id_hash", "version_known", "status")


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """trajstore's own columns as Parquet: what `trajstore export --as hf` writes, or a copied data file."""
    origin = Origin.of("trajstore-parquet", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        return [_trajectory(data)]

    yield from convert(read_parquet(path), origin, options, build)


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    known = row["prompt_length"] is not None
    given: dict[str, Any] = {name: row[name] for name in _SAME if row.get(name) is not None}
    for name in ("prompt_tokens", "response_tokens", *TOKEN_MASKS, *TOKEN_FLOATS):
        if row.get(name) is not None:
            given[name] = row[name]
    if known:  # null stands for the slices of `tokens`, an empty list for itself
        given.setdefault("prompt_tokens", row["tokens"][: row["prompt_length"]])
        given.setdefault("response_tokens", row["tokens"][row["prompt_length"] :])
    partial = row.get("continuation_count") is not None
    if partial:
        given["continuation_prompt"] = row.get("continuation_prompt") or ""
        for name in ("start_rollout_id", "continuation_count", "kv_cache_ref"):
            given[name] = row.get(name)
    segments = row.get("version_segments") or []
    if not segments and row["version_known"] in ("span", "list"):
        given["version_span"] = (row["oldest_version_id"], row["newest_version_id"])
    version = row.get("version_id")
    return (PartialTrajectory if partial else Trajectory)(
        tokens=row["tokens"],
        prompt_length=row["prompt_length"] if known else 0,
        response_length=row["response_length"] if known else 0,
        version=None
        if version is None
        else PolicyVersion(version, row.get("version_timestamp") or 0.0, row.get("version_step") or 0),
        version_segments=[
            VersionSegment(s["start"], s["end"], PolicyVersion(s["version_id"], s["timestamp"], s["step"]))
            for s in segments
        ],
        status=TrajectoryStatus(row["status"]),
        messages=None if row.get("messages") is None else json.loads(row["messages"]),
        metadata=_metadata(row),
        **given,
    )


def _metadata(row: Mapping[str, Any]) -> dict[str, Any] | None:
    own = None if row.get("metadata") is None else json.loads(row["metadata"])
    more = {name: value for name, value in row.items() if name not in BY_NAME and value is not None}
    return own if not more else plain(more) | (own or {})


def _is_own(head: Head) -> str | None:
    if head.container == "parquet" and head.has(*_MARKS):
        return f"has trajstore's columns, {', '.join(map(repr, _MARKS))}"
    return None


FORMATS = (Format("trajstore-parquet", _is_own, read),)
