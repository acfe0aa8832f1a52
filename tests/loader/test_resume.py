"""Stopped at any batch and resumed, an epoch is whole: directly, in torch's loader and in torchdata's."""

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.loader.test_loader import ROWS, flat, store_of
from trajstore import InputError, TrajectoryBatch, TrajectoryStore
from trajstore.loader import TrajectoryLoader
from trajstore.query import fresh

OPTIONS: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 5, "bucket_window": 2}

OLD_TORCHDATA = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
"""torchdata 0.11 calls something that torch 2.13 warns of."""

LEFT_EARLY = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A worker that is sending a tensor when it is told to end may abort at its exit, in torch's own thread;
torch then says so in the `__del__` of an iterator that nobody has any more."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    return store_of(tmp_path_factory.mktemp("resume") / "store", ROWS[:13], ROWS[13:])


def ids(batches: Any) -> list[list[str]]:
    return [batch["ids"] for batch in batches]


def whole(store: TrajectoryStore, epoch: int, **options: Any) -> list[list[str]]:
    loader = TrajectoryLoader(store.scan(), **OPTIONS | options)
    loader.set_epoch(epoch)
    return ids(loader)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("epoch", [0, 2])
def test_directly(store: TrajectoryStore, prefetch: int, epoch: int) -> None:
    expected = whole(store, epoch)
    for stop in range(len(expected) + 1):
        loader = TrajectoryLoader(store.scan(), **OPTIONS, prefetch=prefetch)
        loader.set_epoch(epoch)
        batches = iter(loader)
        before = [next(batches)["ids"] for _ in range(stop)]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        batches.close()
        again = TrajectoryLoader(store.scan(), **OPTIONS, prefetch=prefetch)
        again.load_state_dict(state)
        assert again.state_dict()["batch"] == stop
        assert before + ids(again) == expected
        assert ids(again) == whole(store, epoch + 1), "and the next epoch follows"


def test_at_the_end_of_an_epoch_the_next_one_follows(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), **OPTIONS)
    ids(loader)
    again = TrajectoryLoader(store.scan(), **OPTIONS)
    again.load_state_dict(loader.state_dict())
    assert ids(again) == whole(store, 1)


def test_a_state_is_that_of_every_rank(store: TrajectoryStore) -> None:
    ranks = [TrajectoryLoader(store.scan(), **OPTIONS, rank=r, world_size=2) for r in range(2)]
    running = [iter(rank) for rank in ranks]
    before = [[next(batches)["ids"] for _ in range(2)] for batches in running]
    states = [rank.state_dict() for rank in ranks]
    for batches in running:
        batches.close()
    assert states[0] == states[1]
    for rank in range(2):
        again = TrajectoryLoader(store.scan(), **OPTIONS, rank=rank, world_size=2)
        again.load_state_dict(states[0])
        assert before[rank] + ids(again) == whole(store, 0, rank=rank, world_size=2)


def test_a_state_of_something_else_is_refused(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), **OPTIONS)
    next(iter(loader))
    state = loader.state_dict()
    for other in (
        TrajectoryLoader(store.scan("reward > 3"), **OPTIONS),
        TrajectoryLoader(store.scan(), **OPTIONS | {"seed": 6}),
        TrajectoryLoader(store.scan(), **OPTIONS | {"batch_size": 8}),
        TrajectoryLoader(store.scan(), **OPTIONS, world_size=2),
    ):
        other.load_state_dict(state)
        with pytest.raises(InputError, match="of other rows, or of a loader with other options"):
            next(iter(other))
    for wrong in ({}, {**state, "batch": "x"}, {**state, "version": 2}):
        with pytest.raises(InputError, match="state"):
            loader.load_state_dict(wrong)


def test_set_epoch_begins_afresh(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), **OPTIONS)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(3)
    assert loader.state_dict()["batch"] == 0
    assert ids(loader) == whole(store, 3)


def test_a_loader_goes_to_another_process_as_a_recipe(store: TrajectoryStore) -> None:
    gated = store.scan(where=fresh(at=6, max_staleness=3))
    loader = TrajectoryLoader(gated, **OPTIONS)
    expected = ids(loader)
    sent = pickle.dumps(loader)
    assert len(sent) < 3000
    other = pickle.loads(sent)
    other.set_epoch(0)
    assert ids(other) == expected
    few = TrajectoryBatch(ROWS * 50)[:2]
    assert len(pickle.dumps(TrajectoryLoader(few, batch_size=2))) < 64 << 10


# In the loaders of others


def spawned(loader: TrajectoryLoader, workers: int, kind: Any = DataLoader, **options: Any) -> Any:
    if workers:
        options |= {"num_workers": workers, "multiprocessing_context": "spawn"}
    return kind(loader, batch_size=None, **options)


def test_nested_tensors_come_from_workers_whole(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), **(OPTIONS | {"layout": "nested"}))
    expected = list(loader)
    loader.set_epoch(0)
    for ours, theirs in zip(expected, spawned(loader, 2), strict=True):
        assert theirs["ids"] == ours["ids"]
        for name in ("input_ids", "attention_mask", "log_probs"):
            assert theirs[name].is_nested
            assert torch.equal(theirs[name].offsets(), ours[name].offsets())
            assert torch.equal(theirs[name].values().nan_to_num(), ours[name].values().nan_to_num())
        assert (theirs["input_ids"] * theirs["attention_mask"]).is_nested  # columns are of one shape


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_in_torchs_data_loader(store: TrajectoryStore, workers: int) -> None:
    expected = whole(store, 1)
    loader = TrajectoryLoader(store.scan(), **OPTIONS, reuse_buffers=bool(workers))
    loader.set_epoch(1)
    made = spawned(loader, workers)
    assert len(made) == len(expected)
    batches = list(made)
    assert ids(batches) == expected
    loader.set_epoch(1)
    for found, right in zip(batches, loader, strict=True):
        assert found.keys() == right.keys()
        for name, value in right.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("workers", "stops"), [(0, range(7)), (2, [3])])
def test_torchs_data_loader_resumes(store: TrajectoryStore, workers: int, stops: Any) -> None:
    expected = whole(store, 1)
    for stop in stops:
        loader = TrajectoryLoader(store.scan(), **OPTIONS)
        loader.set_epoch(1)
        state = loader.state_dict(batch=stop)
        again = TrajectoryLoader(store.scan(), **OPTIONS)
        again.load_state_dict(state)
        assert expected[:stop] + ids(spawned(again, workers)) == expected


@OLD_TORCHDATA
@LEFT_EARLY
@pytest.mark.parametrize(("workers", "stops"), [(0, range(7)), pytest.param(2, [3], marks=pytest.mark.slow)])
def test_torchdatas_loader_resumes(store: TrajectoryStore, workers: int, stops: Any) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    expected = whole(store, 0)
    assert len(expected) == 6
    for stop in stops:
        made = spawned(TrajectoryLoader(store.scan(), **OPTIONS), workers, stateful)
        batches = iter(made)
        before = [next(batches)["ids"] for _ in range(stop)]
        state = pickle.loads(pickle.dumps(made.state_dict()))
        del batches, made
        again = spawned(TrajectoryLoader(store.scan(), **OPTIONS), workers, stateful)
        again.load_state_dict(state)
        rest = ids(again)
        assert before + rest == expected, stop
        assert flat(before + rest) == list(dict.fromkeys(flat(expected)))


@OLD_TORCHDATA
def test_torchdatas_loader_goes_on_with_the_next_epoch(store: TrajectoryStore) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    made = stateful(TrajectoryLoader(store.scan(), **OPTIONS), batch_size=None)
    assert ids(made) == whole(store, 0)
    again = stateful(TrajectoryLoader(store.scan(), **OPTIONS), batch_size=None)
    again.load_state_dict(made.state_dict())
    assert ids(again) == whole(store, 1)


def test_a_state_of_so_many_workers_needs_as_many(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), **OPTIONS)
    loader.load_state_dict({**loader.state_dict(), "worker": 1, "workers": 2})
    with pytest.raises(InputError, match="worker 1 of 2, this is 0 of 1"):
        next(iter(loader))


def test_a_forked_worker_is_refused(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), batch_size=4, prefetch=0)
    loader._pid += 1  # what a fork does to it, without the danger of one in the process of all tests
    with pytest.raises(InputError, match=r"forked with an open loader.*\n.*spawn"):
        next(iter(loader))


@pytest.mark.slow
def test_an_error_in_a_worker_reaches_the_caller(store: TrajectoryStore) -> None:
    loader = TrajectoryLoader(store.scan(), batch_size=40, missing="error")
    with pytest.raises(Exception, match=r"\(id 'r0'\), column 'log_probs'"):
        list(spawned(loader, 1))
