"""Mean versions, freshness weights and fresh tokens, against a naive reference."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.schema import BY_NAME
from trajstore.selection import fresh_tokens, freshness, mean_versions

SEGMENTS = BY_NAME["version_segments"].type

pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 9)), max_size=4)
row = st.tuples(pieces, st.none() | st.integers(0, 9), st.integers(0, 3))


def lists(rows: list[list[tuple[int, int, int]] | None]) -> pa.Array:
    values = [
        None
        if row is None
        else [{"start": a, "end": b, "version_id": v, "timestamp": 0.0, "step": 0} for a, b, v in row]
        for row in rows
    ]
    return pa.array(values, SEGMENTS)


def laid_out(given: list[Any]) -> tuple[list[Any], list[int], list[int | None], list[int | None]]:
    """Segments with gaps between them, lengths, oldest and newest versions."""
    segments, lengths, oldest, newest = [], [], [], []
    for parts, version, spread in given:
        at, row = 0, []
        for gap, size, number in parts:
            row.append((at + gap, at + gap + size, number))
            at += gap + size
        segments.append(row or None)
        lengths.append(at + 2)
        numbers = [number for *_, number in row] or ([] if version is None else [version, version + spread])
        oldest.append(min(numbers, default=None))
        newest.append(max(numbers, default=None))
    return segments, lengths, oldest, newest


@settings(max_examples=50, deadline=None)
@given(st.lists(row, max_size=6), st.integers(0, 3))
def test_the_mean_is_over_the_tokens_of_the_segments(given: list[Any], cut: int) -> None:
    segments, _, oldest, newest = laid_out(given)
    expected: list[float | None] = []
    for parts, low, high in zip(segments, oldest, newest, strict=True):
        if parts:
            tokens = sum(b - a for a, b, _ in parts)
            expected.append(sum((b - a) * v for a, b, v in parts) / tokens)
        else:
            expected.append(low if low == high else None)
    whole = (lists(segments), pa.array(oldest, pa.int64()), pa.array(newest, pa.int64()))
    for part in ((column.slice(cut) for column in whole), (pa.chunked_array([c]).slice(cut) for c in whole)):
        found = mean_versions(*part).to_pylist()
        assert len(found) == len(expected[cut:])
        for a, b in zip(found, expected[cut:], strict=True):
            assert a is b is None or math.isclose(a, b, rel_tol=1e-12)


def test_a_mean_of_large_versions_loses_nothing() -> None:
    base = 2**52
    rows = lists([[(0, 1, base), (1, 4, base + 4)]])
    assert mean_versions(rows, pa.array([base]), pa.array([base + 4])).to_pylist() == [base + 3.0]


def test_versions_may_be_nanoseconds() -> None:
    now = 1_900_000_000_123_456_789
    oldest = pa.array([now, now - 2, None])
    nothing = lists([None, None, None])
    means = mean_versions(nothing, oldest, oldest).to_pylist()
    assert means[:2] == [float(now), float(now - 2)]
    assert means[2] is None
    lengths = np.array([1, 1, 1], np.int64)
    assert fresh_tokens(lengths, nothing, oldest, now, 1).tolist() == [1, 0, 0], "to the last digit"


@settings(max_examples=50, deadline=None)
@given(st.lists(row, max_size=6), st.integers(0, 12), st.integers(0, 4), st.integers(0, 3))
def test_a_token_goes_by_its_segment_else_by_the_rows_oldest(
    given: list[Any], at: int, limit: int, cut: int
) -> None:
    segments, lengths, oldest, _ = laid_out(given)
    expected = []
    for parts, length, low in list(zip(segments, lengths, oldest, strict=True))[cut:]:
        for t in range(length):
            inside = [v for a, b, v in parts or [] if a <= t < b]
            if parts:
                expected.append(int(not inside or at - inside[0] <= limit))
            else:
                expected.append(int(low is not None and at - low <= limit))
    known = pa.array(oldest, pa.int64()).slice(cut)
    found = fresh_tokens(np.array(lengths, np.int64)[cut:], lists(segments).slice(cut), known, at, limit)
    assert found.dtype == np.int8
    assert found.tolist() == expected


def test_freshness_is_one_over_gap_plus_one() -> None:
    gaps = np.array([0.0, 1.0, 3.0, -2.0, math.nan, 0.5])
    assert freshness(gaps).tolist() == [1.0, 0.5, 0.25, 1.0, 0.0, 1 / 1.5]
