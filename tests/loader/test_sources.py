"""What a loader reads from: nothing is copied on the way, and what cannot be read is said."""

import pickle
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

from tests.loader.test_loader import ROWS
from trajstore import (
    InputError,
    PolicyVersion,
    Trajectory,
    TrajectoryBatch,
    TrajectoryBuffer,
    TrajectoryStatus,
)
from trajstore.layouts import Lists, Ragged, Rows
from trajstore.loader import ArrowRows, TrajectoryLoader
from trajstore.loader.sources import source_of


def addresses(column: Any) -> list[int]:
    """Where the values of a list column lie."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [c.values.buffers()[1].address + c.values.offset * (c.values.type.bit_width // 8) for c in chunks]


def read(rows: Any, name: str) -> list[int]:
    return [chunk.__array_interface__["data"][0] for chunk in rows.column(name).chunks]


TABLE = TrajectoryBatch(ROWS).to_arrow()


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "log_probs"])
def test_an_arrow_table_and_a_frame_are_read_where_they_lie(name: str) -> None:
    two = pa.concat_tables([TABLE, TABLE.slice(5, 9)])
    assert read(source_of(two).rows(), name) == addresses(two.column(name))
    (batch,) = TABLE.to_batches()
    assert read(source_of(batch).rows(), name) == addresses(TABLE.column(name))
    assert read(source_of(TrajectoryBatch.from_arrow(TABLE)).rows(), name) == addresses(TABLE.column(name))
    frame = pl.from_arrow(TABLE)
    assert isinstance(frame, pl.DataFrame)
    held = frame[name].to_arrow()
    assert read(source_of(frame).rows(), name) == addresses(held) == addresses(frame[name].to_arrow())


def test_batches_are_the_same_from_everywhere() -> None:
    options: dict[str, Any] = {"batch_size": 9, "shuffle": True, "extra": ["values"]}
    expected = list(TrajectoryLoader(TrajectoryBatch(ROWS), **options))
    rows = TrajectoryBatch(ROWS).rows()
    for source in (TABLE, pl.from_arrow(TABLE), rows, pickle.loads(pickle.dumps(source_of(TABLE)))):
        for found, right in zip(TrajectoryLoader(source, **options), expected, strict=True):
            assert found["ids"] == right["ids"]
            for name, value in right.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)


def test_groups_stay_whole_from_everywhere() -> None:
    rows = [
        Trajectory(
            id=f"r{i}",
            group_id=f"g{i % 5}",
            group_size=3,
            prompt_tokens=[1],
            response_tokens=[i],
            version=PolicyVersion(0),
            status=TrajectoryStatus.COMPLETED,
        )
        for i in range(15)
    ]
    buffer = TrajectoryBuffer()
    buffer.add_batch(rows)
    sampled = buffer.get_available(0)
    for source in (TrajectoryBatch(rows), sampled, sampled[:], sampled.to_arrow()):
        batches = [batch["ids"] for batch in TrajectoryLoader(source, batch_size=4, whole_groups=True)]
        assert batches == [[f"r{i}" for i in (g, g + 5, g + 10)] for g in range(5)]
    assert list(TrajectoryLoader(buffer.get_available(0)[:0], batch_size=4, whole_groups=True)) == []


def test_any_table_with_lists() -> None:
    table = pa.table(
        {
            "note": ["a", "b", "c"],
            "x": pa.array([[1, 2], None, [3]], pa.list_(pa.int32())),
            "flags": pa.array([[True], [False, True, True], []], pa.large_list(pa.bool_())),
        }
    )
    (batch,) = TrajectoryLoader(ArrowRows(table, {"x": -1}), batch_size=3)
    assert batch["x"].tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert batch["x"].dtype == torch.int32
    assert batch["flags"].tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert batch["ids"] == ["0", "1", "2"]
    frame = pl.DataFrame({"id": ["p", "q"], "x": [[1.5], [2.5, 3.5]]})
    (batch,) = TrajectoryLoader(frame, batch_size=2)
    assert (batch["x"].tolist(), batch["ids"]) == ([[1.5, 0], [2.5, 3.5]], ["p", "q"])


def test_sets_made_elsewhere_load_through_their_rows() -> None:
    """What an ILQL set is to the loader: list columns of several lengths, each with a pad value."""
    tokens, states = [[5, 6, 7], [8, 9]], [[0, 2, 3], [1, 2]]

    def ragged(rows: list[list[int]]) -> Ragged:
        return Ragged.from_arrow(pa.array(rows, pa.large_list(pa.int32())))

    class Set:
        def rows(self, columns: Any = ()) -> Lists:
            made = {"input_ids": ragged(tokens), "states_ixs": ragged(states), "dones": ragged([[1], [0]])}
            return Lists(
                ["a", "b"],
                made["input_ids"].length,
                np.arange(2),
                made,
                dtypes=dict.fromkeys(made, np.int64),
                pads={"states_ixs": 3},
            )

    (batch,) = TrajectoryLoader(Set(), batch_size=2)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["states_ixs"].tolist() == [[0, 2, 3], [1, 2, 3]]
    assert batch["dones"].tolist() == [[1], [0]]
    assert batch["input_ids"].dtype == torch.int64
    (packed,) = TrajectoryLoader(Set(), batch_size=2, layout="packed", max_length=1)
    assert packed["input_ids"].tolist() == [5, 8]
    assert packed["dones_cu_seqlens"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("wrong", [None, 3, "store", [1, 2], {"a": 1}])
def test_what_is_no_source_is_said(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"a loader cannot read a .*\n.*Scan"):
        TrajectoryLoader(wrong, batch_size=2)
    with pytest.raises(InputError, match="no list column of numbers"):
        list(TrajectoryLoader(pa.table({"a": [1]}), batch_size=2))


def test_a_sliced_table_is_pickled_as_its_rows() -> None:
    large = TrajectoryBatch(ROWS * 100).to_arrow()
    sent = pickle.dumps(ArrowRows(large.slice(17, 2)))
    assert len(sent) < 2 * large.slice(17, 2).nbytes + (64 << 10)
    rows = pickle.loads(sent).rows()
    assert isinstance(rows, Rows)
    assert rows.ids == [row.id for row in (ROWS * 100)[17:19]]
