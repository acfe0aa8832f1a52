"""The buffer next to a deque and to a numpy scan: draws, upkeep, memory, threads, in one interleaved run.

Run: python tests/bench/buffer.py [--rows N] [--rounds N] [--seconds N] [--only PART]. A million rows of 200
versions come in version order; a gap of at most 8 is available. CPU time of the process, medians. Contenders:

- trajstore: the verbs of TrajectoryBuffer, which return batches of rows (`to_tensors` is timed on its own).
- deque: objects with a version, filtered by a list comprehension at each call, then random.sample, as
  frameworks do. Stratified: lists by gap, the same share of each. Removing: a new deque of what is left.
- numpy scan: the version column of the same rows as an array, compared as a whole; rng.choice of the
  positions. Stratified: argsort of the gaps that are left. It returns positions only, and removes nothing.

Removing takes out the rows of one version: each contender starts every round with all of them.
Targets are those of the project.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trajstore import PolicyVersion, Trajectory, TrajectoryBatch, TrajectoryBuffer, TrajectoryStatus
from trajstore.codec import encode
from trajstore.loader import TrajectoryLoader

VERSIONS, GAP = 200, 8


class Light:
    """What a deque of trajectories is scanned for: enough for its times, not for its memory."""

    __slots__ = ("version",)

    def __init__(self, version: int) -> None:
        self.version = version


def trajectory(
    i: int, version: int, tokens: int, rng: np.random.Generator, plain: bool = False
) -> Trajectory:
    prompt = tokens // 4
    size = tokens - prompt
    numbers = {
        "tokens": rng.integers(0, 150_000, tokens).astype(np.int32),
        "behavior_log_probs": rng.standard_normal(tokens).astype(np.float32),
        "log_probs": rng.standard_normal(tokens).astype(np.float32),
        "advantages": rng.standard_normal(tokens).astype(np.float32),
        "loss_mask": np.r_[np.zeros(prompt, np.int8), np.ones(size, np.int8)],
    }
    return Trajectory(
        id=f"row-{i}",
        group_id=f"group-{i // 8}",
        group_size=8,
        prompt_length=prompt,
        response_length=size,
        reward=float(i % 2),
        version=PolicyVersion(version),
        status=TrajectoryStatus.COMPLETED,
        **({name: values.tolist() for name, values in numbers.items()} if plain else numbers),
    )


def full(count: int) -> tuple[TrajectoryBuffer, np.ndarray]:
    """A buffer of short rows, and their versions; the rows of one batch are made anew for each."""
    buffer = TrajectoryBuffer(max_size=count, max_staleness=GAP)
    rng = np.random.default_rng(0)
    template = encode([trajectory(i, 0, 8, rng) for i in range(256)])
    versions = np.arange(count) * VERSIONS // count
    for start in range(0, count, 256):
        part = versions[start : start + 256]
        batch = template.slice(0, len(part))
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns["id"] = pa.array([f"row-{i}" for i in range(start, start + len(part))])
        columns["group_id"] = pa.array([f"group-{i // 8}" for i in range(start, start + len(part))])
        for name in ("version_id", "oldest_version_id", "newest_version_id"):
            columns[name] = pa.array(part)
        buffer.add_batch(pa.record_batch(list(columns.values()), schema=batch.schema))
    return buffer, versions


def take_turns(
    contenders: dict[str, Callable[[], Any]], rounds: int, before: Callable[[int], None] | None = None
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    for number in range(rounds + 1):
        if before is not None:
            before(number)
        for name, run in contenders.items():
            start = time.process_time_ns()
            kept = run()
            times[name].append((time.process_time_ns() - start) / 1e9)
            del kept
    gc.enable()
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def deque_stratified(rows: deque[Light], n: int, current: int) -> list[Light]:
    strata = defaultdict(list)
    for row in rows:
        if current - row.version <= GAP:
            strata[row.version].append(row)
    share = max(1, n // len(strata))
    return [row for rows in strata.values() for row in random.sample(rows, min(share, len(rows)))]


def numpy_stratified(versions: np.ndarray, n: int, current: int, rng: np.random.Generator) -> np.ndarray:
    there = np.flatnonzero(current - versions <= GAP)
    there = there[rng.permutation(len(there))]
    gaps = current - versions[there]
    order = np.argsort(gaps, kind="stable")
    sizes = np.bincount(gaps)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return there[order[rank < -(-n // np.count_nonzero(sizes))][:n]]


def stats_of(versions: np.ndarray) -> tuple[Any, ...]:
    return len(versions), versions.max() - versions.mean(), versions.max() - versions.min()


def draws(count: int, rounds: int) -> None:
    started = time.process_time()
    buffer, versions = full(count)
    print(
        f"{count} rows of 8 tokens in {VERSIONS} versions added in {time.process_time() - started:.1f} s CPU"
    )
    objects = deque(map(Light, versions.tolist()))
    current, rng = VERSIONS - 1, np.random.default_rng(0)

    def drawn(n: int) -> dict[str, Callable[[], Any]]:
        return {
            "trajstore": lambda: buffer.sample(n, current),
            "deque": lambda: random.sample([t for t in objects if current - t.version <= GAP], n),
            "numpy": lambda: rng.choice(np.flatnonzero(current - versions <= GAP), n, replace=False),
        }

    def removing() -> dict[str, Callable[[], Any]]:
        floor = iter(range(1, VERSIONS))
        return {
            "trajstore": lambda: buffer.remove_stale(next(floor) + GAP),
            "deque": lambda: deque(t for t in objects if t.version >= 1),
            "numpy": lambda: int((versions < 1).sum()),
        }

    verbs = {
        "sample 32": (drawn(32), 2),
        "sample 1024": (drawn(1024), 2),
        "stratified 1024": (
            {
                "trajstore": lambda: buffer.sample(1024, current, stratified=True),
                "deque": lambda: deque_stratified(objects, 1024, current),
                "numpy": lambda: numpy_stratified(versions, 1024, current, rng),
            },
            8,
        ),
        "get_stats": (
            {
                "trajstore": buffer.get_stats,
                "deque": lambda: (
                    sum(VERSIONS - 1 - t.version for t in objects) / len(objects),
                    max(t.version for t in objects),
                    min(t.version for t in objects),
                ),
                "numpy": lambda: stats_of(versions),
            },
            2,
        ),
        "remove_stale": (removing(), 2),
    }
    print(f"\n{'CPU us, median':20}{'trajstore':>11}{'deque':>11}{'numpy':>9}{'x deque':>9}{'x numpy':>9}")
    for verb, (contenders, target) in verbs.items():
        taken = take_turns(contenders, rounds)
        ours, theirs, scan = (taken[name] for name in ("trajstore", "deque", "numpy"))
        word = "reached" if theirs / ours >= 50 and scan / ours >= target else "MISSED"
        print(
            f"{verb:20}{ours * 1e6:11.0f}{theirs * 1e6:11.0f}{scan * 1e6:9.0f}{theirs / ours:9.0f}"
            f"{scan / ours:9.1f}  {word}: 50x and {target}x"
        )


def adding(rounds: int) -> None:
    rng = np.random.default_rng(0)
    print()
    for plain in (True, False):
        rows = [trajectory(i, 0, 1000, rng, plain) for i in range(256)]
        buffer = TrajectoryBuffer(max_size=2048)  # full after eight rounds: then the oldest groups go

        def anew(number: int, rows: list[Trajectory] = rows) -> None:
            """Rows of a run are of other groups each time; the same ones again would be one huge group."""
            for i, row in enumerate(rows):
                row.id, row.group_id = f"{number}-{i}", f"{number}-{i // 8}"

        contenders: dict[str, Callable[[], Any]] = {
            "codec": lambda rows=rows: encode(rows),
            "add_batch": lambda rows=rows, buffer=buffer: buffer.add_batch(rows),
        }
        taken = take_turns(contenders, rounds, before=anew)
        ratio = taken["add_batch"] / taken["codec"]
        print(
            f"{'reached' if ratio <= 1.2 else 'MISSED'}: add_batch of 256 rows of 1000 tokens, "
            f"{'lists' if plain else 'numpy'}: {taken['add_batch'] * 1e3:.2f} ms, {ratio:.2f}x encode, "
            "target 1.2x"
        )


def tensors(rounds: int) -> None:
    rng = np.random.default_rng(0)
    buffer = TrajectoryBuffer(max_size=10_000, max_staleness=GAP)
    for start in range(0, 10_000, 250):
        buffer.add_batch([trajectory(start + i, start // 500, 1000, rng) for i in range(250)])
    rows = buffer.get_available(19)
    loader = TrajectoryLoader(
        TrajectoryBatch.from_arrow(rows.to_arrow()), batch_size=256, shuffle=True, prefetch=0
    )
    taking = iter(loader)

    def loaded() -> Any:
        nonlocal taking
        try:
            return next(taking)
        except StopIteration:
            taking = iter(loader)
            return next(taking)

    taken = take_turns(
        {
            "loader": loaded,
            "sample": lambda: buffer.sample(256, 19),
            "sample, to_tensors": lambda: buffer.sample(256, 19).to_tensors(),
        },
        rounds,
    )
    ratio = taken["sample, to_tensors"] / taken["loader"]
    print(
        f"\n{'reached' if ratio <= 2 else 'MISSED'}: 256 sampled rows of 1000 tokens to padded tensors "
        f"{taken['sample, to_tensors'] * 1e3:.1f} ms, loader {taken['loader'] * 1e3:.1f} ms: {ratio:.2f}x, "
        "target 2x"
    )


def memory() -> None:
    """Resident memory before and after, in a process of its own for each kind.

    All hold the same values. Frameworks keep lists, as their engines and JSON give them; objects of numpy
    arrays are the least that a deque can hold.
    """
    import subprocess
    import sys

    found = {}
    for kind in ("arrow", "buffer", "lists", "numpy"):
        done = subprocess.run(
            [sys.executable, __file__, "--hold", kind], capture_output=True, text=True, check=True
        )
        found[kind] = int(done.stdout)
    arrow, ours, lists = found["arrow"], found["buffer"], found["lists"]
    good = ours <= 1.2 * arrow and 5 * ours <= lists
    print(
        f"\n{'reached' if good else 'MISSED'}: 10k rows of 1000 tokens: Arrow bytes {arrow / 1e6:.0f} MB, "
        f"buffer {ours / 1e6:.0f} MB resident ({ours / arrow:.2f}x, target 1.2x), deque of objects with "
        f"lists {lists / 1e6:.0f} MB ({lists / ours:.1f}x ours, target 5x), with numpy arrays "
        f"{found['numpy'] / 1e6:.0f} MB ({found['numpy'] / ours:.1f}x ours)"
    )


def hold(kind: str) -> None:
    rng = np.random.default_rng(0)
    if kind == "arrow":
        batches = (encode([trajectory(i, 0, 1000, rng) for i in range(250)]) for _ in range(40))
        print(sum(batch.nbytes for batch in batches))
        return
    buffer, objects = TrajectoryBuffer(max_size=10_000), deque()
    buffer.add_batch([trajectory(0, 0, 1000, rng)])
    buffer.clear()
    gc.collect()
    before = resident()
    for start in range(0, 10_000, 250):
        rows = [trajectory(start + i, 0, 1000, rng, kind == "lists") for i in range(250)]
        if kind == "buffer":
            buffer.add_batch(rows)
        else:
            objects.extend(rows)
        del rows
    gc.collect()
    pa.default_memory_pool().release_unused()
    print(resident() - before)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def threads(seconds: float) -> None:
    """Two adders and two samplers at once; every row that was added is counted."""
    buffer = TrajectoryBuffer(max_size=10**9, max_staleness=GAP)
    stop, added, waits, errors = threading.Event(), [0, 0], [], []
    version = [0]

    def add(number: int) -> None:
        try:
            template = [trajectory(i, 0, 64, np.random.default_rng(number)) for i in range(64)]
            while not stop.is_set():
                for i, row in enumerate(template):
                    row.id = f"{number}-{added[number] + i}"
                    row.version = PolicyVersion(version[0])
                buffer.add_batch(template)
                added[number] += len(template)
        except BaseException as error:
            errors.append(error)

    def draw(stratified: bool) -> None:
        try:
            while not stop.is_set():
                begun = time.perf_counter()
                found = buffer.sample(256, version[0], stratified=stratified)
                waits.append(time.perf_counter() - begun)
                assert len(found.rewards) == len(found) <= 256
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=add, args=(i,)) for i in (0, 1)]
    running += [threading.Thread(target=draw, args=(s,)) for s in (False, True)]
    for thread in running:
        thread.start()
    removed, end = 0, time.monotonic() + seconds
    while time.monotonic() < end and not errors:
        time.sleep(seconds / 60)
        version[0] += 1
        removed += buffer.remove_stale(version[0])
    stop.set()
    for thread in running:
        thread.join()
    lost = sum(added) - removed - len(buffer)
    p50, p99 = np.percentile(waits, [50, 99]) * 1e3
    print(
        f"\n{'reached' if not lost and not errors else 'MISSED'}: {seconds:.0f} s of two adders and two "
        f"samplers: {sum(added)} rows added, {removed} removed, {lost} lost, {len(waits)} samples of 256, "
        f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, {len(errors)} errors {errors[:1]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", choices=["draws", "adding", "tensors", "memory", "threads"])
    parser.add_argument("--hold", choices=["arrow", "buffer", "lists", "numpy"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.hold:
        hold(given.hold)
        return
    parts: dict[str, Callable[[], None]] = {
        "draws": lambda: draws(given.rows, given.rounds),
        "adding": lambda: adding(given.rounds),
        "tensors": lambda: tensors(given.rounds),
        "memory": memory,
        "threads": lambda: threads(given.seconds),
    }
    for name, part in parts.items():
        if given.only in (None, name):
            part()


if __name__ == "__main__":
    main()
