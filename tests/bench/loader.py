"""The loader as a whole: cache build, opening, planning, batches against memcpy and peers, memory over time.

Run: python tests/bench/loader.py [--rows N] [--rounds N] [--long]. Needs room for 50 bytes a token
(`--folder`). Rows are synthetic: log-normal lengths (mean ~1k, at most 8192), seven list columns, 22 bytes a
token in memory, 36 in a padded batch. torch runs at one thread. Comparisons take turns round by round in
one process; numbers are medians of CPU time, ratios are to numpy's memcpy of the same number of bytes into
memory that is used again. The peers make the same padded batch of the same rows from the same Arrow table:

- torch.tensor per row: `to_pylist` was done before; only tensors and pad_sequence are counted.
- pad_sequence: over torch.from_numpy of zero-copy slices, the fast hand-written way.
- datasets: `set_format("torch")`, then pad_sequence; left out when it is not installed.

The kernels alone are in tests/bench/layouts.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence

from trajstore import TrajectoryStore
from trajstore.codec import encode
from trajstore.layouts import READ, kernel
from trajstore.loader import TrajectoryLoader
from trajstore.plan import Recipe, plan
from trajstore.schema import SCHEMA
from trajstore.trajectory import Trajectory

OUT = Console(width=118, highlight=False)
TORCH = {"tokens": torch.int64, "attention_mask": torch.int64}


def rows_of(count: int, seed: int, mean: float) -> pa.Table:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0, count), 8, 8192).astype(np.int64)
    total = int(lengths.sum())
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mask = np.repeat(np.arange(total // 20 + 1) % 2, rng.integers(5, 60, total // 20 + 1))[:total]
    mask = np.resize(mask, total).astype(np.int8)
    probs = (-rng.gamma(0.8, 1.1, total) * mask).astype(np.float32)
    advantages = (np.repeat(rng.standard_normal(count), lengths) * mask).astype(np.float32)
    values = {
        "tokens": (rng.zipf(1.2, total) % 50_000).astype(np.int32),
        "attention_mask": np.ones(total, np.int8),
        "loss_mask": mask,
        "log_probs": probs,
        "behavior_log_probs": probs,
        "advantages": advantages,
        "returns": advantages,
        "length": lengths.astype(np.int32),
        "prompt_length": np.ones(count, np.int32),
        "response_length": (lengths - 1).astype(np.int32),
    }
    one = Trajectory(prompt_tokens=[1], response_tokens=[2], reward=1.0)
    table = pa.Table.from_batches([encode([one])])
    table = table.take(pa.array(np.zeros(count, np.int64)))
    ids = [f"row {seed} {i}" for i in range(count)]
    keys = rng.integers(-(2**63), 2**63 - 1, count)
    for name, column in [("id", pa.array(ids)), ("id_hash", pa.array(keys)), *values.items()]:
        kind = SCHEMA.field(name).type
        if pa.types.is_list(kind):
            column = pa.ListArray.from_arrays(pa.array(ends), pa.array(column), type=kind)
        table = table.set_column(
            table.schema.get_field_index(name), SCHEMA.field(name), pa.array(column, kind)
        )
    return table


def cpu(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def resident() -> float:
    """MB of this process in memory that are no file's."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024


def report(title: str, rows: list[tuple[str, str, str]]) -> None:
    made = Table(title=title, title_justify="left", header_style="bold")
    for name in ("what", "measured", "asked"):
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*row)
    OUT.print(made)


def cache_build(store: TrajectoryStore, folder: Path, rounds: int) -> None:
    files = store.scan().data_files()
    built, bare, size = [], [], 0
    for _ in range(rounds):
        shutil.rmtree(folder, ignore_errors=True)
        built.append(cpu(lambda: store.scan().rows(READ)))
        bare.append(cpu(lambda: [pq.read_table(f, columns=list(READ), use_threads=False) for f in files]))
        size = sum(p.stat().st_size for p in folder.rglob("*.arrow"))
    build, decode = (statistics.median(t) / size * 1e9 for t in (built, bare))
    opened = statistics.median(cpu(lambda: store.scan().rows(READ)) for _ in range(9))
    report(
        "Column cache",
        [
            ("build, CPU-s per GB decoded", f"{build:.2f}", "≤ 1.5"),
            ("bare pq.read_table of the same columns", f"{decode:.2f}", ""),
            ("build / bare decode", f"{build / decode:.2f}", ""),
            ("opening this store, cached", f"{opened * 1e3:.1f} ms CPU", ""),
        ],
    )


def opening(folder: Path) -> None:
    store = TrajectoryStore.create(folder / "wide")
    for i in range(10):
        store.append(rows_of(10_000, i, mean=16))
    store.scan().rows(READ)
    wall = []
    for _ in range(9):
        start = time.perf_counter()
        store.scan().rows(READ)
        wall.append(time.perf_counter() - start)
    spent = statistics.median(cpu(lambda: store.scan().rows(READ)) for _ in range(9))
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 8192, 1_000_000)
    keys = rng.integers(0, 2**63, 1_000_000).astype(np.uint64)
    plans = {
        "shuffle, 256 rows": Recipe(batch_size=256),
        "shuffle, windows of 64, 8 ranks": Recipe(batch_size=64, bucket_window=64, world_size=8),
        "65,536 padded tokens, windows of 64, 8 ranks": Recipe(
            max_tokens=65_536, bucket_window=64, world_size=8
        ),
    }
    rows = [
        (f"opening 100k rows in 10 files, {kind}", f"{value * 1e3:.1f} ms", "< 50 ms")
        for kind, value in (("wall", statistics.median(wall)), ("CPU", spent))
    ]
    for name, recipe in plans.items():
        seconds = min(cpu(lambda r=recipe: plan(lengths, r, keys=keys)) for _ in range(3))
        rows.append((f"planning 1M rows, {name}", f"{seconds:.2f} s CPU", "< 1 s"))
    report("Opening and planning", rows)


def padded_peers(table: pa.Table) -> dict[str, Callable[[Any], Any]]:
    """Makers of a padded batch from positions of rows of a table."""
    columns = {name: table.column(name).combine_chunks() for name in READ}
    flat = {n: torch.from_numpy(c.values.to_numpy().copy()) for n, c in columns.items()}
    ends = columns["tokens"].offsets.to_numpy().astype(np.int64).tolist()
    lists = {name: column.to_pylist() for name, column in columns.items()}

    def kind(name: str) -> torch.dtype:
        return TORCH.get(name, torch.float32)

    def loop(chosen: Any) -> Any:
        return {
            name: pad_sequence([torch.tensor(rows[i], dtype=kind(name)) for i in chosen], batch_first=True)
            for name, rows in lists.items()
        }

    def slices(chosen: Any) -> Any:
        return {
            name: pad_sequence([values[ends[i] : ends[i + 1]] for i in chosen], batch_first=True).to(
                kind(name)
            )
            for name, values in flat.items()
        }

    makers = {"torch.tensor per row": loop, "pad_sequence of slices": slices}
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        datasets.disable_progress_bars()
        made = datasets.Dataset(table.select(list(READ)).combine_chunks()).with_format("torch")

        def hub(chosen: Any) -> Any:
            batch = made[list(chosen)]
            return {n: pad_sequence(list(batch[n]), batch_first=True).to(kind(n)) for n in READ}

        makers["datasets, torch format"] = hub
    return makers


def turns(loader: TrajectoryLoader) -> Iterator[dict[str, Any]]:
    """Batches without end."""
    while True:
        yield from loader


def batches(store: TrajectoryStore, rounds: int, sizes: list[int]) -> None:
    table = store.scan(columns=["id", *READ]).to_arrow()
    position = {name: i for i, name in enumerate(table.column("id").to_pylist())}
    peers = padded_peers(table)
    for size in sizes:
        options: dict[str, Any] = {"batch_size": size, "shuffle": True, "prefetch": 0, "tail": "drop"}
        scan = store.scan()
        loaders = {
            "ours, padded, memory used again": TrajectoryLoader(scan, reuse_buffers=True, **options),
            "ours, padded, fresh memory": TrajectoryLoader(scan, **options),
            "ours, packed, memory used again": TrajectoryLoader(
                scan, layout="packed", reuse_buffers=True, **options
            ),
            "ours, padded, windows of 16": TrajectoryLoader(
                scan, reuse_buffers=True, bucket_window=16, **options
            ),
        }
        for loader in loaders.values():  # an epoch before maps the pages of the cache, once for all others
            for _ in loader:
                pass
        running = {name: turns(loader) for name, loader in loaders.items()}
        spent: dict[str, list[float]] = {name: [] for name in [*running, *peers]}
        copies: dict[str, list[float]] = {name: [] for name in running}
        memory: dict[int, Any] = {}
        for number in range(rounds + 2):
            chosen = []
            for name, stream in running.items():
                start = time.process_time()
                batch = next(stream)
                seconds = time.process_time() - start
                if name == "ours, padded, memory used again":
                    chosen = [position[i] for i in batch["ids"]]
                    right = {k: v.clone() for k, v in batch.items() if k in ("input_ids", "returns")}
                nbytes = sum(t.nbytes for t in batch.values() if isinstance(t, torch.Tensor))
                grown = memory.get(id(stream))
                if grown is None or len(grown[0]) < nbytes:
                    # Written once: memory of zeros that nobody wrote is one page, read over and over.
                    grown = memory[id(stream)] = (np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8))
                copy = cpu(lambda g=grown, n=nbytes: np.copyto(g[0][:n], g[1][:n]))
                if number >= 2:  # the first ones fault their memory in
                    spent[name].append(seconds)
                    copies[name].append(copy)
            for name, make in peers.items():
                start = time.process_time()
                made = make(chosen)
                if number >= 2:
                    spent[name].append(time.process_time() - start)
                assert torch.equal(made["tokens"], right["input_ids"]), name
                assert torch.equal(made["returns"], right["returns"]), name
        asked = {
            "ours, padded, memory used again": "C ≤ 0.9, numpy ≤ 1.4",
            "ours, packed, memory used again": "C ≤ 1.7, numpy ≤ 4",
            "ours, padded, windows of 16": "C ≤ 2",
        }
        wanted = {"torch.tensor per row": 20, "pad_sequence of slices": 4, "datasets, torch format": 8}
        base = statistics.median(spent["ours, padded, memory used again"])
        lines = []
        for name, times in spent.items():
            median = statistics.median(times)
            if name in copies:
                ratio = median / statistics.median(copies[name])
                loader = loaders[name]
                lines.append(
                    (
                        f"{name} (padding {loader.stats().padding_ratio:.0%})",
                        f"{median * 1e3:.2f} ms, {ratio:.2f} x memcpy",
                        asked.get(name, ""),
                    )
                )
            else:
                lines.append(
                    (name, f"{median * 1e3:.2f} ms, {median / base:.1f} x ours", f"≥ {wanted[name]} x")
                )
        report(f"Batches of {size} rows, whole loader, {kernel()} kernel", lines)


def steady(store: TrajectoryStore, count: int) -> None:
    lines = []
    for name, options in {
        "padded, memory used again, prefetch 2": {"reuse_buffers": True, "prefetch": 2},
        "padded, fresh, prefetch 2": {"prefetch": 2},
        "packed, fresh, prefetch 0": {"layout": "packed", "prefetch": 0},
    }.items():
        loader = TrajectoryLoader(store.scan(), batch_size=16, shuffle=True, **options)
        held, start = [], time.process_time()
        for number, _ in enumerate(turns(loader)):
            if number % (count // 4) == 0:
                held.append(round(resident()))
            if number == count:
                break
        lines.append((f"{name}, {count:,} batches of 16", f"{held} MB", "flat"))
        lines.append(("", f"{loader.stats()}; {time.process_time() - start:.1f} s CPU", ""))
    report("Memory over a long run", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--long", action="store_true", help="10,000 batches in the last part, not 1,000")
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made)
        os.environ["TRAJSTORE_CACHE"] = str(folder / "cache")
        store = TrajectoryStore.create(folder / "store")
        for i in range(4):
            store.append(rows_of(given.rows // 4, i, mean=1000))
        OUT.print(
            f"load {os.getloadavg()}, {os.cpu_count()} cores, {store.count():,} rows, {kernel()} kernel"
        )
        cache_build(store, folder / "cache", 3)
        opening(folder)
        batches(store, given.rounds, given.sizes)
        steady(store, 10_000 if given.long else 1_000)


if __name__ == "__main__":
    main()
