"""TrajectoryBatch: a lazy sequence over Arrow rows, and its way to tensors."""

import itertools
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from trajstore import (
    PartialTrajectory,
    PolicyVersion,
    SchemaError,
    Trajectory,
    TrajectoryBatch,
    ValidationError,
)
from trajstore.codec import encode, normalize
from trajstore.schema import ROW_SCHEMA, Column, list_of


def trajectory(i: int, **given: Any) -> Trajectory:
    fields = {
        "id": f"t{i}",
        "prompt_tokens": [1, 2],
        "response_tokens": list(range(10, 11 + i)),
        "reward": i / 2,
        "version": PolicyVersion(i),
    }
    return Trajectory(**fields | given)


ROWS = [trajectory(i) for i in range(6)]
NORMAL = [normalize(row) for row in ROWS]


def chunked() -> TrajectoryBatch:
    """The same rows in three chunks, one of them empty, each a slice of a longer array."""
    whole = pa.Table.from_batches([encode([trajectory(9), *ROWS, trajectory(9)])])
    return TrajectoryBatch.from_arrow(
        pa.concat_tables([whole.slice(1, 2), whole.slice(3, 0), whole.slice(3, 4)])
    )


@pytest.fixture(params=["objects", "chunks", "record batch"])
def batch(request: pytest.FixtureRequest) -> TrajectoryBatch:
    if request.param == "objects":
        return TrajectoryBatch(ROWS)
    return chunked() if request.param == "chunks" else TrajectoryBatch.from_arrow(encode(ROWS))


def test_it_is_a_sequence_of_trajectories(batch: TrajectoryBatch) -> None:
    assert len(batch) == batch.batch_size == 6
    assert list(batch) == NORMAL
    assert [batch[i] for i in range(6)] == NORMAL
    assert [batch[i] for i in range(-6, 0)] == NORMAL
    assert batch[np.int64(2)] == NORMAL[2]
    assert list(reversed(batch)) == NORMAL[::-1]
    assert NORMAL[3] in batch
    assert batch.index(NORMAL[4]) == 4
    for outside in (6, -7):
        with pytest.raises(IndexError):
            batch[outside]
    with pytest.raises(TypeError):
        batch["t1"]  # type: ignore[call-overload]  # on purpose


@pytest.mark.parametrize("step", [None, 1, 2, 7, -1, -3])
def test_slices_are_those_of_a_list(step: int | None) -> None:
    whole = chunked()
    for batch, rows in ((whole, NORMAL), (whole[1:], NORMAL[1:])):
        for start, stop in itertools.product([None, 0, 2, 5, 9, -2, -9], [None, 0, 3, 6, 9, -1, -9]):
            part = slice(start, stop, step)
            sliced = batch[part]
            assert isinstance(sliced, TrajectoryBatch)
            assert sliced.to_arrow().column("id").to_pylist() == [t.id for t in rows[part]]
            assert sliced.num_tokens == sum(t.total_length for t in rows[part])


def test_a_slice_shares_memory_and_makes_the_same_tensors(batch: TrajectoryBatch) -> None:
    again = TrajectoryBatch(ROWS[2:5]).to_tensors()
    for name, tensor in batch[2:5].to_tensors().items():
        torch.testing.assert_close(tensor, again[name], rtol=0, atol=0, equal_nan=True)


def test_numbers_of_a_batch(batch: TrajectoryBatch) -> None:
    assert batch.rewards == [0, 0.5, 1, 1.5, 2, 2.5]
    assert batch.max_length == 8
    assert batch.num_tokens == sum(range(3, 9)) == 33
    assert batch.compute_padding_ratio() == 1 - 33 / 48
    assert batch[2:3].compute_padding_ratio() == 0
    assert repr(batch) == "TrajectoryBatch(6 trajectories, 33 tokens)"


def test_version_stats_are_over_the_known_ones() -> None:
    versions = [PolicyVersion(7), None, PolicyVersion(-1), PolicyVersion(3)]
    batch = TrajectoryBatch([trajectory(i, version=v) for i, v in enumerate(versions)])
    assert batch.get_version_stats() == {
        "mean_version": 3.0,
        "min_version": -1,
        "max_version": 7,
        "version_spread": 8,
    }
    for unknown in (batch[1:2], TrajectoryBatch()):
        stats = unknown.get_version_stats()
        assert list(stats) == ["mean_version", "min_version", "max_version", "version_spread"]
        assert all(math.isnan(value) for value in stats.values())


DTYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.int64,
    "loss_mask": torch.float32,
    "log_probs": torch.float32,
    "behavior_log_probs": torch.float32,
    "rewards": torch.float32,
    "advantages": torch.float32,
    "returns": torch.float32,
    "versions": torch.int64,
}


def test_keys_and_dtypes_of_the_tensors(batch: TrajectoryBatch) -> None:
    tensors = batch.to_tensors()
    assert [(name, tensor.dtype) for name, tensor in tensors.items()] == list(DTYPES.items())
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == ((6,) if name in ("rewards", "versions") else (6, 8))


def test_values_of_the_tensors() -> None:
    rows = [
        trajectory(0, log_probs=[-0.5], advantages=[1, 2, 3], loss_mask=[0, 0, 1], version=None),
        trajectory(1, behavior_log_probs=[-1, -2], reward=math.nan, attention_mask=[0, 1, 1, 1]),
    ]
    tensors = TrajectoryBatch(rows).to_tensors(pad_token_id=99, extra=["action_mask", "values"])
    nan = math.nan
    expected = {
        "input_ids": [[1, 2, 10, 99], [1, 2, 10, 11]],
        "attention_mask": [[1, 1, 1, 0], [0, 1, 1, 1]],
        "loss_mask": [[0, 0, 1, 0], [0, 0, 1, 1]],
        "log_probs": [[0, 0, -0.5, 0], [nan] * 4],
        "behavior_log_probs": [[nan, nan, nan, 0], [0, 0, -1, -2]],
        "rewards": [0, nan],
        "advantages": [[1, 2, 3, 0], [nan] * 4],
        "returns": [[nan, nan, nan, 0], [nan] * 4],
        "versions": [-1, 1],
        "action_mask": [[0, 0, 1, 0], [0, 0, 1, 1]],
        "values": [[nan, nan, nan, 0], [nan] * 4],
    }
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name], err_msg=name)
    zeros = TrajectoryBatch(rows).to_tensors("cpu", 99, missing="zero")
    assert not any(zeros[name].isnan().any() for name in DTYPES if name != "rewards")
    with pytest.raises(ValidationError, match=r"trajectory 1 \(id 't1'\), column 'log_probs'"):
        TrajectoryBatch(rows).to_tensors(missing="error")


def test_tensors_may_be_written_in_place(batch: TrajectoryBatch) -> None:
    for tensor in batch.to_tensors(extra=["action_mask", "values"]).values():
        tensor.fill_(7)
    assert list(batch) == NORMAL


def test_a_row_that_cannot_be_masked_is_named() -> None:
    batch = TrajectoryBatch([trajectory(0), Trajectory(id="w", tokens=[1, 2, 3])])
    assert list(batch)[1].prompt_length == 0
    with pytest.raises(ValidationError, match=r"trajectory 1 \(id 'w'\), column 'loss_mask'"):
        batch.to_tensors()


def test_an_empty_batch() -> None:
    for batch in (TrajectoryBatch(), chunked()[4:2], chunked()[4:2:3]):
        assert list(batch) == []
        assert (len(batch), batch.max_length, batch.num_tokens, batch.rewards) == (0, 0, 0, [])
        assert batch.compute_padding_ratio() == 0
        tensors = batch.to_tensors()
        assert {name: tensor.dtype for name, tensor in tensors.items()} == DTYPES
        assert {tuple(tensor.shape) for tensor in tensors.values()} == {(0,), (0, 0)}
        with pytest.raises(IndexError):
            batch[0]


def test_rows_without_any_token() -> None:
    tensors = TrajectoryBatch([Trajectory(id="a"), Trajectory(id="b", reward=2)]).to_tensors(missing="error")
    assert tensors["input_ids"].shape == (2, 0)
    assert tensors["rewards"].tolist() == [0, 2]


def test_a_partial_trajectory_stays_one() -> None:
    partial = PartialTrajectory(id="p", prompt_tokens=[1], response_tokens=[2], continuation_count=2)
    batch = TrajectoryBatch([trajectory(0), partial])
    assert type(batch[0]) is Trajectory
    assert batch[1] == normalize(partial)
    assert isinstance(batch[1], PartialTrajectory)


def test_batches_compare_by_their_rows() -> None:
    assert TrajectoryBatch(ROWS) == chunked()
    assert TrajectoryBatch(ROWS) != TrajectoryBatch(ROWS[:5])
    assert TrajectoryBatch(ROWS) != ROWS
    with pytest.raises(TypeError, match="unhashable"):
        hash(TrajectoryBatch())


@pytest.mark.parametrize(
    "name", ["id", "id_hash", "length", "prompt_length", "reward", "version_id", "tokens"]
)
def test_a_column_every_batch_needs(name: str) -> None:
    table = TrajectoryBatch(ROWS).to_arrow()
    with pytest.raises(SchemaError, match=f"a batch needs the column {name!r}\n  hint: add it to columns="):
        TrajectoryBatch.from_arrow(table.drop_columns([name]))
    wrong = pa.nulls(6, pa.bool_())
    found = table.set_column(table.schema.get_field_index(name), name, wrong)
    with pytest.raises(
        SchemaError, match=f"column {name!r} has type bool, expected {ROW_SCHEMA.field(name).type}"
    ):
        TrajectoryBatch.from_arrow(found)


def test_the_few_columns_a_batch_needs_make_tensors_and_no_objects() -> None:
    names = ["id", "id_hash", "length", "prompt_length", "reward", "version_id", "tokens"]
    batch = TrajectoryBatch.from_arrow(TrajectoryBatch(ROWS).to_arrow().select(names))
    whole = TrajectoryBatch(ROWS).to_tensors()
    for name, tensor in batch.to_tensors().items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(SchemaError, match="trajectories need every column"):
        batch[0]


def test_a_users_own_columns_are_padded_on_request() -> None:
    entropy = Column("entropy", list_of(pa.float32()), "token", pad=-1.0)
    note = Column("note", pa.string())
    values = pa.array([[0.5] * 3, None, *[[0.25] * (3 + i) for i in range(2, 6)]], entropy.type)
    table = TrajectoryBatch(ROWS).to_arrow().append_column(entropy.field, values)
    batch = TrajectoryBatch.from_arrow(table.append_column(note.field, pa.nulls(6, pa.string())))
    out = batch[:2].to_tensors(extra=["entropy"])["entropy"]
    np.testing.assert_array_equal(out.numpy(), [[0.5, 0.5, 0.5, -1], [math.nan] * 4])


def test_none_inside_a_list_of_floats_is_nan_on_request_only() -> None:
    row = trajectory(0, log_probs=[None])
    with pytest.raises(ValidationError):
        TrajectoryBatch([row])
    assert TrajectoryBatch([row], nulls="nan").to_tensors()["log_probs"][0].isnan().tolist() == [
        False,
        False,
        True,
    ]
