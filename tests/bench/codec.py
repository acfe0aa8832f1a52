"""ns per token value, objects → record batch, next to pyarrow's own ways and memcpy, in one interleaved run.

Run: python tests/bench/codec.py [rounds]. Rows of ~300 and of ~1000 tokens carry six per-token columns;
contenders take turns, and the median of the process's CPU time (all its threads) is printed. Each does this:

- trajstore: `encode`, from Trajectory objects to all columns of the row: reading the objects, filling and
  aligning, checking every value and every invariant, id hashes, JSON. The only contender that checks.
- pa.Table.from_pylist, ready dicts: from dicts that already hold the columns of the row, lists inside.
  Making the dicts is not counted, though users hold objects; nothing is checked.
- pa.Table.from_pylist, objects: `to_dict` of the same objects, then from_pylist; nothing is checked.
- pa.array(list of lists), pa.array(list of numpy): the six per-token columns only, none of the ~38 others.
- memcpy: the six finished buffers, copied: the floor of any way that does not keep the caller's memory.

Lists hold one Python object a value, as `tolist` makes them. Targets are those of the project.
"""

from __future__ import annotations

import json
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

RAGGED = ("tokens", "loss_mask", "action_mask", "log_probs", "behavior_log_probs", "advantages")
VERSION = pa.struct([("version_id", pa.int64()), ("timestamp", pa.float64()), ("step", pa.int64())])
SEGMENT = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", VERSION)])
READY, OBJECTS = "pa.Table.from_pylist, ready dicts", "pa.Table.from_pylist, objects"
ARRAYS = "pa.array(list of lists)"
TARGETS = (
    ("trajstore, lists", READY, 2.5),
    ("trajstore, lists", ARRAYS, 1.4),
    ("trajstore, numpy", READY, 12.0),
    ("trajstore, torch", READY, 12.0),
)


def rows(count: int, mean: int, make: Callable[[np.ndarray], Any]) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    out = []
    for i in range(count):
        length = int(rng.integers(mean // 3, mean * 5 // 3))
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


def ready_dicts(trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    """The rows as dicts of the finished columns."""
    plain = [name for name in ROW_SCHEMA.names if name not in RAGGED]
    scalars = encode(trajectories).select(plain).to_pylist()
    return [
        row | {name: getattr(t, name) for name in RAGGED}
        for row, t in zip(scalars, trajectories, strict=True)
    ]


def dict_schema() -> pa.Schema:
    """The columns of `Trajectory.to_dict`, for from_pylist of objects."""
    own = {"version": VERSION, "version_segments": pa.list_(SEGMENT), "version_span": pa.list_(pa.int64())}
    names = Trajectory().to_dict()
    return pa.schema([(name, own[name] if name in own else BY_NAME[name].type) for name in names])


def from_objects(trajectories: list[Trajectory], schema: pa.Schema) -> pa.Table:
    dicts = [t.to_dict() for t in trajectories]
    for row in dicts:
        row["metadata"] = json.dumps(row["metadata"])
    return pa.Table.from_pylist(dicts, schema=schema)


def arrays(trajectories: list[Trajectory]) -> list[pa.Array]:
    return [pa.array([getattr(t, n) for t in trajectories], BY_NAME[n].type) for n in RAGGED]


def take_turns(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each; one round that is not counted warms caches and memory pools."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def compare(count: int, mean: int, rounds: int) -> None:
    lists = rows(count, mean, lambda a: a.tolist())
    numpys = rows(count, mean, lambda a: a)
    torches = rows(count, mean, torch.from_numpy)
    batch, dicts, schema = encode(lists), ready_dicts(lists), dict_schema()
    assert encode(numpys).equals(batch)
    assert encode(torches).equals(batch)
    assert pa.Table.from_pylist(dicts, schema=ROW_SCHEMA).equals(pa.Table.from_batches([batch]))
    buffers = [batch.column(n).values.to_numpy() for n in RAGGED]
    targets = [np.empty_like(b) for b in buffers]
    taken = take_turns(
        {
            "memcpy": lambda: [np.copyto(t, b) for t, b in zip(targets, buffers, strict=True)],
            "trajstore, lists": lambda: encode(lists),
            "trajstore, numpy": lambda: encode(numpys),
            "trajstore, torch": lambda: encode(torches),
            READY: lambda: pa.Table.from_pylist(dicts, schema=ROW_SCHEMA),
            OBJECTS: lambda: from_objects(lists, schema),
            ARRAYS: lambda: arrays(lists),
            "pa.array(list of numpy)": lambda: arrays(numpys),
        },
        rounds,
    )
    tokens = batch.column("tokens").values
    values = len(tokens) * len(RAGGED)
    print(
        f"\n{count} rows of ~{mean} tokens, {len(RAGGED)} columns, {values} values, median of {rounds} rounds"
    )
    print(f"{'':36}{'ns/value':>9}{'rows/s':>10}{'x ready':>9}{'x objects':>10}{'x pa.array':>11}")
    for name, t in taken.items():
        ratios = f"{taken[READY] / t:9.1f}{taken[OBJECTS] / t:10.1f}{taken[ARRAYS] / t:11.2f}"
        print(f"{name:36}{t / values * 1e9:9.2f}{count / t:10.0f}{ratios}")
    for name, rival, factor in TARGETS:
        found = taken[rival] / taken[name]
        print(f"{'reached' if found >= factor else 'MISSED'}: {name} {found:.2f}x {rival}, target {factor}x")


def single(rounds: int) -> None:
    """The fixed cost of one call."""
    one = rows(1, 300, lambda a: a)
    dicts = ready_dicts(rows(1, 300, lambda a: a.tolist()))
    taken = take_turns(
        {
            "trajstore, numpy": lambda: encode(one),
            READY: lambda: pa.Table.from_pylist(dicts, schema=ROW_SCHEMA),
        },
        rounds,
    )
    print("\none row of ~300 tokens: " + ", ".join(f"{name} {t * 1e3:.2f} ms" for name, t in taken.items()))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    compare(4_000, 300, rounds)
    compare(1_500, 1_000, rounds)
    single(rounds * 20)


if __name__ == "__main__":
    main()
