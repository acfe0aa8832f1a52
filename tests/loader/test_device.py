"""The way to a device, on the CPU: the tensors that the layouts give, from narrow copies and one gather."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.loader.test_loader import ROWS
from trajstore import Trajectory, TrajectoryBatch, layouts
from trajstore.layouts import Lists, Options, Ragged
from trajstore.loader import TrajectoryLoader
from trajstore.loader.device import SLOTS, Device, here

CPU = torch.device("cpu")
OPTIONS = [
    {},
    {"pad_token_id": 7, "missing": "zero", "extra": ("action_mask", "values"), "pad_to_multiple_of": 8},
    {"padding_side": "left", "max_length": 5, "truncation_side": "left"},
    {"dtypes": "compact", "max_length": 4, "full_sequence": True},
]


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert found[name] == value


def through(layout: str, options: Options, rows: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    device = Device(CPU, layout, options)
    for _ in range(SLOTS + 1):  # every staging memory, and one of them again
        sent = device.send(rows)
    made = sent.wait()
    expected = layouts.LAYOUTS[layout](rows, options)
    assert (made.columns, made.num_tokens, made.size) == (
        expected.columns,
        expected.num_tokens,
        expected.size,
    )
    assert (made.cut_tokens, made.cut_rows) == (expected.cut_tokens, expected.cut_rows)
    return made.arrays, layouts.to_torch(expected.arrays)


@pytest.mark.parametrize("layout", ["padded", "packed", "prompt_response"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [1, 17, 40])
def test_it_gives_what_the_layouts_give(layout: str, options: dict[str, Any], count: int) -> None:
    if layout == "packed":
        options = options | {"padding_side": "right"}
    equal(*through(layout, Options(**options), TrajectoryBatch(ROWS[:count]).rows()))


@pytest.mark.parametrize("layout", ["padded", "packed", "prompt_response"])
def test_batches_without_tokens_or_rows(layout: str) -> None:
    empty = Trajectory(id="e", prompt_tokens=[], response_tokens=[], loss_mask=[])
    for rows in ([], [empty], [empty, ROWS[1]]):
        equal(*through(layout, Options(), TrajectoryBatch(rows).rows()))


def test_columns_of_their_own_lengths_and_pads() -> None:
    def ragged(rows: list[list[float]], dtype: Any) -> Ragged:
        ends = np.cumsum([0, *map(len, rows)])
        return Ragged(
            (np.array([x for row in rows for x in row], dtype),),
            np.zeros(len(rows), np.int64),
            ends[:-1],
            np.diff(ends),
        )

    columns = {
        "ids": ragged([[1, 2], [3], [4, 5, 6]], np.int32),
        "states": ragged([[9], [], [8, 7]], np.int16),
        "dones": ragged([[1], [0, 1], [1]], np.int8),
        "small": ragged([[1], [0], [1]], np.int8),
    }
    rows = Lists(
        ["a", "b", "c"],
        columns["ids"].length,
        np.arange(3),
        columns,
        dtypes={"ids": np.int64, "states": np.int64, "dones": np.float32, "small": np.int64},
        pads={"states": -100, "dones": 0.5, "small": 1000},
        scalar_columns={"score": np.arange(3.0)},
    )
    for layout in ("padded", "packed"):
        found, expected = through(layout, Options(pad_to_multiple_of=2), rows)
        equal(found, expected)
    assert through("padded", Options(), rows)[0]["dones"].tolist() == [[1, 0.5], [0, 1], [1, 0.5]]


def test_narrow_columns_travel_and_derived_ones_do_not() -> None:
    rows = TrajectoryBatch([Trajectory(id="r", prompt_tokens=[1] * 400, response_tokens=[2] * 600)]).rows()
    sent = Device(CPU, "padded", Options(missing="zero")).send(rows)
    assert set(sent.batch.arrays) == set(layouts.TENSORS)
    assert 4000 < sent.nbytes < 4200, "int32 ids and a few numbers a row; masks and absent floats are derived"


def test_staging_memory_stops_growing_and_serves_many_batches() -> None:
    rng = np.random.default_rng(0)
    device = Device(CPU, "padded", Options(missing="zero"))
    held = []
    for _ in range(60):
        row = Trajectory(prompt_tokens=[1], response_tokens=np.arange(rng.integers(1, 3000)))
        device.send(TrajectoryBatch([row]).rows())
        held.append(device.staging_bytes)
    assert held[-1] == held[30]
    assert held[-1] < 3 * SLOTS * 3000 * 4 + 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", ["padded", "packed", "nested", "prompt_response"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_on_a_gpu_batches_are_those_of_the_cpu(layout: Any, prefetch: int) -> None:
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "layout": layout, "extra": ["values"]}
    batch = TrajectoryBatch(ROWS)
    on_the_cpu = list(TrajectoryLoader(batch, **options))
    there = TrajectoryLoader(batch, device="cuda", prefetch=prefetch, **options)
    for _ in range(20):
        for found, expected in zip(there, on_the_cpu, strict=True):
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert found[name].is_cuda or name in ("cu_seqlens",)
                    a, b = found[name], value
                    if a.is_nested:
                        a, b = a.values(), b.values()
                    torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0, equal_nan=True)
        there.set_epoch(0)


def test_a_device_that_is_one_already_stays_it() -> None:
    assert here(CPU) == CPU
    assert here(torch.device("cuda:1")) == torch.device("cuda:1")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
def test_batches_made_ahead_go_to_the_device_that_this_thread_chose() -> None:
    with torch.cuda.device(1):
        for batch in TrajectoryLoader(TrajectoryBatch(ROWS), batch_size=7, device="cuda", prefetch=2):
            assert batch["input_ids"].device == torch.device("cuda:1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_memory_stops_growing() -> None:
    rng = np.random.default_rng(0)
    device = Device(torch.device("cuda"), "padded", Options(missing="zero"))
    held = []
    for _ in range(500):
        rows = [
            Trajectory(prompt_tokens=[1], response_tokens=np.arange(n)) for n in rng.integers(9, 32768, 8)
        ]
        device.send(TrajectoryBatch(rows).rows()).wait()
        held.append(device.staging_bytes)
    assert held[-1] == held[250]
