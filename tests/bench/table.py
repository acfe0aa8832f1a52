"""The table's time next to plain Parquet's: latency, opening, many writers, rewriting.

Run: python tests/bench/table.py [--long] [--folder DIR]. `--long` adds 1000 commits and more rounds.
table_rows.py says what the rows are. What each does:

- trajstore: `append`, from Trajectory objects to a durable commit: encoding, checks, Parquet, digest, fsync.
- plain Parquet + fsync: pyarrow writes the finished table with our settings. Nothing is checked or committed.

Targets are those of the project.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import multiprocessing
import os
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from table_rows import (
    LARGE,
    PLAIN,
    SMALL,
    Times,
    bench_rows,
    clocked,
    finished,
    ms,
    take_turns,
    verdict,
    write_durable,
)

from trajstore.codec import encode
from trajstore.store.store import TrajectoryStore
from trajstore.trajectory import Trajectory

WINDOW = 20  # appends between two checkpoints of the log: every window holds exactly one


# Latency


class Level:
    """A store that always has about N commits: after a window of appends it starts again from a copy."""

    def __init__(self, folder: Path, commits: int, row: Trajectory) -> None:
        self.commits = commits
        self.pristine = folder / f"pristine-{commits}"
        self._copies = (folder / f"level-{commits}-{i}" for i in itertools.count())
        self._store: TrajectoryStore | None = None
        self._left = 0
        self.grow(commits, row)

    def grow(self, commits: int, row: Trajectory) -> None:
        create = not self.pristine.exists()
        store = TrajectoryStore.create(self.pristine) if create else TrajectoryStore.open(self.pristine)
        for _ in range(commits):
            store.append([row])

    def prepare(self, row: Trajectory) -> None:
        """Makes the next append one of a handle that is warm."""
        if self._left == 0:
            if self._store is not None:
                shutil.rmtree(self._store.path)
            target = next(self._copies)
            shutil.copytree(self.pristine, target)
            self._store = TrajectoryStore.open(target)
            self._store.append([row])
            self._left = WINDOW
        self._left -= 1

    def append(self, rows: Sequence[Trajectory]) -> None:
        assert self._store is not None
        self._store.append(rows)


def in_turn(
    part: Sequence[Trajectory], table: pa.Table, folder: Path, levels: list[Level], number: int
) -> Times:
    contenders: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: write_durable(table, folder / "plain.parquet"),
        "encode and check alone": lambda: encode(part),
    }
    names = [*(f"append at {level.commits} commits" for level in levels), *contenders]
    times: Times = {name: [] for name in names}
    for _ in range(number):
        for level in levels:
            level.prepare(part[0])
            times[f"append at {level.commits} commits"].append(clocked(partial(level.append, part)))
        for name, run in contenders.items():
            times[name].append(clocked(run))
    return times


def latency(rows: Sequence[Trajectory], folder: Path, levels: list[Level], rounds: dict[int, int]) -> None:
    for count, number in rounds.items():
        times = in_turn(rows[:count], finished(rows[:count], folder), folder, levels, number)
        plain = statistics.median(times[PLAIN])
        print(f"\n{count} rows, {number} rounds{'':22}{'median ms':>12}{'p99 ms':>9}{'x plain':>9}")
        for name, taken in times.items():
            ratio = statistics.median(taken) / plain
            print(f"{name:40}{ms(taken):12.1f}{ms(taken, 0.99):9.1f}{ratio:9.2f}")
        first, *_, last = (f"append at {level.commits} commits" for level in levels)
        ratio = statistics.median(times[first]) / plain
        if count == LARGE:
            verdict(
                ratio <= 1.6, f"append of {count} rows {ratio:.2f}x the plain write with fsync, target 1.6x"
            )
        ratio = statistics.median(times[last]) / statistics.median(times[first])
        verdict(ratio <= 3, f"{last} {ratio:.2f}x that at {levels[0].commits}, target 3x")


def opening(levels: list[Level], row: Trajectory, rounds: int) -> None:
    print(f"\nopen, {rounds} rounds{'':26}{'median ms':>12}{'p99 ms':>9}")
    for behind in (0, WINDOW - 1):
        for level in levels:
            level.grow(behind, row)
        opens: dict[str, Callable[[], Any]] = {
            f"after {level.commits + behind} commits": partial(TrajectoryStore.open, level.pristine)
            for level in levels
        }
        for name, taken in take_turns(opens, rounds).items():
            print(f"{name:40}{ms(taken):12.1f}{ms(taken, 0.99):9.1f}")


# Many writers


_ROWS: list[Trajectory] = []
_BARRIERS: dict[int, Barrier] = {}


def start_writer(path: Path, barriers: dict[int, Barrier]) -> None:
    _ROWS.extend(pickle.loads(path.read_bytes()))
    _BARRIERS.update(barriers)


def write_many(folder: Path, writers: int, appends: int) -> tuple[float, float]:
    """When this writer started and ended; the barrier makes sure that every process gets one call."""
    store = TrajectoryStore.open(folder)
    _BARRIERS[writers].wait()
    start = time.monotonic()
    for _ in range(appends):
        store.append(_ROWS)
    return start, time.monotonic()


def many_writers(rows: Sequence[Trajectory], folder: Path, appends: int, rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    barriers = {n: context.Barrier(n) for n in (1, 2, 4)}
    pickled = folder / "rows.pickle"
    pickled.write_bytes(pickle.dumps(rows))
    size = encode(rows).nbytes
    number = itertools.count()
    walls: Times = {}
    with context.Pool(max(barriers), start_writer, (pickled, barriers)) as pool:
        for _ in range(rounds + 1):
            for n in barriers:
                home = folder / f"writers-{next(number)}"
                TrajectoryStore.create(home)
                spans = pool.starmap(write_many, [(home, n, appends)] * n, chunksize=1)
                walls.setdefault(str(n), []).append(max(e for _, e in spans) - min(s for s, _ in spans))
                assert TrajectoryStore.open(home).count() == n * appends * len(rows)
                shutil.rmtree(home)
    print(f"\n{appends} appends of {len(rows)} rows by each process, {rounds} rounds, {os.cpu_count()} cores")
    print(f"{'':40}{'rows/s':>10}{'MB/s':>8}{'x one':>8}")
    one = 1 / statistics.median(walls["1"][1:])
    for name, taken in walls.items():
        speed = int(name) / statistics.median(taken[1:])
        mb = speed * appends * size / 1e6
        print(f"{name + ' writers':40}{speed * appends * len(rows):10.0f}{mb:8.0f}{speed / one:8.2f}")


# Rewriting


def rewriting(rows: Sequence[Trajectory], folder: Path, rounds: int) -> None:
    base = folder / "rewritten"
    store = TrajectoryStore.create(base)
    files = [store.append(rows[i : i + SMALL]) for i in range(0, len(rows), SMALL)]
    parts = sorted(base.glob("part-*.parquet"))
    chosen_rows = rows[:: len(rows) // SMALL][:SMALL]
    ids = [row.id for row in chosen_rows]
    advantages = [np.full(row.total_length, 0.5, np.float32) for row in chosen_rows]
    copies = [folder / f"rewritten-{name}-{i}" for name in ("update", "compact") for i in range(rounds + 1)]
    for target in copies:
        shutil.copytree(base, target)
    stores = iter([TrajectoryStore.open(path) for path in copies[: rounds + 1]])
    others = iter([TrajectoryStore.open(path) for path in copies[rounds + 1 :]])

    def floor(together: bool) -> None:
        tables = [pq.read_table(part) for part in parts]
        for i, table in enumerate([pa.concat_tables(tables)] if together else tables):
            write_durable(table, folder / f"floor-{i}.parquet")

    taken = take_turns(
        {
            f"update, {SMALL} rows": lambda: next(stores).maintenance.update(ids, {"advantages": advantages}),
            f"pyarrow: read and write {len(files)} files": lambda: floor(False),
            "compact": lambda: next(others).maintenance.compact(),
            f"pyarrow: read {len(files)} files, write one": lambda: floor(True),
        },
        rounds,
    )
    print(f"\n{len(files)} files of {SMALL} rows, {rounds} rounds")
    print(f"{'':40}{'ms':>8}{'us/row asked':>14}{'us/row there':>14}")
    for name, times in taken.items():
        asked = SMALL if name.startswith("update") else len(rows)
        print(f"{name:40}{ms(times):8.1f}{ms(times) * 1e3 / asked:14.0f}{ms(times) * 1e3 / len(rows):14.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--long", action="store_true", help="1000 commits and more rounds")
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: the folder for temporary files)"
    )
    given = parser.parse_args()
    started = time.perf_counter()
    rows = bench_rows()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="trajstore-bench-") as name:
        folder = Path(name)
        one = copy.copy(rows[0])
        levels = [Level(folder, n, one) for n in ((10, 100, 1000) if given.long else (10, 100))]
        latency(rows, folder, levels, {SMALL: 100, LARGE: 60} if given.long else {SMALL: 40, LARGE: 20})
        opening(levels, one, 31 if given.long else 15)
        many_writers(rows[:256], folder, 8, 5 if given.long else 3)
        rewriting(rows, folder, 9 if given.long else 5)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
