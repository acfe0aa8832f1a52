"""The packed and nested layouts, against the reference and by example."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.reference import (
    Row,
    any_options,
    batch_rows,
    dtype_of,
    fill_of,
    kept,
    row,
    rows_of,
    same,
    up,
)
from trajstore import InputError
from trajstore.layouts import Options, nested, packed, padded, to_nested, to_torch


@settings(max_examples=20, deadline=None)
@given(batch_rows, st.integers(0, 5), any_options)
def test_a_packed_batch_is_what_the_design_says(rows: list[Row], cut: int, options: Options) -> None:
    batch = packed(rows_of(*rows, cut=cut), options)
    out = batch.arrays
    sizes = [len(kept(one, "input_ids", options)) for one in rows]
    total = up(sum(sizes), options.pad_to_multiple_of)
    spare = total - sum(sizes)
    for name in batch.columns:
        expected: list[float] = []
        for one in rows:
            values = list(map(float, range(one["length"]))) if name == "position_ids" else None
            values = (
                kept(one, name, options) if values is None else values[: len(kept(one, "tokens", options))]
            )
            if name == "loss_mask" and values:
                values = [0, *values[1:]]
            expected += values
        same(out, name, expected + [fill_of(name, options)] * spare, dtype_of(name, options))
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    if options.pad_to_multiple_of > 1:
        ends.append(total)
        sizes.append(spare)
    same(out, "cu_seqlens", ends, np.int32)
    assert out["max_seqlen"] == max(sizes, default=0)
    assert type(out["max_seqlen"]) is int
    assert (batch.size, batch.num_tokens) == (total, total - spare)


ROWS = [
    row(id=str(i), length=n, tokens=list(range(n)), prompt_length=min(n, 2), advantages=[float(i)] * n)
    for i, n in enumerate([5, 1, 8, 3, 0, 6])
]


def test_nested_tensors_are_the_packed_memory_and_of_one_shape() -> None:
    batch = nested(rows_of(*ROWS))
    flat = to_torch(batch.arrays)
    tensors = to_nested(flat, batch.columns)
    for name in batch.columns:
        assert tensors[name].values().data_ptr() == flat[name].data_ptr()
        assert [len(part) for part in tensors[name].unbind()] == [5, 1, 8, 3, 0, 6]
    assert tensors["rewards"].tolist() == [0.5] * 6
    product = tensors["loss_mask"] * tensors["advantages"]  # torch refuses tensors of two offsets
    assert product.unbind()[2].tolist() == [0, 0, 2, 2, 2, 2, 2, 2]


def test_nested_has_no_padding() -> None:
    with pytest.raises(InputError, match="pad_to_multiple_of has no meaning in the nested layout"):
        nested(rows_of(*ROWS), Options(pad_to_multiple_of=8))


def test_the_first_token_of_a_row_trains_nothing_when_packed() -> None:
    masks = {"loss_mask": [1, 1, 1]}
    rows = rows_of(row(**masks), row(length=0, tokens=[], prompt_length=0), row(**masks))
    assert packed(rows).arrays["loss_mask"].tolist() == [0, 1, 1, 0, 1, 1]
    assert packed(rows, Options(max_length=2, truncation_side="left")).arrays["loss_mask"].tolist() == [
        0,
        1,
        0,
        1,
    ]
    assert padded(rows).arrays["loss_mask"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
