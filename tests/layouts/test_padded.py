"""Addresses of list columns, and padding against a reference written from the design in plain Python."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import InputError, ValidationError
from trajstore.layouts import ON_REQUEST, SCALARS, TENSORS, Ragged, Rows, pad, padded, padding_ratio, to_torch
from trajstore.schema import BY_NAME, Column, list_of

Row = dict[str, Any]

FLOATS = ("log_probs", "behavior_log_probs", "advantages", "returns")
PADS = {"entropy": -5.0, "flags": 1.0}
SCHEMA = pa.schema(
    [
        *(BY_NAME[name].field for name in SCALARS),
        *(BY_NAME[name].field for name in ("tokens", "attention_mask", "loss_mask", "action_mask")),
        *(BY_NAME[name].field for name in (*FLOATS, "values")),
        Column("entropy", list_of(pa.float64()), "token", pad=PADS["entropy"]).field,
        Column("flags", list_of(pa.bool_()), "token", pad=PADS["flags"]).field,
        BY_NAME["version_segments"].field,
    ]
)  # fmt: skip


def lists(ragged: Ragged) -> list[list[Any] | None]:
    rows = [ragged.row(i) for i in range(len(ragged))]
    return [None if row is None else row.tolist() for row in rows]


# Addresses


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


@settings(max_examples=60, deadline=None)
@given(ragged_rows, st.data())
def test_addresses_survive_any_slicing_and_chunking(
    rows: list[list[int] | None], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    whole = pa.array([[7], *rows, [7, 7]], list_of(pa.int32()))
    ends = [0, *cuts, len(rows)]
    column = pa.chunked_array([whole.slice(1 + a, b - a) for a, b in itertools.pairwise(ends)])
    assert lists(Ragged.from_arrow(column)) == rows


@settings(max_examples=60, deadline=None)
@given(ragged_rows, st.integers(0, 3), st.integers(-3, 3))
def test_pad_is_what_a_loop_would_write(rows: list[list[int] | None], spare: int, fill: int) -> None:
    width = max((len(row or []) for row in rows), default=0) + spare
    null = np.arange(len(rows) * width).reshape(len(rows), width)
    expected = [
        [row[t] if t < len(row) else fill for t in range(width)] if row is not None else null[i].tolist()
        for i, row in enumerate(rows)
    ]
    ragged = Ragged.from_arrow(pa.array(rows, list_of(pa.int32())))
    out = pad(ragged, width, fill, np.int64, null=null)
    assert out.dtype == np.int64
    assert out.tolist() == expected
    plain = [row if rows[i] is not None else [fill] * width for i, row in enumerate(expected)]
    assert pad(ragged, width, fill, np.float32).tolist() == plain


# One padded batch


def naive(rows: Sequence[Row], pad_token_id: int, missing: str, extra: Sequence[str]) -> dict[str, list[Any]]:
    width = max((row["length"] for row in rows), default=0)
    lacking = math.nan if missing == "nan" else 0.0

    def grid(name: str, fill: float, default: Callable[[Row, int], float]) -> list[list[float]]:
        out = []
        for row in rows:
            line = []
            for t in range(width):
                if t >= row["length"]:
                    line.append(fill)
                elif row[name] is None:
                    line.append(default(row, t))
                else:
                    line.append(row[name][t])
            out.append(line)
        return out

    def floats(name: str) -> list[list[float]]:
        return grid(name, PADS.get(name, 0.0), lambda row, t: lacking)

    def response(row: Row, t: int) -> float:
        return float(t >= row["prompt_length"])

    def as_loss_mask(row: Row, t: int) -> float:
        return response(row, t) if row["loss_mask"] is None else float(row["loss_mask"][t])

    out = {
        "input_ids": grid("tokens", pad_token_id, lambda row, t: 1 / 0),
        "attention_mask": grid("attention_mask", 0, lambda row, t: 1),
        "loss_mask": grid("loss_mask", 0, response),
        "log_probs": floats("log_probs"),
        "behavior_log_probs": floats("behavior_log_probs"),
        "rewards": [row["reward"] for row in rows],
        "advantages": floats("advantages"),
        "returns": floats("returns"),
        "versions": [-1 if row["version_id"] is None else row["version_id"] for row in rows],
    }
    for name in extra:
        out[name] = grid(name, 0, as_loss_mask) if name == "action_mask" else floats(name)
    return out


def one_row(draw: st.DrawFn) -> Row:
    length = draw(st.integers(0, 6))
    floats = st.floats(width=32, allow_infinity=False)

    def column(values: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(values, min_size=length, max_size=length))

    bit = st.integers(0, 1)
    row: Row = {name: column(bit) for name in ("attention_mask", "loss_mask", "action_mask")}
    row |= {name: column(floats) for name in (*FLOATS, "values", "entropy")}
    row["flags"] = column(st.booleans())
    split = st.integers(0, length)
    return row | {
        "id": "a",
        "id_hash": 1,
        "length": length,
        "prompt_length": draw(split if row["loss_mask"] is None else st.none() | split),
        "reward": draw(st.floats(width=32)),
        "version_id": draw(st.none() | st.integers(0, 2**40)),
        "tokens": draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
        "version_segments": None,
    }


batch_rows = st.lists(st.composite(one_row)(), max_size=5)


def table_of(rows: Sequence[Row], cut: int = 0) -> pa.Table:
    """The rows in up to two chunks, each a slice of a longer array."""
    filler = dict.fromkeys(SCHEMA.names) | {
        "id": "x",
        "id_hash": 0,
        "length": 1,
        "reward": 0.0,
        "tokens": [7],
    }
    whole = pa.Table.from_pylist([filler, *rows, filler], SCHEMA)
    return pa.concat_tables([whole.slice(1, cut), whole.slice(1 + cut, len(rows) - cut)])


@settings(max_examples=80, deadline=None)
@given(batch_rows, st.integers(0, 5), st.integers(0, 9), st.sampled_from(["nan", "zero"]))
def test_a_padded_batch_is_what_the_design_says(rows: list[Row], cut: int, pad_id: int, missing: Any) -> None:
    extra = ("action_mask", "values", "token_rewards", "entropy", "flags")
    all_rows = [row | {"token_rewards": None} for row in rows]
    arrow_rows = Rows.from_arrow(table_of(rows, min(cut, len(rows))), PADS)
    out = padded(arrow_rows, pad_token_id=pad_id, missing=missing, extra=extra)
    expected = naive(all_rows, pad_id, missing, extra)
    assert list(out) == [*TENSORS, *extra] == list(expected)
    width = max((row["length"] for row in rows), default=0)
    for name, array in out.items():
        whole = name in ("input_ids", "attention_mask", "versions")
        assert array.dtype == (np.int64 if whole else np.float32), name
        shape = (len(rows),) if name in ("rewards", "versions") else (len(rows), width)
        np.testing.assert_array_equal(
            array, np.array(expected[name], array.dtype).reshape(shape), err_msg=name
        )


def row(**given: Any) -> Row:
    return (
        dict.fromkeys(SCHEMA.names)
        | {
            "id": "r",
            "id_hash": 1,
            "length": 3,
            "prompt_length": 1,
            "reward": 0.5,
            "version_id": 4,
            "tokens": [5, 6, 7],
        }
        | given
    )


def batch(*rows: Row, **options: Any) -> dict[str, Any]:
    return padded(Rows.from_arrow(table_of(rows), PADS), **options)


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


def test_an_unknown_choice_for_missing_is_refused() -> None:
    with pytest.raises(InputError, match="'none', expected one of nan, zero, error"):
        batch(row(), missing="none")


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
    for tensor in to_torch(
        padded(Rows.from_arrow(table, PADS), extra=["action_mask", "values", "entropy"])
    ).values():
        tensor.fill_(9)
    assert table.to_pylist() == before
    rows = Rows.from_arrow(table, PADS)
    again = padded(rows, extra=["action_mask"])
    again["loss_mask"][:] = 5
    again["versions"][:] = 5
    assert padded(rows, extra=["action_mask"])["loss_mask"].tolist() == [[1, 0, 1]] * 2
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
