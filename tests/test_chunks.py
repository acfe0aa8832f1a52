"""take_rows: rows of a chunked table by position."""

import itertools

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from trajstore.chunks import take_rows
from trajstore.schema import list_of


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4) | st.none(), min_size=1, max_size=12),
    st.lists(st.integers(0, 12), max_size=3),
    st.data(),
)
def test_rows_by_position_are_those_of_a_take(
    lists: list[list[int] | None], cuts: list[int], data: st.DataObject
) -> None:
    whole = pa.table({"x": pa.array(lists, list_of(pa.int32())), "i": range(len(lists))})
    edges = [0, *sorted(min(cut, len(lists)) for cut in cuts), len(lists)]
    table = pa.concat_tables([whole.slice(a, b - a) for a, b in itertools.pairwise(edges)])
    rows = np.array(data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=30)), np.int64)
    assert take_rows(table, rows).equals(whole.take(pa.array(rows)))


def test_scattered_rows_some_of_which_are_large() -> None:
    """On average they are small, so they are gathered: two large ones are more than is gathered at once."""
    large = pa.array([np.full(1 << 26, i, np.int8) for i in range(5)], list_of(pa.int8()))
    small = pa.array([[i % 100] for i in range(200_000)], list_of(pa.int8()))
    table = pa.table({"x": pa.chunked_array([large, small])})
    rows = np.array([0, 9, 1, 9, 2, 11, 3, 10, 4, 9])
    found = take_rows(table, rows)["x"]
    assert found.num_chunks > 1
    assert [len(value) for value in found] == [1 << 26, 1] * 5
    assert [value.values[0].as_py() for value in found] == [0, 4, 1, 4, 2, 6, 3, 5, 4, 4]
