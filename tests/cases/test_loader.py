"""Theme: loaders that leak, hang, repeat or change what is stored (cases D*, L06, L07)."""

import gc
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trajstore import PolicyVersion, Trajectory, TrajectoryBatch, TrajectoryStore, ValidationError
from trajstore.layouts import Options, Ragged, packed, padded, prompt_response
from trajstore.loader import TrajectoryLoader
from trajstore.query import connect
from trajstore.store.cache import ColumnCache
from trajstore.store.datafile import DataFile
from trajstore.store.place import Place


def row(name: str, length: int, **more: Any) -> Trajectory:
    return Trajectory(id=name, prompt_tokens=[1], response_tokens=np.arange(length - 1), **more)


def resident() -> int:
    """Bytes of this process in memory that are no file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def test_D02_what_is_done_to_a_batch_does_not_reach_the_store(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append([row("a", 3, log_probs=[-0.5, -1.0]), row("b", 2, log_probs=[-2.0])])
    for layout, reuse in itertools.product(("padded", "packed", "nested", "prompt_response"), (False, True)):
        loader = TrajectoryLoader(
            store.scan(), batch_size=2, layout=layout, reuse_buffers=reuse, missing="zero"
        )
        for _ in range(3):
            (batch,) = loader
            found = batch["log_probs"]
            values = found.values() if found.is_nested else found
            assert sorted(values[values != 0].tolist()) == [-2.0, -1.0, -0.5]
            values[...] = 99
            values.clamp_(max=7).masked_fill_(torch.ones_like(values, dtype=torch.bool), 1)
            batch["input_ids"].fill_(5) if not found.is_nested else batch["input_ids"].values().fill_(5)
    assert [list(t.log_probs) for t in store.scan().to_trajectories()] == [[0.0, -0.5, -1.0], [0.0, -2.0]]


def test_D02_what_is_done_to_a_batch_does_not_reach_rows_in_memory() -> None:
    """Contiguous rows of one chunk: where a view of Arrow's memory would be the cheap way."""
    kept = TrajectoryBatch([row("a", 3, log_probs=[-0.5, -1.0], reward=1.0, version=PolicyVersion(3))])
    for _ in range(2):
        loaded = [
            next(iter(TrajectoryLoader(kept, batch_size=1, layout=layout, missing="zero")))
            for layout in ("padded", "packed", "nested", "prompt_response")
        ]
        for tensors in (kept.to_tensors(missing="zero"), *loaded):
            assert tensors["rewards"].tolist() == [1.0]
            assert tensors["versions"].tolist() == [3]
            for value in tensors.values():
                if isinstance(value, torch.Tensor):
                    (value.values() if value.is_nested else value).fill_(1)
        (back,) = kept
        assert (list(back.tokens), list(back.log_probs)) == ([1, 0, 1], [0.0, -0.5, -1.0])
        assert (back.reward, back.version) == (1.0, PolicyVersion(3))
    rows = kept.rows()
    for _ in range(2):
        for layout in (padded, packed, prompt_response):
            made = layout(rows, Options(missing="zero")).arrays
            assert (made["rewards"].tolist(), made["versions"].tolist()) == ([1.0], [3])
            for array in made.values():
                if isinstance(array, np.ndarray):
                    array.fill(1)


def test_D03_memory_that_is_used_again_stops_growing() -> None:
    rng = np.random.default_rng(0)
    rows = TrajectoryBatch([row(str(i), int(n)) for i, n in enumerate(rng.integers(100, 4096, 400))])
    loader = TrajectoryLoader(rows, batch_size=8, shuffle=True, prefetch=4, reuse_buffers=True)
    largest, held = 0, []
    for epoch in range(8):
        for batch in loader:
            largest = max(largest, sum(t.nbytes for t in batch.values() if isinstance(t, torch.Tensor)))
        held.append(resident())
        assert loader.stats().batches == 50 * (epoch + 1)
    assert held[-1] - held[2] < 3 * largest, held
    assert loader.stats().rows == 3200


def test_D04_reading_again_and_again_does_not_grow(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    rng = np.random.default_rng(0)
    store.append([row(str(i), 200, log_probs=rng.random(199)) for i in range(1500)])
    before, held = pa.total_allocated_bytes(), []
    for _ in range(12):
        epoch = 0
        for batch in TrajectoryLoader(store.scan(), batch_size=64, shuffle=True):
            epoch += sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
        del batch
        gc.collect()
        held.append(resident())
    assert held[-1] < 1.2 * held[4], held
    assert held[-1] - held[4] < 3 * epoch, "of 7 epochs, so no epoch leaves its batches behind"
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_D05_a_cached_file_is_unlinked_and_never_cut_or_written_again(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append([row(str(i), 5000) for i in range(8)])
    loader = TrajectoryLoader(store.scan(), batch_size=1, prefetch=0)
    epoch = iter(loader)
    first = next(epoch)["input_ids"].clone()
    cache, (place, *_) = ColumnCache(), store.scan().data_files()
    mine = [e for e in cache.entries() if e.data_file == Path(place).stem]
    inodes = {e.path: e.path.stat().st_ino for e in mine}
    held = [e.path.open("rb") for e in mine]  # or a new file could get an inode that is free again
    assert cache.remove([mine[0].data_file]) == sum(e.bytes for e in mine)
    assert len(list(TrajectoryLoader(store.scan(), batch_size=1))) == 8  # decodes them again
    assert all(e.path.stat().st_ino != inodes[e.path] for e in mine)
    assert all(len(file.read()) == e.bytes for file, e in zip(held, mine, strict=True))
    for file in held:
        file.close()
    assert all(torch.equal(batch["input_ids"], first) for batch in epoch)


def test_D08_a_filter_that_keeps_rows_of_one_shard_gives_both_ranks_as_many_batches(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append([row(f"a{i}", 3, reward=float(i < 7)) for i in range(8)])
    store.append([row(f"b{i}", 3, reward=float(i < 1)) for i in range(8)])
    kept = store.scan("reward > 0")
    ranks = [[b["ids"] for b in TrajectoryLoader(kept, batch_size=2, rank=r, world_size=2)] for r in (0, 1)]
    assert [len(rank) for rank in ranks] == [2, 2]
    assert sorted(name for rank in ranks for batch in rank for name in batch) == sorted(
        kept.to_polars()["id"]
    )


@pytest.mark.parametrize("tail", ["keep", "drop", "repeat"])
def test_D08_ranks_have_as_many_batches_and_whole_groups(tmp_path: Path, tail: Any) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    for shard in range(3, 9):  # 6 shards of 3 to 8 rows, in groups of up to 4
        store.append([row(f"{shard}-{i}", 5 + i, group_id=f"{shard}-{i // 4}") for i in range(shard)])
    scan = store.scan("length > 5")
    every = set(scan.to_polars()["id"])
    for options in ({"batch_size": 4}, {"batch_size": 4, "whole_groups": True}, {"max_tokens": 64}):
        ranks = [
            [b["ids"] for b in TrajectoryLoader(scan, rank=r, world_size=2, tail=tail, **options)]
            for r in range(2)
        ]
        assert len(ranks[0]) == len(ranks[1]) > 0
        assert all(batch for rank in ranks for batch in rank)
        seen = [name for rank in ranks for batch in rank for name in batch]
        if tail == "keep":
            assert sorted(seen) == sorted(every)
        elif tail == "drop":
            assert len(seen) == len(set(seen))
            assert set(seen) <= every
        else:
            assert set(seen) == every
        if options.get("whole_groups"):
            groups = [{name[:2] + str(int(name[2:]) // 4) for name in b} for rank in ranks for b in rank]
            assert tail == "repeat" or sum(map(len, groups)) == len(set().union(*groups))


def test_D08_five_rows_on_two_ranks() -> None:
    batch = TrajectoryBatch([row(str(i), 3) for i in range(5)])
    ranks = [list(TrajectoryLoader(batch, batch_size=2, rank=r, world_size=2)) for r in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    assert all(b["ids"] for rank in ranks for b in rank), "a batch without rows trains nothing"
    assert sorted(name for rank in ranks for b in rank for name in b["ids"]) == list("01234")


def test_D10_a_token_budget_counts_what_a_batch_takes(case: Any) -> None:
    def batches(lengths: list[int], budget: int, **options: Any) -> list[int]:
        rows = [Trajectory(id=f"r{i}", tokens=[1] * n, loss_mask=[1] * n) for i, n in enumerate(lengths)]
        loader = TrajectoryLoader(TrajectoryBatch(rows), max_tokens=budget, **options)
        made = list(loader)
        assert all(b["input_ids"].numel() <= budget for b in made)
        return [len(b["ids"]) for b in made]

    sevens, over, exact, empty = case["cases"]
    assert batches(sevens["lengths"], sevens["max_tokens"]) == [1] * 8
    with pytest.raises(ValidationError, match="21 tokens of the 20 of max_tokens"):
        batches(over["lengths"], over["max_tokens"])
    assert batches(exact["lengths"], exact["max_tokens"]) == [1, 1]
    assert sum(batches(empty["lengths"], empty["max_tokens"])) == 2
    assert batches([4, 1, 1, 1], 8) == [2, 2]  # 2 x 4 padded, not 4 + 1 + 1 + 1
    assert batches([4, 1, 1, 1], 8, layout="packed") == [4]


def test_L06_what_goes_to_a_worker_is_the_rows_it_needs(tmp_path: Path) -> None:
    large = TrajectoryBatch([row(str(i), 1000) for i in range(500)])
    two = large[7:9]
    assert len(pickle.dumps(TrajectoryLoader(two, batch_size=2))) < 2 * 2 * 4000 + (64 << 10)
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(large)
    scan = TrajectoryLoader(store.scan("id = '8'"), batch_size=2)
    list(scan)
    assert len(pickle.dumps(scan)) < 64 << 10, "a recipe, whatever it has read"


def test_L06_rows_on_their_way_to_a_worker_are_sent_without_their_neighbours() -> None:
    large = pa.array(np.zeros((5000, 1000), np.int32).tolist(), pa.list_(pa.int32()))
    column = Ragged.from_arrow(large)
    limit = 2 * 4000 + (64 << 10)
    for one in (Ragged.from_arrow(large.slice(7, 1)), column.take(np.array([7]))):
        sent = pickle.dumps(one)
        assert len(sent) < limit
        values = pickle.loads(sent).row(0)
        assert values is not None
        assert values.tolist() == [0] * 1000
    table = pa.table({"ids": large})
    loader = TrajectoryLoader(table.slice(7, 1), batch_size=1)
    list(loader)
    assert len(pickle.dumps(loader)) < limit


@pytest.mark.parametrize("writer", ["pyarrow", "polars"])
def test_L07_lists_that_span_pages_are_whole(tmp_path: Path, writer: str) -> None:
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 9, 131072), [], None, rng.integers(0, 9, 131072), [7]]
    field = pa.field("x", pa.list_(pa.field("element", pa.int64(), False)))
    table = pa.table([pa.array(lists, field.type)], schema=pa.schema([field]))
    if writer == "pyarrow":
        pq.write_table(table, tmp_path / "f.parquet", data_page_size=1024, write_batch_size=64)
    else:
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        frame.write_parquet(tmp_path / "f.parquet", data_page_size=1024)
    place = Place.of(tmp_path)
    file = DataFile("f.parquet", 5, (tmp_path / "f.parquet").stat().st_size)
    for _ in range(2):
        found, _ = ColumnCache(tmp_path / "cache").open(place, [file], table.schema)
        assert found["x"].to_pylist() == table["x"].to_pylist()
        assert found["x"].null_count == 1


def test_L07_every_reader_gives_long_and_empty_and_null_lists_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = TrajectoryStore.create(tmp_path / "s")
    given = [rng.integers(0, 9, 131072), [], None, rng.integers(0, 9, 131072), [7]]
    rows = []
    for i, tokens in enumerate(given):
        prompt: Any = {"prompt_tokens": [2]} if tokens is None else {}
        tokens = [2] if tokens is None else tokens
        rows.append(Trajectory(id=str(i), tokens=tokens, prompt_length=len(tokens), **prompt))
    store.append(rows)
    expected = [[] if t is None else list(t) for t in given]
    expected[2] = [2]
    nulls = [False, True, True, False, False]  # the slice of tokens; [] where it is none
    for scan in (store.scan(), store.scan("length >= 0")):
        table = scan.to_arrow()
        assert table["tokens"].to_pylist() == expected
        assert table["prompt_tokens"].is_null().to_pylist() == nulls
    for trusted in (False, True):
        with connect(store, trusted=trusted) as connection:
            found = connection.sql(
                "select tokens, prompt_tokens is null as none from trajectories order by id"
            )
        assert found["tokens"].to_pylist() == expected
        assert found["none"].to_pylist() == nulls
