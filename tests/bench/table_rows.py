"""Rows of real token ids for the benches of the table, and how they measure: in turns, by wall time.

Rows are of ~1k tokens: the text of ../shared/data/tau_bench_airline.json in a byte-level BPE trained on the
spot (16k ids), cut into rows; loss_mask marks the assistant's tokens, behavior_log_probs are f32, most near 0
with a long tail, advantages are one number per row, 0 off the mask.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trajstore.store.files import ROW_GROUP_ROWS, settings
from trajstore.store.store import TrajectoryStore
from trajstore.trajectory import PolicyVersion, Trajectory, TrajectoryStatus

DATA = Path(__file__).parents[3] / "shared/data/tau_bench_airline.json"
VOCABULARY, MEAN, SMALL, LARGE, SIBLINGS = 16_384, 1_000, 64, 1024, 8
PLAIN = "plain Parquet + fsync"
RUNS = ("advantages",)  # what our writer finds in these rows

Ints = NDArray[np.int32]
Times = dict[str, list[float]]


# The rows


def real_tokens(system: bool = True) -> tuple[Ints, NDArray[np.int8]] | None:
    """Token ids of all conversations and whether the assistant wrote them; None without file or tokenizer."""
    if not DATA.exists() or importlib.util.find_spec("tokenizers") is None:
        return None
    from tokenizers import ByteLevelBPETokenizer

    messages = [m for c in json.loads(DATA.read_text()) for m in c["traj"]]
    texts = [f"{m['role']}\n{m.get('content') or json.dumps(m.get('tool_calls'))}\n" for m in messages]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    used = [i for i, m in enumerate(messages) if system or m["role"] != "system"]
    ids = [np.array(e.ids, np.int32) for e in tokenizer.encode_batch([texts[i] for i in used])]
    mine = [
        np.full(len(x), messages[i]["role"] == "assistant", np.int8) for i, x in zip(used, ids, strict=True)
    ]
    return np.concatenate(ids), np.concatenate(mine)


def zipf_tokens(rng: np.random.Generator, count: int) -> tuple[Ints, NDArray[np.int8]]:
    ids = (rng.zipf(1.2, count) % VOCABULARY).astype(np.int32)
    runs = rng.integers(20, 200, count // 20)
    return ids, np.repeat(np.arange(len(runs)) % 2, runs)[:count].astype(np.int8)


def log_probs(rng: np.random.Generator, mask: NDArray[np.int8]) -> NDArray[np.float32]:
    """Most tokens are all but certain, a third is not; nothing off the mask."""
    sure = -(10.0 ** rng.uniform(-7, -1.5, len(mask)))
    unsure = -rng.gamma(0.8, 1.1, len(mask))
    return (np.where(rng.random(len(mask)) < 0.65, sure, unsure) * mask).astype(np.float32)


def make_rows(count: int, tokens: Ints, mask: NDArray[np.int8]) -> list[Trajectory]:
    """Rows cut one after the other from a stream, which starts again where it ends."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(MEAN // 3, MEAN * 5 // 3, count)
    ends = np.cumsum(lengths)
    tokens, mask = np.resize(tokens, ends[-1]), np.resize(mask, ends[-1])
    probs = log_probs(rng, mask)
    rewards = rng.random(count) < np.repeat(rng.random(count // SIBLINGS + 1), SIBLINGS)[:count]
    rows = []
    for i, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        part = slice(end - length, end)
        group = rewards[i // SIBLINGS * SIBLINGS :][:SIBLINGS]
        advantage = (rewards[i] - group.mean()) / (group.std() + 1e-6)
        prompt = int(np.argmax(mask[part])) if mask[part].any() else length
        rows.append(
            Trajectory(
                id=f"row-{i}",
                group_id=f"g{i // SIBLINGS}",
                tokens=tokens[part],
                prompt_length=prompt,
                response_length=length - prompt,
                loss_mask=mask[part],
                behavior_log_probs=probs[part],
                advantages=(mask[part] * advantage).astype(np.float32),
                reward=float(rewards[i]),
                version=PolicyVersion(i // 64),
                status=TrajectoryStatus.COMPLETED,
                source="bench",
            )
        )
    return rows


def finished(rows: Sequence[Trajectory], folder: Path) -> pa.Table:
    """The stored table of rows, stamps included."""
    store = TrajectoryStore.create(folder / f"finished-{len(rows)}")
    store.append(rows)
    return store.scan().to_arrow().combine_chunks()


# Measuring


def clocked(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def take_turns(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> Times:
    """Wall seconds of each; one round that is not counted warms caches."""
    times: Times = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            times[name].append(clocked(run))
    return {name: taken[1:] for name, taken in times.items()}


def ms(times: Sequence[float], quantile: float = 0.5) -> float:
    return float(np.quantile(times, quantile)) * 1e3


def verdict(good: bool, text: str) -> None:
    print(f"{'reached' if good else 'MISSED'}: {text}")


def size_of(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file())


def write_durable(table: pa.Table, path: Path) -> None:
    with path.open("wb") as sink:
        pq.write_table(table, sink, row_group_size=ROW_GROUP_ROWS, **settings(table.schema, RUNS))
        sink.flush()
        os.fsync(sink.fileno())


def bench_rows() -> list[Trajectory]:
    """The rows of all benches; says what they are."""
    found = real_tokens()
    if found is None:
        print(f"no {DATA} or no tokenizers: tokens are drawn from a Zipf distribution, sizes mean little")
        found = zipf_tokens(np.random.default_rng(0), LARGE * MEAN)
    rows = make_rows(LARGE, *found)
    on = float(np.concatenate([np.asarray(r.loss_mask) for r in rows]).mean())
    print(f"{len(found[0])} tokens, {len(np.unique(found[0]))} different ones, {on:.0%} on the loss mask")
    return rows
