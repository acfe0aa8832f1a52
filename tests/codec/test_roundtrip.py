"""The promise: what is stored comes back as `normalize` says, alone, in any company, and through Parquet."""

from __future__ import annotations

import io
from dataclasses import fields

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import same, trajectories
from trajstore.codec import check, conform, decode, encode, normalize
from trajstore.schema import ROW_SCHEMA
from trajstore.trajectory import PartialTrajectory, Trajectory

modest = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assert_same(found: list[Trajectory], expected: list[Trajectory]) -> None:
    assert len(found) == len(expected)
    for row, (left, right) in enumerate(zip(found, expected, strict=True)):
        for field in fields(right):
            given, wanted = getattr(left, field.name), getattr(right, field.name)
            assert same(given, wanted), f"row {row}, {field.name}: {given!r} is not {wanted!r}"
        assert type(left) is type(right)


@modest
@given(st.lists(trajectories(), max_size=4))
def test_decode_of_encode_is_normalize(rows: list[Trajectory]) -> None:
    batch = encode(rows)
    assert batch.schema.equals(ROW_SCHEMA, check_metadata=True)
    batch.validate(full=True)
    assert_same(decode(batch), [normalize(row) for row in rows])


@modest
@given(trajectories())
def test_normalize_is_idempotent(row: Trajectory) -> None:
    once = normalize(row)
    assert_same([normalize(once)], [once])


@modest
@given(st.lists(trajectories(), max_size=3))
def test_a_decoded_row_is_encoded_to_the_same_columns(rows: list[Trajectory]) -> None:
    batch = encode(rows)
    again = encode(decode(batch))
    for name in ROW_SCHEMA.names:
        assert _bytes(again.column(name)) == _bytes(batch.column(name)), name


@modest
@given(st.lists(trajectories(), max_size=3), st.lists(trajectories(), max_size=3))
def test_encode_distributes_over_concatenation(left: list[Trajectory], right: list[Trajectory]) -> None:
    apart = pa.Table.from_batches([encode(left), encode(right)])
    together = encode(left + right)
    for name in ROW_SCHEMA.names:
        assert _bytes(apart.column(name).combine_chunks()) == _bytes(together.column(name)), name


@modest
@given(st.lists(trajectories(), min_size=1, max_size=3))
def test_through_parquet(rows: list[Trajectory]) -> None:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_batches([encode(rows)]), file)
    table = pq.read_table(file, schema=ROW_SCHEMA)
    found = [row for batch in table.to_batches() for row in decode(batch)]
    assert_same(found, [normalize(row) for row in rows])


@modest
@given(st.lists(trajectories(), min_size=2, max_size=5), st.data())
def test_slices_check_and_decode_like_whole_batches(rows: list[Trajectory], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    part = encode(rows).slice(start, stop - start)
    check(part)
    check(conform(part, ROW_SCHEMA))
    assert_same(decode(part), [normalize(row) for row in rows[start:stop]])


@modest
@given(trajectories())
def test_dicts_are_lossless(row: Trajectory) -> None:
    plain = row.to_dict()
    found = Trajectory.from_dict(plain)
    assert type(found) is type(row)
    assert_same([normalize(found)], [normalize(row)])
    assert same(found.to_dict(), plain)


@pytest.mark.parametrize("kind", [Trajectory, PartialTrajectory])
def test_strategies_reach_every_field(kind: type[Trajectory]) -> None:
    """A field that the strategies forget would make the promise above hold by default."""
    varied: set[str] = set()
    default = normalize(kind())

    @settings(max_examples=80, deadline=None, database=None, derandomize=True)
    @given(trajectories(partial=kind is PartialTrajectory))
    def collect(row: Trajectory) -> None:
        found = normalize(row)
        varied.update(
            f.name for f in fields(kind) if not same(getattr(found, f.name), getattr(default, f.name))
        )

    collect()
    assert varied == {field.name for field in fields(kind)}


def test_no_rows() -> None:
    batch = encode([])
    assert batch.num_rows == 0
    assert batch.schema.equals(ROW_SCHEMA)
    assert decode(batch) == []


def _bytes(array: pa.Array) -> bytes:
    """What a column holds, bit by bit: Arrow's own equality finds NaN unequal to NaN."""
    if array.null_count == len(array):
        return repr(len(array)).encode()
    return repr(array.to_pylist()).encode("utf-8", "surrogatepass")
