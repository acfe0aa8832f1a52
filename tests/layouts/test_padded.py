"""The padded layout, against the reference and by example."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.reference import (
    EXTRA,
    FLOATS,
    PADS,
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
    table_of,
)
from tests.layouts.test_ragged import lists
from trajstore import InputError, LengthMismatchError, ValidationError
from trajstore.layouts import ON_REQUEST, TENSORS, Options, Rows, padded, padding_ratio, to_torch


@settings(max_examples=20, deadline=None)
@given(batch_rows, st.integers(0, 5), any_options)
def test_a_padded_batch_is_what_the_design_says(rows: list[Row], cut: int, options: Options) -> None:
    batch = padded(rows_of(*rows, cut=cut), options)
    out = batch.arrays
    assert list(out) == [*TENSORS, *EXTRA]
    assert batch.columns == tuple(name for name in out if name not in ("rewards", "versions"))
    for name in batch.columns:
        expected = block(
            [kept(one, name, options) for one in rows],
            fill_of(name, options),
            options.padding_side,
            options.pad_to_multiple_of,
        )
        same(out, name, expected, dtype_of(name, options))
        assert out[name].shape[0] == len(rows)
    same(out, "rewards", [one["reward"] for one in rows], np.float32)
    same(out, "versions", [-1 if (v := one["version_id"]) is None else v for one in rows], np.int64)

    lost = [one["length"] - (end - start) for one in rows for start, end in [bounds_of(one, options)]]
    assert (batch.cut_tokens, batch.cut_rows) == (sum(lost), sum(n > 0 for n in lost))
    assert batch.num_tokens == sum(one["length"] for one in rows) - sum(lost)
    assert batch.size == out["input_ids"].size
    assert batch.padding_ratio == (1 - batch.num_tokens / batch.size if batch.size else 0)
    assert batch.nbytes == sum(array.nbytes for array in out.values())


def batch(*rows: Row, **options: Any) -> dict[str, Any]:
    return padded(rows_of(*rows), Options(**options)).arrays


def test_masks_that_are_not_given() -> None:
    out = batch(row(), row(length=2, prompt_length=2, tokens=[5, 6]), extra=["action_mask"])
    assert out["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert out["loss_mask"].tolist() == [[0, 1, 1], [0, 0, 0]]
    assert out["action_mask"].tolist() == [[0, 1, 1], [0, 0, 0]]
    out = batch(row(loss_mask=[1, 0, 1]), row(action_mask=[1, 1, 1]), extra=["action_mask"])
    assert out["loss_mask"].tolist() == [[1, 0, 1], [0, 1, 1]]
    assert out["action_mask"].tolist() == [[1, 0, 1], [1, 1, 1]]


def test_a_missing_log_prob_is_not_probability_one() -> None:
    out = batch(row(), row(length=1, tokens=[5], prompt_length=0, log_probs=[-0.5]))["log_probs"]
    assert np.isnan(out[0]).all()
    assert out[1].tolist() == [-0.5, 0, 0]
    assert batch(row(), missing="zero")["log_probs"].tolist() == [[0, 0, 0]]


def test_missing_error_names_the_first_row_and_column() -> None:
    given_all = {name: [0.0, 0.0, 0.0] for name in FLOATS}
    batch(row(**given_all), missing="error")
    with pytest.raises(ValidationError, match=r"trajectory 1 \(id 'q'\), column 'returns'") as caught:
        batch(row(**given_all), row(**given_all | {"returns": None}, id="q"), missing="error")
    assert (caught.value.row, caught.value.id, caught.value.column) == (1, "q", "returns")
    empty = row(length=0, tokens=[], prompt_length=0)
    assert batch(empty, missing="error")["returns"].shape == (1, 0)


def test_a_users_column_pads_with_its_own_value_also_where_it_is_missing() -> None:
    short = {"length": 1, "tokens": [5], "prompt_length": 0}
    rows = [row(), row(**short, entropy=[0.25]), row(**short)]
    lacking = batch(*rows, extra=["entropy"])["entropy"]
    np.testing.assert_array_equal(lacking, [[np.nan] * 3, [0.25, -5, -5], [np.nan, -5, -5]])
    assert batch(*rows, extra=["entropy"], missing="zero")["entropy"].tolist() == [
        [0, 0, 0], [0.25, -5, -5], [0, -5, -5]
    ]  # fmt: skip


def test_an_unknown_version_is_minus_one() -> None:
    assert batch(row(version_id=None), row(version_id=0))["versions"].tolist() == [-1, 0]


def test_a_row_without_mask_and_split_is_named() -> None:
    with pytest.raises(ValidationError, match=r"trajectory 1 \(id 'w'\), column 'loss_mask': neither"):
        batch(row(), row(id="w", prompt_length=None))
    batch(row(prompt_length=None, loss_mask=[0, 0, 1]))
    batch(row(prompt_length=None, length=0, tokens=[]))


@pytest.mark.parametrize("name", ["nope", "version_segments", "reward", "log_probs", "id"])
def test_what_is_not_a_per_token_column_cannot_be_added(name: str) -> None:
    with pytest.raises(InputError, match=f"{name!r} is not a per-token column") as caught:
        batch(row(), extra=[name])
    assert all(known in str(caught.value.hint) for known in (*ON_REQUEST, "entropy"))


def test_an_empty_batch_has_shapes_and_dtypes() -> None:
    tensors = to_torch(batch(extra=["values"]))
    assert list(tensors) == [*TENSORS, "values"]
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == ((0,) if name in ("rewards", "versions") else (0, 0))
        whole = name in ("input_ids", "attention_mask", "versions")
        assert tensor.dtype == (torch.int64 if whole else torch.float32)


def test_outputs_never_alias_arrow_memory() -> None:
    given_all = {name: [0.25, 0.5, 0.75] for name in (*FLOATS, "values", "entropy")}
    masks = {name: [1, 0, 1] for name in ("attention_mask", "loss_mask", "action_mask")}
    table = table_of([row(**given_all, **masks), row(**given_all, **masks)])
    before = table.to_pylist()
    options = Options(extra=("action_mask", "values", "entropy"))
    for tensor in to_torch(padded(Rows.from_arrow(table, PADS), options).arrays).values():
        tensor.fill_(9)
    assert table.to_pylist() == before
    rows = Rows.from_arrow(table, PADS)
    again = padded(rows).arrays
    again["loss_mask"][:] = 5
    again["versions"][:] = 5
    assert padded(rows).arrays["loss_mask"].tolist() == [[1, 0, 1]] * 2
    assert rows.versions.tolist() == [4, 4]


def test_action_mask_is_memory_of_its_own() -> None:
    out = batch(row(), extra=["action_mask"])
    out["action_mask"][:] = 7
    assert out["loss_mask"].tolist() == [[0, 1, 1]]


def test_taking_rows_takes_all_of_each() -> None:
    rows = Rows.from_arrow(
        table_of([row(id="a", reward=1.0), row(id="b", reward=2.0, values=[1.0, 2.0, 3.0])]), PADS
    )
    taken = rows.take(np.array([1, 1, 0]))
    assert list(taken.ids) == ["b", "b", "a"]
    assert taken.rewards.tolist() == [2, 2, 1]
    assert lists(taken.column("values")) == [[1, 2, 3], [1, 2, 3], None]
    assert lists(taken.column("nowhere")) == [None, None, None]


@pytest.mark.parametrize(
    ("lengths", "ratio"), [([], 0), ([0, 0], 0), ([4], 0), ([4, 2], 0.25), ([4, 0, 2], 0.5), ([1, 1], 0)]
)
def test_padding_ratio(lengths: list[int], ratio: float) -> None:
    assert padding_ratio(np.array(lengths, np.int64)) == ratio


def test_a_column_of_another_length_is_named_and_never_read() -> None:
    with pytest.raises(
        LengthMismatchError, match=r"\(id 'r'\), column 'returns': it has 2 values for 3 tokens"
    ):
        batch(row(returns=[1.0, 2.0]))


def test_a_batch_without_the_wrong_row_is_made_and_one_with_it_is_not() -> None:
    wrong = {"returns": row(returns=[1.0, 2.0]), "loss_mask": row(prompt_length=None)}
    for name, bad in wrong.items():
        rows = rows_of(row(), bad, row())
        assert padded(rows.take(np.array([2, 0]))).arrays["input_ids"].shape == (2, 3)
        with pytest.raises(ValidationError, match=f"trajectory 1 .*column '{name}'"):
            padded(rows.take(np.array([2, 1])))


def test_pad_id_zero_is_an_id_like_any_other() -> None:
    out = batch(row(length=4, tokens=[5, 0, 0, 2]), row(length=1, tokens=[5], prompt_length=0))
    assert out["input_ids"].tolist() == [[5, 0, 0, 2], [5, 0, 0, 0]]
    assert out["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"missing": "none"}, "missing is 'none', expected one of nan, zero, error"),
        ({"padding_side": "up"}, "padding_side is 'up', expected one of left, right"),
        ({"truncation_side": ""}, "truncation_side is '', expected one of left, right"),
        ({"dtypes": "half"}, "dtypes is 'half', expected one of torch, compact"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0, expected at least 1"),
        ({"max_length": 0}, "max_length is 0, expected at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Options(**given)
