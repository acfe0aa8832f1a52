"""Owns the columns that say which policy version produced what; must not judge ranges (check.py does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trajstore.codec.flat import shorten
from trajstore.codec.scalars import Scalars
from trajstore.schema import BY_NAME
from trajstore.trajectory import PolicyVersion

Bools = NDArray[np.bool_]

_DERIVED = pa.array(["absent", "exact", "span"])


def version_columns(fields: Mapping[str, Sequence[Any]], scalars: Scalars) -> dict[str, pa.Array]:
    """The version columns of N rows, from `version`, `version_segments`, `version_span`, `version_known`.

    Raises:
        ValidationError: a value is not of its type, or what is given contradicts `version_known`.
    """
    versions, said = fields["version"], fields["version_known"]
    _typed(versions, "version", (PolicyVersion,), "a PolicyVersion or None", scalars)
    has_version = np.fromiter((v is not None for v in versions), bool, len(versions))
    columns = {
        "version_id": scalars.nullable_ints("version_id", [v and v.version_id for v in versions]),
        "version_step": scalars.nullable_ints("version_step", [v and v.step for v in versions]),
        "version_timestamp": scalars.floats("version_timestamp", [v and v.timestamp for v in versions]),
    }
    oldest = newest = columns["version_id"]
    has_span, low, high = _spans(fields["version_span"], scalars)
    if low is not None:
        given = pa.array(has_span)
        oldest, newest = pc.if_else(given, low, oldest), pc.if_else(given, high, newest)
    columns["version_segments"], has_segments, low, high = _segments(fields["version_segments"], scalars)
    if low is not None:
        given = pa.array(has_segments)
        oldest, newest = pc.replace_with_mask(oldest, given, low), pc.replace_with_mask(newest, given, high)
    both = has_segments & has_span
    if both.any():
        scalars.refuse(int(both.argmax()), "version_span", "is given beside version_segments", "give one")
    derived = _DERIVED.take(pa.array(np.where(has_segments, 1, np.where(has_span, 2, has_version))))
    if any(said):
        for i, word in enumerate(said):
            if word in _NEEDS_SPAN and not has_span[i]:
                reason = f"{word!r} says that only the oldest and newest version are known"
                scalars.refuse(i, "version_known", reason, "give them as version_span=(oldest, newest)")
            if word == "exact" and has_span[i]:
                scalars.refuse(i, "version_known", "'exact' contradicts version_span", "say 'span' or 'list'")
        words = [word or own for word, own in zip(said, derived.to_pylist(), strict=True)]
        derived = scalars.strings("version_known", words)
    return columns | {"oldest_version_id": oldest, "newest_version_id": newest, "version_known": derived}


_NEEDS_SPAN = ("span", "list")


def derived_known(
    segments: Sequence[Any], span: tuple[int, int] | None, version: PolicyVersion | None
) -> str:
    """What `version_known` says of one trajectory that leaves it open."""
    if segments:
        return "exact"
    if span is not None:
        return "span"
    return "absent" if version is None else "exact"


def _spans(spans: Sequence[Any], scalars: Scalars) -> tuple[Bools, pa.Array | None, pa.Array | None]:
    """Which rows have a span, and its ends; None when no row has one."""
    has = np.fromiter((span is not None for span in spans), bool, len(spans))
    if not has.any():
        return has, None, None
    _typed(spans, "version_span", (tuple, list), "(oldest, newest) or None", scalars)
    for i, span in enumerate(spans):
        if span is not None and (len(span) != 2 or None in span):
            scalars.refuse(i, "version_span", f"found {shorten(span)}, expected (oldest, newest)")
    low = scalars.nullable_ints("oldest_version_id", [span and span[0] for span in spans])
    high = scalars.nullable_ints("newest_version_id", [span and span[1] for span in spans])
    return has, low, high


def _segments(
    rows: Sequence[Any], scalars: Scalars
) -> tuple[pa.Array, Bools, pa.Array | None, pa.Array | None]:
    """The column, which rows have segments, and these rows' oldest and newest versions (None without any)."""
    kind = BY_NAME["version_segments"].type
    _typed(rows, "version_segments", (list, tuple), "a list of VersionSegment", scalars)
    if not any(rows):
        return pa.nulls(len(rows), kind), np.zeros(len(rows), bool), None, None
    filled = [row or () for row in rows]
    counts = np.fromiter(map(len, filled), np.int64, len(filled))
    flat = scalars.segments(list(chain.from_iterable(filled)), counts)
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    has = counts > 0
    column = pa.ListArray.from_arrays(offsets, flat, type=kind, mask=pa.array(~has))
    numbers, starts = flat.field("version_id").to_numpy(), offsets[:-1][has]
    low, high = np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)
    return column, has, pa.array(low), pa.array(high)


def _typed(
    values: Sequence[Any], column: str, kinds: tuple[type, ...], expected: str, scalars: Scalars
) -> None:
    if set(map(type, values)) <= {*kinds, type(None)}:
        return
    for i, value in enumerate(values):
        if value is not None and not isinstance(value, kinds):
            scalars.refuse(i, column, f"found {shorten(value)}, expected {expected}")
