"""The prompt_response layout, against the reference and by example."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.reference import (
    Row,
    any_options,
    batch_rows,
    block,
    bounds_of,
    dtype_of,
    fill_of,
    kept,
    row,
    rows_of,
    same,
)
from trajstore import ValidationError
from trajstore.layouts import Options, prompt_response


@settings(max_examples=20, deadline=None)
@given(batch_rows, st.integers(0, 5), any_options)
def test_a_batch_is_what_the_design_says(rows: list[Row], cut: int, options: Options) -> None:
    batch = prompt_response(rows_of(*rows, cut=cut), options)
    out, multiple = batch.arrays, options.pad_to_multiple_of

    def halves(name: str) -> tuple[list[list[float]], list[list[float]]]:
        prompts, responses = [], []
        for one in rows:
            start, end = bounds_of(one, options)
            values = (
                list(map(float, range(end - start))) if name == "position_ids" else kept(one, name, options)
            )
            split = min(max(one["prompt_length"] - start, 0), end - start)
            prompts.append(values[:split])
            responses.append(values[split:])
        fill = fill_of(name, options)
        return block(prompts, fill, "left", multiple), block(responses, fill, "right", multiple)

    for name in batch.columns:
        source = "input_ids" if name in ("prompts", "responses") else name
        left, right = halves(source)
        if name == "prompts":
            expected = left
        elif name in ("input_ids", "attention_mask", "position_ids") or (
            options.full_sequence and name != "responses"
        ):
            expected = [p + r for p, r in zip(left, right, strict=True)]
        else:
            expected = right
        same(out, name, expected, dtype_of(name, options))
    assert batch.size == out["input_ids"].size
    np.testing.assert_array_equal(
        out["input_ids"], np.concatenate([out["prompts"], out["responses"]], axis=1), strict=True
    )


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ValidationError, match=r"trajectory 1 \(id 'w'\), column 'prompt_length': the split"):
        prompt_response(rows_of(row(), row(id="w", prompt_length=None, loss_mask=[0, 1, 1])))
    prompt_response(rows_of(row(length=0, tokens=[], prompt_length=None)))


def test_a_cut_row_keeps_its_place() -> None:
    rows = rows_of(row(length=5, tokens=[1, 2, 3, 4, 5], prompt_length=2), row())
    left = prompt_response(rows, Options(max_length=4, truncation_side="left"))
    assert left.arrays["prompts"].tolist() == [[2], [5]]
    assert left.arrays["responses"].tolist() == [[3, 4, 5], [6, 7, 0]]
    assert (left.cut_tokens, left.cut_rows) == (1, 1)
    right = prompt_response(rows, Options(max_length=1))
    assert right.arrays["responses"].shape == (2, 0)
