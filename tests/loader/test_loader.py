"""Epochs over stores, scans, samples and batches: every row once, in an order that files do not decide."""

import gc
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from trajstore import InputError, PolicyVersion, Trajectory, TrajectoryBatch, TrajectoryStore, ValidationError
from trajstore.layouts import LAYOUTS, TENSORS, Options
from trajstore.loader import TrajectoryLoader
from trajstore.query import fresh, stratified_sample
from trajstore.schema import Column, list_of


def rollouts(count: int = 40) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        response = int(rng.integers(1, 12))
        rows.append(
            Trajectory(
                id=f"r{i}",
                prompt_tokens=rng.integers(0, 99, 2),
                response_tokens=rng.integers(0, 99, response),
                log_probs=-rng.random(response) if i % 3 else [],
                advantages=rng.standard_normal(2 + response),
                loss_mask=[0, 0, *rng.integers(0, 2, response)] if i % 4 else [],
                reward=float(i),
                version=PolicyVersion(i % 7) if i % 5 else None,
            )
        )
    return rows


ROWS = rollouts()


def store_of(path: Path, *appends: Sequence[Trajectory], **options: Any) -> TrajectoryStore:
    store = TrajectoryStore.create(path, **options)
    for rows in appends:
        store.append(rows)
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    """Three files, whose rows lie in another order than they came in (by version)."""
    return store_of(tmp_path_factory.mktemp("loader") / "store", ROWS[:17], ROWS[17:18], ROWS[18:])


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    """The same rows backwards in one file."""
    return store_of(tmp_path_factory.mktemp("loader") / "moved", ROWS[::-1])


def ids(loader: TrajectoryLoader) -> list[list[str]]:
    return [batch["ids"] for batch in loader]


def flat(epoch: list[list[str]]) -> list[str]:
    return [id for batch in epoch for id in batch]


@pytest.mark.parametrize("size", [1, 7, 40, 100])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_an_epoch_is_all_rows_once(
    store: TrajectoryStore, size: int, shuffle: bool, window: int | None
) -> None:
    loader = TrajectoryLoader(store.scan(), batch_size=size, shuffle=shuffle, bucket_window=window)
    for _ in range(2):
        epoch = ids(loader)
        assert sorted(flat(epoch)) == sorted(row.id for row in ROWS)
        assert len(epoch) == len(loader) == -(-40 // size)
        assert {len(batch) for batch in epoch[:-1]} <= {size} or shuffle


def test_without_shuffle_rows_come_in_order_of_arrival(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), batch_size=9)
    assert flat(ids(loader)) == [row.id for row in ROWS]
    assert flat(ids(loader)) == [row.id for row in ROWS]


def test_what_a_batch_holds(store: TrajectoryStore) -> None:
    for batch in TrajectoryLoader(store.scan(), batch_size=16):
        assert list(batch) == [*TENSORS, "ids", "num_tokens", "padding_ratio"]
        valid = batch["attention_mask"].sum().item()
        assert batch["num_tokens"] == valid
        assert batch["padding_ratio"] == pytest.approx(1 - valid / batch["input_ids"].numel())
        assert type(batch["num_tokens"]) is int
        assert len(batch["ids"]) == len(batch["rewards"])


@pytest.mark.parametrize("missing", ["nan", "zero"])
def test_tensors_are_those_of_a_batch_of_the_same_rows(store: TrajectoryStore, missing: Any) -> None:
    by_id = {row.id: row for row in ROWS}
    options: dict[str, Any] = {"pad_token_id": 5, "missing": missing, "extra": ("action_mask", "values")}
    loader = TrajectoryLoader(store.scan(), batch_size=6, shuffle=True, bucket_window=2, **options)
    for batch in loader:
        expected = TrajectoryBatch([by_id[id] for id in batch["ids"]]).to_tensors(**options)
        assert list(batch)[: len(expected)] == list(expected)
        for name, tensor in expected.items():
            assert batch[name].dtype == tensor.dtype
            torch.testing.assert_close(batch[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_a_shuffle_depends_on_seed_and_epoch(store: TrajectoryStore) -> None:
    def epoch(seed: int, number: int) -> list[str]:
        loader = TrajectoryLoader(store.scan(), batch_size=8, shuffle=True, seed=seed)
        loader.set_epoch(number)
        return flat(ids(loader))

    orders = {(seed, number): tuple(epoch(seed, number)) for seed in range(3) for number in range(3)}
    assert len(set(orders.values())) == 9
    assert tuple(epoch(1, 2)) == orders[1, 2]
    loader = TrajectoryLoader(store.scan(), batch_size=8, shuffle=True, seed=1)
    assert [tuple(flat(ids(loader))) for _ in range(3)] == [orders[1, number] for number in range(3)]
    loader.set_epoch(1)
    assert tuple(flat(ids(loader))) == orders[1, 1]


@pytest.mark.parametrize("window", [None, 3])
def test_a_shuffle_does_not_depend_on_files(
    store: TrajectoryStore, moved: TrajectoryStore, window: int | None
) -> None:
    orders = [
        ids(TrajectoryLoader(source, batch_size=6, shuffle=True, seed=3, bucket_window=window))
        for source in (
            store.scan(),
            moved.scan(),
            moved.scan().to_batch(),
            TrajectoryBatch(ROWS[7:] + ROWS[:7]),
        )
    ]
    assert orders[0] == orders[1] == orders[2] == orders[3]
    assert store.scan().to_batch()[0].id != moved.scan().to_batch()[0].id


def test_bucket_windows_lower_padding(store: TrajectoryStore) -> None:
    def ratio(window: int | None) -> float:
        loader = TrajectoryLoader(store.scan(), batch_size=5, shuffle=True, bucket_window=window)
        batches = list(loader)
        size = sum(batch["input_ids"].numel() for batch in batches)
        return 1 - sum(batch["num_tokens"] for batch in batches) / size

    assert ratio(None) == pytest.approx(ratio(1))
    assert ratio(8) < ratio(3) < ratio(None)


def test_it_takes_batches_scans_gates_and_samples(store: TrajectoryStore) -> None:
    newest = store.scan(where=fresh(at=6, max_staleness=1))
    expected = {row.id for row in ROWS if row.version and row.version.version_id >= 5}
    assert set(flat(ids(TrajectoryLoader(newest, batch_size=3)))) == expected
    sample = stratified_sample(store.scan(), 12, at=6, seed=4)
    found = flat(ids(TrajectoryLoader(sample, batch_size=5, shuffle=True)))
    assert sorted(found) == sorted(sample.to_polars()["id"])
    assert len(found) == 12
    assert flat(ids(TrajectoryLoader(TrajectoryBatch(ROWS[:4]), batch_size=3))) == ["r0", "r1", "r2", "r3"]
    assert ids(TrajectoryLoader(store.scan("reward < 0"), batch_size=3, shuffle=True, bucket_window=2)) == []


def test_an_empty_source_has_no_batches(tmp_path: Path) -> None:
    loader = TrajectoryLoader(TrajectoryStore.create(tmp_path / "empty").scan(), batch_size=3, shuffle=True)
    assert (len(loader), list(loader)) == (0, [])


def test_two_iterations_at_once_do_not_disturb_each_other(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), batch_size=10)
    assert [(a["ids"], b["ids"]) for a, b in zip(loader, loader, strict=True)] == [
        (epoch, epoch) for epoch in ids(loader)
    ]


def test_rows_stay_what_they_were_when_tensors_are_written(store: TrajectoryStore) -> None:
    batch = store.scan().to_batch()
    loader = TrajectoryLoader(batch, batch_size=7, extra=["action_mask", "values"])
    first = [{k: v.clone() for k, v in b.items() if isinstance(v, torch.Tensor)} for b in loader]
    for made in loader:
        for value in made.values():
            if isinstance(value, torch.Tensor):
                value.fill_(3)
        made["ids"].clear()
    for before, after in zip(first, loader, strict=True):
        for name, tensor in before.items():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert [row.id for row in batch] == [row.id for row in ROWS]
    assert store.scan().to_trajectories() == list(batch)


def test_a_row_that_cannot_be_masked_is_named(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", ROWS[:2], [Trajectory(id="w", tokens=[1, 2])])
    with pytest.raises(ValidationError, match=r"\(id 'w'\), column 'loss_mask'"):
        list(TrajectoryLoader(store.scan(), batch_size=2))
    assert len(list(TrajectoryLoader(store.scan("prompt_length is not null"), batch_size=2))) == 1


def test_missing_error_names_the_row(store: TrajectoryStore) -> None:
    with pytest.raises(ValidationError, match=r"\(id 'r0'\), column 'log_probs'"):
        next(iter(TrajectoryLoader(store.scan(), batch_size=40, missing="error")))


def test_a_users_own_column_comes_along(tmp_path: Path) -> None:
    entropy = Column("entropy", list_of(pa.float32()), "token", pad=-1.0)
    flag = Column("flag", list_of(pa.bool_()), "token")
    store = TrajectoryStore.create(tmp_path / "store", extra=[entropy, flag])
    table = TrajectoryBatch(ROWS[:2]).to_arrow()
    lengths = table.column("length").to_pylist()
    table = table.append_column(entropy.field, pa.array([[0.5] * lengths[0], None], entropy.type))
    store.append(table.append_column(flag.field, pa.array([None, [True] * lengths[1]], flag.type)))
    (batch,) = TrajectoryLoader(store.scan(), batch_size=2, extra=["entropy", "flag", "flag"])
    for row, length in enumerate(lengths):
        value = math.nan if row else 0.5
        np.testing.assert_array_equal(
            batch["entropy"][row, :length].numpy(), np.full(length, value, np.float32)
        )
        assert batch["entropy"][row, length:].tolist() == [-1] * (max(lengths) - length)
    assert batch["flag"][1].sum() == lengths[1]
    with pytest.raises(InputError, match=r"'nope' is not a per-token column.*\n.*entropy"):
        list(TrajectoryLoader(store.scan(), batch_size=2, extra=["nope"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"batch_size": 2, "bucket_window": 0}, "bucket_window is 0, expected at least 1"),
        ({"batch_size": 2, "extra": ["log_probs"]}, "'log_probs' is in every batch already"),
        ({"batch_size": 2, "extra": ["reward"]}, "'reward' is in every batch already, or is not a per-token"),
    ],
)
def test_options_are_checked_before_anything_is_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrajectoryLoader(None, **options)  # type: ignore[arg-type]  # nothing may touch the source


def loader_threads() -> int:
    return sum(thread.name == "trajstore-loader" for thread in threading.enumerate())


def test_leaving_an_epoch_early_leaves_no_thread(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), batch_size=2, prefetch=3)
    for _ in range(5):
        for batch in loader:
            assert len(batch["ids"]) == 2
            break
    gc.collect()
    assert loader_threads() == 0


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_batch_in_memory_used_again_lives_until_the_next_is_asked_for(
    store: TrajectoryStore, prefetch: int
) -> None:
    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "missing": "zero"}
    expected = TrajectoryLoader(store.scan(), **options)
    again = TrajectoryLoader(store.scan(), reuse_buffers=True, prefetch=prefetch, **options)
    for _ in range(3):
        for batch, right in zip(again, expected, strict=True):
            time.sleep(0.001)  # for the thread to go on
            for name in TENSORS:
                assert torch.equal(batch[name], right[name]), name


def test_memory_used_again_is_used_again() -> None:
    rows = TrajectoryBatch([Trajectory(prompt_tokens=[1], response_tokens=[2] * 4000) for _ in range(64)])
    loader = TrajectoryLoader(rows, batch_size=4, reuse_buffers=True, prefetch=2)
    places = {batch["input_ids"].data_ptr() for _ in range(3) for batch in loader}
    assert len(places) == 4


@pytest.mark.parametrize("layout", ["padded", "packed", "nested", "prompt_response"])
def test_layouts_are_those_of_layouts(store: TrajectoryStore, layout: Any) -> None:
    by_id = {row.id: row for row in ROWS}
    for batch in TrajectoryLoader(store.scan(), batch_size=7, layout=layout, dtypes="compact"):
        rows = TrajectoryBatch([by_id[id] for id in batch["ids"]]).rows()
        made = LAYOUTS[layout](rows, Options(dtypes="compact"))
        for name, value in made.arrays.items():
            found = batch[name]
            if not isinstance(value, np.ndarray):
                assert found == value
                continue
            if found.is_nested:
                assert found.size(0) == len(batch["ids"])
                found = found.values()
            np.testing.assert_array_equal(found.numpy(), value)
            assert found.numpy().dtype == value.dtype


def test_a_budget_counts_rows_as_they_are_cut() -> None:
    rows = TrajectoryBatch(
        [Trajectory(id=str(i), prompt_tokens=[1], response_tokens=[2] * 20) for i in range(6)]
    )
    batches = list(TrajectoryLoader(rows, max_tokens=12, max_length=4))
    assert [batch["ids"] for batch in batches] == [["0", "1", "2"], ["3", "4", "5"]]
    assert [batch["cut_tokens"] for batch in batches] == [51, 51]


def test_thousands_of_batches_leave_nothing_behind() -> None:
    loader = TrajectoryLoader(TrajectoryBatch(ROWS), batch_size=1, prefetch=2)
    list(loader)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(60):
        for batch in loader:
            del batch
    gc.collect()
    assert loader.stats().batches == 61 * 40
    assert loader_threads() == 0
    assert len(gc.get_objects()) - before < 500
