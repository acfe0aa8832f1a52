"""Given Arrow columns: what `conform` casts, what it and `check` refuse, what slices and nulls hide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trajstore.codec import check, conform, decode, encode
from trajstore.errors import LengthMismatchError, SchemaError, ValidationError
from trajstore.schema import BY_NAME, ROW_SCHEMA, SEGMENT, TOKEN_FLOATS, TOKEN_MASKS, Column, list_of
from trajstore.trajectory import PolicyVersion, Trajectory, VersionSegment

HIDDEN = pa.ListArray.from_arrays(
    pa.array([0, 2, 4, 6], pa.int32()), pa.array([1, 2, 9, 9, 3, 4]), mask=pa.array([False, True, False])
)
"""[[1, 2], null, [3, 4]], where the null row owns two values."""


def batch(rows: int = 3) -> pa.RecordBatch:
    """Rows "0", "1", ... of two tokens."""
    return encode(
        [Trajectory(id=str(i), tokens=[3, 4], prompt_length=1, version=PolicyVersion(i)) for i in range(rows)]
    )


def swap(source: pa.RecordBatch, name: str, array: Any) -> pa.RecordBatch:
    """The batch with another column in the place of `name`."""
    if not isinstance(array, pa.Array):
        array = pa.array(array, BY_NAME[name].type)
    columns = dict(zip(source.schema.names, source.columns, strict=True)) | {name: array}
    return pa.RecordBatch.from_pydict(columns)


def refusal(
    name: str, array: Any, says: str, *, row: int = 1, kind: type[ValidationError] = ValidationError
) -> None:
    """Checks a batch with that column; the error must name row and column, and say what was found."""
    with pytest.raises(ValidationError) as caught:
        check(swap(batch(), name, array))
    error = caught.value
    assert type(error) is kind
    assert (error.row, error.id, error.column) == (row, str(row), name)
    assert f"trajectory {row} (id '{row}'), column '{name}': " in str(error)
    assert says in str(error)


# check


@pytest.mark.parametrize("name", [*TOKEN_MASKS, *TOKEN_FLOATS])
def test_a_per_token_column_is_as_long_as_tokens(name: str) -> None:
    check(swap(batch(), name, [[1, 0], None, [0, 1]]))
    for lists in ([[1, 0], [1], None], [None, [0, 1, 1], None], [[1, 0], [], [1, 1]]):
        says = f"has {len(lists[1])} values, expected 2 (tokens)"
        refusal(name, lists, says, kind=LengthMismatchError)


@pytest.mark.parametrize("value", [2, -1, -100, 127])
def test_mask_values(value: int) -> None:
    refusal("loss_mask", [None, [1, value], [0, 0]], f"{value} at index 1, expected 0 or 1")


def test_token_values() -> None:
    refusal("tokens", [[1, 2], [1, -5], [0, 0]], "-5 at index 1, expected a token id from 0 to 2147483647")
    refusal("prompt_tokens", [None, [-1], None], "-1 at index 0")


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("reward", [1.0, None, 1.0], "is null, expected a value"),
        ("id", ["0", None, "2"], "is null, expected a value"),
        ("length", [2, 3, 2], "3 is not the number of tokens"),
        ("prompt_length", [1, None, 1], "is known without response_length"),
        ("prompt_length", [1, -1, 1], "-1 is negative"),
        ("status", ["failed", "done", "failed"], "'done' is not one of pending, generating"),
        ("version_known", ["exact", "sure", "exact"], "'sure' is not one of exact, span"),
        ("version_known", ["exact", "absent", "exact"], "'absent' contradicts the version that is given"),
        ("version_id", [0, None, 2], ""),
        ("oldest_version_id", [0, None, 2], "is known without newest_version_id"),
        ("oldest_version_id", [0, 5, 2], "5 is above newest_version_id"),
        ("group_size", [None, -4, None], "-4 is negative"),
        ("continuation_count", [None, -4, None], "-4 is negative"),
    ],
)
def test_scalar_columns(name: str, values: list[Any], says: str) -> None:
    if (name, says) == ("version_id", ""):
        with pytest.raises(ValidationError, match="'exact' needs version_id or version_segments") as caught:
            check(swap(batch(), name, values))
        assert (caught.value.row, caught.value.column) == (1, "version_known")
    elif name == "id":
        with pytest.raises(ValidationError, match="trajectory 1, column 'id': is null"):
            check(swap(batch(), name, values))
    else:
        refusal(name, values, says)


def test_lengths_that_do_not_add_up() -> None:
    refusal("prompt_length", [1, 2, 1], "2 + response_length 1 is not the 2", kind=LengthMismatchError)


def test_a_version_said_to_be_known_must_be_given() -> None:
    bare = batch()
    for name in ("version_id", "oldest_version_id", "newest_version_id"):
        bare = swap(bare, name, [None] * 3)
    with pytest.raises(ValidationError, match="'exact' says a version is known, but none is given"):
        check(bare)


def segment(start: Any, end: Any, version: Any = 1) -> dict[str, Any]:
    return {"start": start, "end": end, "version_id": version, "timestamp": 0.0, "step": 0}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([segment(0, 3)], "[0, 3) is not a range within the 2 tokens"),
        ([segment(1, 1)], "[1, 1) is not a range"),
        ([segment(0, 2), segment(1, 2)], "[1, 2) begins before [0, 2) has ended"),
        ([segment(0, 1)], "no segment covers the sampled token at index 1"),
    ],
)
def test_segments(given: list[Any], says: str) -> None:
    refusal("version_segments", [None, given, [segment(0, 2)]], says)


def test_segments_do_not_go_with_a_vague_version() -> None:
    vague = swap(batch(), "version_known", ["exact", "span", "exact"])
    with pytest.raises(ValidationError, match="'span' contradicts version_segments"):
        check(swap(vague, "version_segments", [None, [segment(0, 2)], None]))


def test_a_segment_with_a_null_inside() -> None:
    loose = pa.list_(pa.struct([pa.field(f.name, f.type) for f in SEGMENT]))
    refusal(
        "version_segments", pa.array([None, [segment(1, 2, None)], None], loose), "whose version_id is null"
    )


def test_a_null_inside_a_list() -> None:
    loose = pa.array([[1.0, 2.0], [None, 1.0], None], pa.list_(pa.float32()))
    refusal("values", loose, "holds a null element, expected a value")


def test_what_null_rows_hide_is_not_looked_at() -> None:
    hidden = HIDDEN.cast(list_of(pa.float32()))
    odd = pa.ListArray.from_arrays(
        pa.array([0, 2, 5, 7], pa.int32()),
        pa.array([1, 0, 7, 7, 7, 0, 1], pa.int8()),
        type=BY_NAME["loss_mask"].type,
        mask=pa.array([False, True, False]),
    )
    full = swap(swap(batch(), "values", hidden), "loss_mask", odd)
    check(full)
    found = decode(full)
    assert [list(row.values) for row in found] == [[1.0, 2.0], [], [3.0, 4.0]]
    assert [list(row.loss_mask) for row in found] == [[1, 0], [], [0, 1]]


def test_slices_are_checked_by_their_own_rows() -> None:
    masks = [[1, 0], [1, 7], [0, 1], [1, 1]]
    full = swap(batch(4), "loss_mask", masks)
    check(full.slice(2))
    check(full.slice(0, 1))
    with pytest.raises(ValidationError, match="7 at index 1") as caught:
        check(full.slice(1, 2))
    assert (caught.value.row, caught.value.id) == (0, "1")


def test_a_column_that_is_missing() -> None:
    with pytest.raises(SchemaError, match="column 'reward' is missing"):
        check(batch().drop_columns(["reward"]))


def test_extra_columns_say_their_role() -> None:
    extra = Column("entropy", list_of(pa.int8()), role="token", doc="any int8, no mask")
    schema = batch().schema.append(extra.field)
    columns = [*batch().columns, pa.array([[5, 6], None, [7, 8]], extra.type)]
    check(pa.record_batch(columns, schema=schema))
    columns[-1] = pa.array([[5, 6], [1], [7, 8]], extra.type)
    with pytest.raises(LengthMismatchError, match="column 'entropy': has 1 values, expected 2"):
        check(pa.record_batch(columns, schema=schema))
    with pytest.raises(SchemaError, match="column 'mystery'"):
        check(batch().append_column("mystery", pa.array([1, 2, 3])))


def test_no_rows_and_rows_without_tokens() -> None:
    check(encode([]))
    check(encode([Trajectory(), Trajectory(version_segments=[])]))


def test_a_long_batch_names_the_row_behind_other_segments() -> None:
    spans = [VersionSegment(0, 2, PolicyVersion(1))]
    rows = [Trajectory(id=str(i), tokens=[1, 2], version_segments=spans if i % 2 else []) for i in range(6)]
    rows[3].version_segments = [VersionSegment(0, 1, PolicyVersion(1))]
    rows[3].loss_mask = [1, 1]
    with pytest.raises(ValidationError, match=r"trajectory 3 .* token at index 1"):
        encode(rows)


# conform


def conformed(name: str, array: pa.Array) -> pa.Array:
    found = conform(swap(batch(), name, array), ROW_SCHEMA)
    assert found.schema.equals(ROW_SCHEMA, check_metadata=True)
    return found.column(name)


def refused(name: str, array: pa.Array, says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        conform(swap(batch(), name, array), ROW_SCHEMA)
    assert f"column {name!r}" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_list(pa.int64()),
        pa.list_(pa.field("item", pa.int32())),
        pa.list_(pa.field("item", pa.int32(), False)),
        pa.list_(pa.uint32()),
        pa.list_(pa.int64(), 2),
        pa.large_list(pa.field("element", pa.uint16(), False)),
    ],
    ids=str,
)
def test_lists_of_other_integers_become_ours(kind: pa.DataType) -> None:
    array = pa.array([[1, 2], [3, 4], [5, 60_000]], kind)
    found = conformed("tokens", array)
    assert found.type.equals(BY_NAME["tokens"].type, check_metadata=True)
    assert found.to_pylist() == array.to_pylist()
    sliced = conform(swap(batch(), "tokens", array).slice(1), ROW_SCHEMA)
    assert sliced.column("tokens").to_pylist() == array.to_pylist()[1:]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("reward", pa.array([0, 1, 2])),
        ("reward", pa.array([0.5, 1, 2], pa.float32())),
        ("version_id", pa.array([1, None, 3], pa.int32())),
        ("group_size", pa.array([1, None, 3], pa.uint64())),
        ("group_id", pa.array(["a", None, "a"]).dictionary_encode()),
        ("group_id", pa.array(["a", None, "a"], pa.large_string())),
        ("group_id", pa.nulls(3)),
        ("values", pa.array([[0.5, 1.0], None, [float("inf"), 2.0]], pa.list_(pa.float64()))),
        ("values", pa.array([[1, 2], None, [3, 4]])),
        ("loss_mask", pa.array([[True, False], None, [True, True]])),
        ("loss_mask", pa.nulls(3, pa.list_(pa.float64()))),
    ],
)
def test_other_types_that_lose_nothing(name: str, array: pa.Array) -> None:
    found = conformed(name, array)
    assert found.type == BY_NAME[name].type
    assert found.to_pylist() == array.to_pylist()


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("tokens", pa.array([[1.0, 2.0], [3.0], [4.0]]), "double values in a column of int32"),
        ("tokens", pa.array([[1, 2], [2**31, 4], [5, 6]]), "2147483648"),
        ("tokens", pa.array([[1, 2], [3, 4], [2**31, 6]], pa.list_(pa.uint32())), "2147483648"),
        ("tokens", pa.array([1, 2, 3]), "int64 values in a column of int32"),
        ("tokens", pa.array([[1, 2], [None, 4], [5, 6]]), "an element is null"),
        ("values", pa.array([[1.0, None], None, [3.0, 4.0]]), "an element is null"),
        ("values", pa.array([[1.0, 1e300], None, [3.0, 4.0]]), "1e+300, which does not fit float"),
        ("values", pa.array([[2**24 + 1, 1], None, [3, 4]]), "16777217"),
        ("values", pa.array([["1"], None, ["2"]]), "string values in a column of float"),
        ("length", pa.array([2.0, 2.0, 2.0]), "double values in a column of int32"),
        ("version_id", pa.array([2**63, 1, 2], pa.uint64()), "9223372036854775808"),
        ("reward", pa.array([2**53 + 1, 1, 2]), "9007199254740993"),
        ("reward", pa.array(["1", "2", "3"]), "string values in a column of double"),
        ("version_id", pa.array(["1", "2", "3"]), "string values in a column of int64"),
        ("id", pa.array([1, 2, 3]), "int64 values in a column of string"),
        ("id", pa.array([b"1", b"2", b"3"]), "binary values in a column of string"),
        ("terminated", pa.array([0, 1, 2]), "int64 values in a column of bool"),
        ("group_id", pa.array([["a"], None, ["b"]]), "in a column of string"),
    ],
)
def test_other_types_that_would_lose_are_refused(name: str, array: pa.Array, says: str) -> None:
    refused(name, array, says)


def test_what_null_rows_and_slices_hide_does_not_stop_a_cast() -> None:
    wild = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 6], pa.int32()),
        pa.array([1, 2, 2**40, None, 3, 4]),
        mask=pa.array([False, True, False]),
    )
    assert conformed("prompt_tokens", wild).to_pylist() == [[1, 2], None, [3, 4]]
    assert conformed("prompt_tokens", HIDDEN).flatten().to_pylist() == [1, 2, 3, 4]
    wide = swap(batch(), "tokens", pa.array([[2**40, 2], [3, 4], [5, 6]]))
    assert conform(wide.slice(1), ROW_SCHEMA).column("tokens").to_pylist() == [[3, 4], [5, 6]]


def test_columns_that_are_missing_or_unknown() -> None:
    bare = batch().drop_columns(["metadata", "values"])
    found = conform(bare, ROW_SCHEMA)
    assert found.column("values").null_count == found.column("metadata").null_count == 3
    with pytest.raises(SchemaError, match="column 'reward' is missing"):
        conform(batch().drop_columns(["reward"]), ROW_SCHEMA)
    with pytest.raises(SchemaError, match="column 'mystery' is not in the store"):
        conform(batch().append_column("mystery", pa.array([1, 2, 3])), ROW_SCHEMA)
    twice = batch().append_column("reward", pa.array([1.0, 2.0, 3.0]))
    with pytest.raises(SchemaError, match="column 'reward' is there more than once"):
        conform(twice, ROW_SCHEMA)


def test_a_batch_in_the_schema_is_passed_through_without_a_copy() -> None:
    source = batch()
    found = conform(source, ROW_SCHEMA)
    assert found.equals(source)
    ours, theirs = (np.asarray(b.column("tokens").values).ctypes.data for b in (found, source))
    assert ours == theirs
