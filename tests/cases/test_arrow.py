"""Theme: Arrow layouts that read wrongly (cases L*)."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trajstore import InputError, Trajectory, TrajectoryBatch, TrajectoryStore
from trajstore.chunks import take_rows
from trajstore.layouts import Lists, Options, Ragged, packed, padded
from trajstore.plan import Recipe, plan
from trajstore.query import connect
from trajstore.selection import seeded_keys


def test_L02_a_sliced_list_array_gives_its_own_rows() -> None:
    column = Ragged.from_arrow(pa.array([[1], [1, 2], [1, 2, 3]])[1:])
    assert column.length.tolist() == [2, 3]
    lists = Lists(["a", "b"], column.length, np.arange(2), {"ids": column})
    assert padded(lists).arrays["ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    flat = packed(lists).arrays
    assert (flat["ids"].tolist(), flat["cu_seqlens"].tolist()) == ([1, 2, 1, 2, 3], [0, 2, 5])
    rows = [Trajectory(id=str(i), tokens=list(range(i + 1)), prompt_length=1) for i in range(3)]
    sliced = TrajectoryBatch(rows)[1:]
    assert sliced.to_tensors()["input_ids"].tolist() == [[0, 1, 0], [0, 1, 2]]
    assert [t.tokens for t in sliced] == [[0, 1], [0, 1, 2]]


def test_L03_null_rows_hide_nothing_and_differ_from_empty_ones(tmp_path: Path) -> None:
    hiding = pa.ListArray.from_arrays([0, 2, 4, 6], [1, 2, 9, 9, 3, 4], mask=pa.array([False, True, False]))
    column = Ragged.from_arrow(hiding)
    assert column.length.tolist() == [2, -1, 2]
    assert column.row(1) is None
    lists = Lists(["a", "b", "c"], column.length.clip(0), np.arange(3), {"ids": column})
    assert padded(lists).arrays["ids"].tolist() == [[1, 2], [0, 0], [3, 4]]
    assert packed(lists).arrays["ids"].tolist() == [1, 2, 3, 4]
    store = TrajectoryStore.create(tmp_path / "s")
    # [] kept verbatim differs from null, which means "the slice of tokens".
    store.append(
        [
            Trajectory(id="null", tokens=[1, 2], prompt_length=1, prompt_tokens=[1]),
            Trajectory(id="empty", tokens=[1, 2], prompt_length=1),
        ]
    )
    assert store.scan().to_arrow()["prompt_tokens"].to_pylist() == [None, []]
    assert [t.prompt_tokens for t in store.scan().to_trajectories()] == [[1], []]
    counted = connect(store).sql(
        "select count(*) n, count(prompt_tokens) given, sum(coalesce(len(prompt_tokens), 0)) total "
        "from trajectories"
    )
    assert counted.to_pylist() == [{"n": 2, "given": 1, "total": 0}]


def test_L01_more_than_2_31_values_in_one_column(case: Any) -> None:
    one = pa.ListArray.from_arrays([0, 2**27], pa.array(np.zeros(2**27, np.int8)))
    column = Ragged.from_arrow(pa.chunked_array([one] * 17))
    assert column.length.sum() == 2_281_701_376
    lists = Lists([str(i) for i in range(17)], column.length, np.arange(17), {"ids": column})
    for rows in plan(lists.lengths, Recipe(4), keys=seeded_keys(lists.keys, 0)):
        batch = padded(lists.take(rows), Options(max_length=3, truncation_side="left"))
        assert batch.arrays["ids"].tolist() == [[0, 0, 0]] * len(rows)
        assert batch.cut_tokens == len(rows) * (2**27 - 3)
    one_row = Trajectory(id="x", tokens=np.zeros(2**25, np.int32), prompt_length=1)
    table = pa.concat_tables([TrajectoryBatch([one_row]).to_arrow()] * 65)  # zero-copy
    rows = TrajectoryBatch.from_arrow(table)
    assert rows.num_tokens > 2**31
    assert [len(t) for t in rows[::64].to_arrow()["tokens"]] == [2**25] * 2
    assert rows[::-1].num_tokens == rows.num_tokens
    assert [len(t) for t in take_rows(table, np.array([64, 0, 7, 3]))["tokens"]] == [2**25] * 4
    with pytest.raises(InputError, match="beyond cu_seqlens, which is int32"):
        packed(lists)
