"""Rows of numbers → one flat buffer: what each box of values becomes, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import strategies
from trajstore.codec.flat import FLOATS, IDS, MASK, Kind, flatten
from trajstore.errors import ValidationError

NAMES = ["a", "b", "c", "d"]


def flat(rows: list[Any], kind: Kind, **options: Any) -> np.ndarray:
    return flatten(rows, kind, "col", NAMES, **options).values


def refusal(rows: list[Any], kind: Kind, **options: Any) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        flatten(rows, kind, "col", NAMES, **options)
    assert caught.value.column == "col"
    assert caught.value.row is None or caught.value.id == NAMES[caught.value.row]
    return caught.value


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", [IDS, MASK, FLOATS], ids=["ids", "mask", "floats"])
def test_a_flat_buffer_is_its_rows_one_after_another(kind: Kind, data: st.DataObject) -> None:
    make = {IDS: strategies.token_ids, MASK: strategies.masks, FLOATS: strategies.floats}[kind]
    rows = [data.draw(make(size)) for size in data.draw(st.lists(st.integers(0, 4), max_size=4))]
    found = flatten(rows, kind, "col", NAMES)
    plain = [value for row in rows for value in (row.tolist() if hasattr(row, "tolist") else row)]
    assert found.values.dtype == kind.dtype
    np.testing.assert_array_equal(found.values, np.array(plain, kind.dtype))
    assert found.lengths.tolist() == [len(row) for row in rows]
    assert found.starts.tolist() == [sum(map(len, rows[:i])) for i in range(len(rows))]


def test_rows_may_mix_boxes() -> None:
    rows = [[1, 2], np.array([3], np.int64), torch.tensor([4, 5]), (6,)]
    assert flat(rows, IDS).tolist() == [1, 2, 3, 4, 5, 6]


def test_none_is_an_empty_row() -> None:
    assert flatten([None, [1], None], IDS, "col", NAMES).lengths.tolist() == [0, 1, 0]


def test_bfloat16_is_read_exactly() -> None:
    values = torch.randn(300).to(torch.bfloat16)
    assert flat([values], FLOATS).tolist() == values.double().tolist()


def test_uint64_beside_int64_does_not_pass_through_floats() -> None:
    big = 2**31 - 1
    rows = [np.array([big, big - 1], np.uint64), np.array([big - 2], np.int64)]
    assert flat(rows, IDS).tolist() == [big, big - 1, big - 2]


def test_many_tensors_are_joined_across_blocks() -> None:
    """Above 2^15 values tensors are copied block by block; a row longer than a block is one of its own."""
    rows = [torch.arange(n, dtype=torch.int32) for n in (20_000, 20_000, 70_000, 1)]
    np.testing.assert_array_equal(flat(rows, IDS), torch.cat(rows).numpy())


@pytest.mark.parametrize("box", [list, np.array, torch.tensor])
def test_the_buffer_is_not_the_callers(box: Any) -> None:
    row = box([1.0, 2.0])
    found = flat([row], FLOATS)
    row[0] = 9.0
    assert found.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3.4028234663852886e38])
def test_extreme_floats_that_fit_are_kept(value: float) -> None:
    np.testing.assert_array_equal(flat([[0.5, value]], FLOATS), np.array([0.5, value], np.float32))


@pytest.mark.parametrize("box", [list, np.array, lambda v: torch.tensor(v, dtype=torch.float64)])
@pytest.mark.parametrize("value", [1e300, -1e300, 3.4028235677973366e38])
def test_floats_outside_float32_are_refused(box: Any, value: float) -> None:
    error = refusal([[0.0], box([math.inf, value])], FLOATS)
    assert error.row == 1
    assert f"{value!r} at index 1 is outside float32" in str(error)


def test_an_integer_outside_every_float_is_refused() -> None:
    assert "at index 0 is outside float32" in str(refusal([[10**400]], FLOATS))


@pytest.mark.parametrize("value", [2**31, -1, -(2**31) - 1, 2**63, -(2**63)])
def test_ids_outside_int32_are_refused(value: int) -> None:
    error = refusal([[1], [5, value]], IDS)
    assert (error.row, error.id) == (1, "b")
    assert f"{value} at index 1 is outside 0..2147483647" in str(error)
    array = np.array([5, value], np.uint64 if value > 0 else object)
    assert f"{value} at index 1" in str(refusal([[1], array], IDS))


@pytest.mark.parametrize("value", [1.0, 2.5, math.nan])
def test_floats_are_no_ids(value: float) -> None:
    for row in ([7, value], np.array([7, value]), torch.tensor([7, value])):
        reason = str(refusal([row], IDS))
        assert "is not an integer, expected a token id" in reason


@pytest.mark.parametrize("value", [200, 2, -100, 256, math.nan, 0.5, -1])
def test_masks_hold_only_zero_and_one(value: float) -> None:
    for row in ([0, 1, value], np.array([0, 1, value]), torch.tensor([0, 1, value])):
        error = refusal([[1], row], MASK)
        assert error.row == 1
        assert "at index 2 is neither 0 nor 1, expected 0 or 1" in str(error)
        assert str(value) in str(error)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_small_integer_masks_are_looked_at_too(dtype: Any) -> None:
    assert "2 at index 1" in str(refusal([np.array([1, 2]).astype(dtype)], MASK))


@pytest.mark.parametrize("kind", [IDS, MASK, FLOATS], ids=["ids", "mask", "floats"])
def test_none_inside_a_row_is_refused_by_index(kind: Kind) -> None:
    for row in ([1, 0, None], (1, 0, None), np.array([1, 0, None], object)):
        error = refusal([[1], row], kind)
        assert error.row == 1
        assert "found None at index 2" in str(error)


def test_nulls_become_nan_on_request() -> None:
    rows = [[1.0, None], np.array([None, 2.0], object), torch.tensor([3.0])]
    np.testing.assert_array_equal(flat(rows, FLOATS, nulls="nan"), [1.0, np.nan, np.nan, 2.0, 3.0])


@pytest.mark.parametrize("kind", [IDS, MASK], ids=["ids", "mask"])
def test_nan_on_request_is_for_floats_only(kind: Kind) -> None:
    assert "found None at index 0" in str(refusal([[None]], kind, nulls="nan"))


@pytest.mark.parametrize("nulls", ["error", "nan"])
@pytest.mark.parametrize("row", ["text", b"ab", {1: 2}, {1}], ids=str)
def test_a_row_that_is_no_list_is_refused(row: Any, nulls: Any) -> None:
    error = refusal([[1.0], row], FLOATS, nulls=nulls)
    assert error.row == 1
    assert f"found {type(row).__name__}, expected a list of numbers" in str(error)


@pytest.mark.parametrize("row", [5, 1.5, np.array(3), torch.tensor(3)], ids=repr)
def test_a_single_number_is_no_row(row: Any) -> None:
    error = refusal([[1], row], IDS)
    assert error.row == 1


@pytest.mark.parametrize("nulls", ["error", "nan"])
@pytest.mark.parametrize("shape", [(1, 3), (3, 1)])
@pytest.mark.parametrize("box", [np.ones, torch.ones])
def test_two_dimensions_are_refused(box: Any, shape: tuple[int, int], nulls: Any) -> None:
    error = refusal([[1.0], box(shape)], FLOATS, nulls=nulls)
    assert error.row == 1
    assert f"found shape {shape}, expected one dimension" in str(error)
    assert f"found shape {shape}" in str(refusal([box(shape)], FLOATS, nulls=nulls))


@pytest.mark.parametrize("row", [["x"], np.array(["x"]), [[1]], [object()], [1j], np.array([1j])])
@pytest.mark.parametrize("kind", [IDS, MASK, FLOATS], ids=["ids", "mask", "floats"])
def test_what_is_no_number_is_refused(row: Any, kind: Kind) -> None:
    assert refusal([[1], row], kind).row == 1


def test_a_dtype_that_does_not_fit_is_named() -> None:
    error = refusal([[1], np.array([True])], IDS)
    assert error.row == 1
    assert "found values of type bool, expected a token id" in str(error)


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(str(refusal([["x" * 1000]], FLOATS))) < 250
