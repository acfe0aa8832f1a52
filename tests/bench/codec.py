"""ns per token value of objects → record batch, next to pyarrow's own ways and memcpy, in one interleaved run.

Run: python tests/bench/codec.py [rows]. Rows have ~300 tokens and six per-token columns of values; contenders take turns,
the median of the process's CPU time is printed. Validation is included for trajstore.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trajstore.codec import encode
from trajstore.schema import BY_NAME, ROW_SCHEMA
from trajstore.trajectory import PolicyVersion, Trajectory, TrajectoryStatus

ROUNDS = 7
MEAN = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000  # tokens of a row
RAGGED = ("tokens", "loss_mask", "action_mask", "log_probs", "behavior_log_probs", "advantages")


def rows(count: int, make: Callable[[np.ndarray], Any]) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    out = []
    for i in range(count):
        length = int(rng.integers(MEAN // 3, MEAN * 5 // 3))
        prompt = length // 4
        mask = np.zeros(length, np.int8)
        mask[prompt:] = 1
        floats = [rng.standard_normal(length).astype(np.float32) for _ in range(3)]
        out.append(
            Trajectory(
                id=f"row-{i}",
                group_id=f"g{i // 8}",
                tokens=make(rng.integers(0, 150_000, length).astype(np.int32)),
                prompt_length=prompt,
                response_length=length - prompt,
                loss_mask=make(mask),
                action_mask=make(mask),
                log_probs=make(floats[0]),
                behavior_log_probs=make(floats[1]),
                advantages=make(floats[2]),
                reward=float(i % 2),
                version=PolicyVersion(i // 64),
                status=TrajectoryStatus.COMPLETED,
            )
        )
    return out


def as_dicts(trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    """The same rows for `from_pylist`, which wants the columns ready and checks nothing."""
    table = encode(trajectories)
    plain = [name for name in ROW_SCHEMA.names if name not in RAGGED]
    scalars = table.select(plain).to_pylist()
    return [
        row | {name: getattr(t, name) for name in RAGGED}
        for row, t in zip(scalars, trajectories, strict=True)
    ]


def arrays(trajectories: list[Trajectory]) -> list[pa.Array]:
    return [pa.array([getattr(t, n) for t in trajectories], BY_NAME[n].type) for n in RAGGED]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    lists = rows(count, lambda a: a.tolist())
    numpys = rows(count, lambda a: a)
    torches = rows(count, torch.from_numpy)
    dicts = as_dicts(lists)
    batch = encode(lists)
    values = sum(len(t.tokens) for t in lists) * len(RAGGED)
    buffers = [batch.column(n).values.to_numpy() for n in RAGGED]
    targets = [np.empty_like(b) for b in buffers]
    contenders: dict[str, Callable[[], Any]] = {
        "memcpy of the buffers": lambda: [np.copyto(t, b) for t, b in zip(targets, buffers, strict=True)],
        "trajstore, lists": lambda: encode(lists),
        "trajstore, numpy": lambda: encode(numpys),
        "trajstore, torch": lambda: encode(torches),
        "pa.Table.from_pylist": lambda: pa.Table.from_pylist(dicts, schema=ROW_SCHEMA),
        "pa.array(list of lists)": lambda: arrays(lists),
        "pa.array(list of numpy)": lambda: arrays(numpys),
    }
    assert encode(numpys).equals(batch) and encode(torches).equals(batch)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    medians = {name: statistics.median(t) for name, t in times.items()}
    base = medians["pa.Table.from_pylist"]
    arrow = medians["pa.array(list of lists)"]
    print(f"{count} rows, {values // len(RAGGED)} tokens, {len(RAGGED)} list columns, median of {ROUNDS}")
    print(f"{'':26} {'ns/value':>9} {'rows/s':>10} {'x from_pylist':>14} {'x pa.array':>11}")
    for name, t in medians.items():
        print(f"{name:26} {t / values * 1e9:9.2f} {count / t:10.0f} {base / t:14.1f} {arrow / t:11.2f}")


if __name__ == "__main__":
    main()
