"""Replay beside the loader: batches of the same rows, by version, by training step, and as Arrow moments.

Rounds are interleaved in one process; the number is the median of CPU seconds of one pass over all rows.
Asked: replay as batches at no less than 0.8 times the loader's speed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from trajstore import PolicyVersion, Trajectory, TrajectoryStatus, TrajectoryStore
from trajstore.loader import TrajectoryLoader
from trajstore.replay import replay

BATCH = 64
WANTED = 0.8


def filled(path: Path, rows: int) -> TrajectoryStore:
    """Eight commits of rows of 100 to 700 tokens, versions mixed, and a ledger of one pass over them."""
    rng = np.random.default_rng(0)
    store = TrajectoryStore.create(path)
    for commit in range(8):
        made = []
        for i in range(rows // 8):
            size = int(rng.integers(100, 700))
            floats = rng.random(size, np.float32)
            made.append(
                Trajectory(
                    id=f"{commit}-{i}",
                    tokens=rng.integers(0, 150_000, size),
                    prompt_length=80,
                    response_length=size - 80,
                    behavior_log_probs=-floats,
                    log_probs=-floats,
                    advantages=floats,
                    version=PolicyVersion(int(rng.integers(0, 8))),
                    status=TrajectoryStatus.COMPLETED,
                    reward=1.0,
                )
            )
        store.append(made)
    ids = store.scan(columns=["id"]).to_arrow()["id"].to_pylist()
    order = rng.permutation(len(ids))
    for step, start in enumerate(range(0, len(ids), BATCH)):
        store.record_training_step(step, [ids[i] for i in order[start : start + BATCH]])
    return store


def drained(items: Iterable[object]) -> None:
    for _ in items:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = filled(Path(folder) / "s", args.rows)
        scan = store.scan()
        by_version = replay(store, by="version")
        cut = replay(store, by="version", batch_size=BATCH)
        by_step = replay(store, by="step")
        ways: dict[str, Callable[[], None]] = {
            "loader, order of arrival": lambda: drained(TrajectoryLoader(scan, batch_size=BATCH, prefetch=0)),
            "loader, shuffled": lambda: drained(
                TrajectoryLoader(scan, batch_size=BATCH, prefetch=0, shuffle=True)
            ),
            "replay by version, its scan in the loader": lambda: drained(
                TrajectoryLoader(by_version.scan, batch_size=BATCH, prefetch=0)
            ),
            "replay by version, tensors": lambda: drained(cut.tensors()),
            "replay by step, tensors": lambda: drained(by_step.tensors()),
            "replay by version, moments (Arrow)": lambda: drained(by_version),
            "replay by step, moments (Arrow)": lambda: drained(by_step),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way()  # columns are decoded into the cache once
        for _ in range(args.rounds):
            for name, way in ways.items():
                started = time.process_time()
                way()
                times[name].append(time.process_time() - started)
        base = {"order": "loader, order of arrival", "step": "loader, shuffled"}
        tokens = sum(scan.columns(["length"]).to_arrow()["length"].to_pylist())
    told = f"{args.rows:,} rows, {tokens:,} tokens, {args.rounds} rounds"
    print(f"{told}; speed against the loader, {WANTED} asked")
    for name, taken in times.items():
        seconds = float(np.median(taken))
        beside = float(np.median(times[base["step" if "step" in name else "order"]]))
        print(
            f"{name:45} {seconds * 1e3:8.1f} ms {tokens / seconds / 1e6:8.1f} Mtok/s {beside / seconds:6.2f}x"
        )


if __name__ == "__main__":
    main()
