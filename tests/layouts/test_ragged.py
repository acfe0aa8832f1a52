"""A list column as addresses: slices, chunks, nulls, and what is refused."""

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import InputError, ValidationError
from trajstore.layouts import Ragged
from trajstore.layouts.ragged import side_by_side, take_all
from trajstore.schema import list_of


def lists(ragged: Ragged) -> list[list[Any] | None]:
    rows = [ragged.row(i) for i in range(len(ragged))]
    return [None if row is None else row.tolist() for row in rows]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_every_row_is_where_its_address_says(kind: Callable[[pa.DataType], pa.DataType]) -> None:
    values = [[1, 2], None, [], [3], [4, 5, 6], None]
    array = pa.array(values, kind(pa.int32()))
    assert lists(Ragged.from_arrow(array)) == values
    assert lists(Ragged.from_arrow(array.slice(2, 3))) == values[2:5]
    assert lists(Ragged.from_arrow(array.slice(5))) == values[5:]
    assert lists(Ragged.from_arrow(array.slice(6))) == []


def test_chunks_and_their_slices_keep_their_own_values() -> None:
    column = pa.chunked_array(
        [
            pa.array([[9, 9], [1], None], list_of(pa.int32())).slice(1),
            pa.array([], list_of(pa.int32())),
            pa.array([[2, 3], [], [8]], list_of(pa.int32())).slice(0, 2),
        ]
    )
    ragged = Ragged.from_arrow(column)
    assert lists(ragged) == [[1], None, [2, 3], []]
    assert lists(ragged.take(np.array([2, 0, 2, 1]))) == [[2, 3], [1], [2, 3], None]


def test_a_null_row_does_not_lend_its_hidden_values() -> None:
    mask = pa.array([False, True, False])
    array = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 6], pa.int32()), pa.array([1, 2, 9, 9, 3, 4]), mask=mask
    )
    assert lists(Ragged.from_arrow(array)) == [[1, 2], None, [3, 4]]
    assert lists(Ragged.from_arrow(array.slice(1))) == [None, [3, 4]]


def test_a_null_hidden_behind_a_null_row_is_no_error_and_shifts_nothing() -> None:
    mask = pa.array([False, True, False])
    values = pa.array([1.5, 2, None, None, 3, 4], pa.float32())
    array = pa.ListArray.from_arrays(pa.array([0, 2, 4, 6], pa.int32()), values, mask=mask)
    assert lists(Ragged.from_arrow(array)) == [[1.5, 2], None, [3, 4]]


def test_a_null_element_is_refused_and_the_column_named() -> None:
    array = pa.array([[1.0], [2.0, None]], pa.list_(pa.float32()))
    with pytest.raises(ValidationError, match="'log_probs': an element inside a list is null"):
        Ragged.from_arrow(array, "log_probs")
    assert lists(Ragged.from_arrow(array.slice(0, 1))) == [[1.0]]


def test_columns_without_rows_or_without_values() -> None:
    kind = list_of(pa.int32())
    assert lists(Ragged.from_arrow(pa.array([], kind))) == []
    assert lists(Ragged.from_arrow(pa.chunked_array([], kind))) == []
    assert lists(Ragged.from_arrow(pa.nulls(2, kind))) == [None, None]
    assert lists(Ragged.absent(2)) == [None, None]


def test_booleans_come_out_of_their_bits() -> None:
    array = pa.array([[True, False], None, [True]], list_of(pa.bool_()))
    assert lists(Ragged.from_arrow(array.slice(1))) == [None, [1]]
    assert lists(Ragged.from_arrow(array)) == [[1, 0], None, [1]]


def test_numbers_are_not_copied() -> None:
    array = pa.array([[1, 2], [3]], list_of(pa.int32()))
    row = Ragged.from_arrow(array).row(1)
    assert row is not None
    assert row.__array_interface__["data"][0] == array.values.buffers()[1].address + 8
    assert not row.flags.writeable


element = st.integers(-9, 9)
ragged_rows = st.lists(st.none() | st.lists(element, max_size=5), max_size=8)


@settings(max_examples=30, deadline=None)
@given(ragged_rows, st.data())
def test_addresses_survive_any_slicing_and_chunking(
    rows: list[list[int] | None], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    whole = pa.array([[7], *rows, [7, 7]], list_of(pa.int32()))
    ends = [0, *cuts, len(rows)]
    column = pa.chunked_array([whole.slice(1 + a, b - a) for a, b in itertools.pairwise(ends)])
    assert lists(Ragged.from_arrow(column)) == rows


def test_addresses_are_those_of_the_values() -> None:
    column = pa.chunked_array([[[1, 2], None, [3]], [[4], []]], pa.list_(pa.int32()))
    ragged = Ragged.from_arrow(column).take(np.array([3, 2, 1, 0]))
    firsts = [chunk.values.buffers()[1].address for chunk in column.chunks]
    assert ragged.address.tolist() == [firsts[1], firsts[0] + 8, 0, firsts[0]]
    absent = Ragged.absent(2)
    assert (absent.address.tolist(), absent.dtype, len(absent.take(np.array([0])))) == ([0, 0], None, 1)


def test_addresses_do_not_travel_to_another_process() -> None:
    ragged = Ragged.from_arrow(pa.array([[1, 2], None, [3]], list_of(pa.int32()))).take(np.array([2, 1]))
    other = pickle.loads(pickle.dumps(ragged))
    assert lists(other) == [[3], None]
    assert [chunk.tolist() for chunk in other.chunks] == [[3]], "no values of other rows"
    assert other.address.tolist() == [other.chunks[0].ctypes.data, 0]
    assert other.address[0] != ragged.address[0]


def test_all_columns_are_taken_by_addresses_that_lie_side_by_side() -> None:
    columns = {
        "a": Ragged.from_arrow(pa.array([[1], None, [2, 3]], list_of(pa.int8()))),
        "b": Ragged.from_arrow(pa.array([[4.0, 5.0], [6.0], None], list_of(pa.float32()))),
    }
    addresses = side_by_side(columns, 3)
    assert addresses.flags.c_contiguous
    assert addresses.T.tolist() == [column.address.tolist() for column in columns.values()]
    rows = np.array([2, 0, 2])
    taken = take_all(columns, addresses, rows)
    assert {name: lists(column) for name, column in taken.items()} == {
        "a": [[2, 3], [1], [2, 3]],
        "b": [None, [4.0, 5.0], None],
    }
    for name, column in columns.items():
        assert taken[name].address.tolist() == column.address[rows].tolist()
    assert side_by_side({}, 3).shape == (3, 0)
    assert take_all({}, side_by_side({}, 3), rows) == {}


def test_null_rows_give_way_to_another_column() -> None:
    one = Ragged.from_arrow(pa.array([[1], None, None], list_of(pa.int8())))
    other = Ragged.from_arrow(pa.array([[7], [8, 9], None], list_of(pa.int8())))
    assert lists(one.or_else(other)) == [[1], [8, 9], None]
    assert one.or_else(other).address.tolist() == [one.address[0], other.address[1], 0]
    assert other.or_else(one).address.tolist() == other.address.tolist()
    assert Ragged.absent(3).or_else(one) is one


@pytest.mark.parametrize(
    ("ragged", "message"),
    [
        (
            Ragged((np.arange(4),), np.zeros(1, np.int64), np.array([2]), np.array([3])),
            "row 0 .* reaches to 5",
        ),
        (Ragged((np.arange(4),), np.zeros(1, np.int64), np.array([-1]), np.array([1])), "row 0"),
        (
            Ragged((np.arange(4)[::2],), np.zeros(1, np.int64), np.array([0]), np.array([1])),
            "not flat arrays",
        ),
        (
            Ragged((np.arange(4), np.ones(2)), np.array([0]), np.array([0]), np.array([1])),
            "not flat arrays of one dtype",
        ),
    ],
)
def test_no_address_points_outside_its_chunk(ragged: Ragged, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _ = ragged.address
