"""Building ILQL data: columnar against trlX's loop, and against the least that can be done.

    python tests/bench/ilql.py [ROWS]

Asked: 100k multi-turn trajectories of ~300 tokens at least 30 times as fast as trlX's Python construction,
and within 3 times of numpy's flatnonzero over the masks plus a memcpy of the output; batches at the loader's
speed. Rounds are interleaved in one process; medians of CPU seconds. trlX's loop runs on a tenth of the rows,
times 10.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console
from rich.table import Table

from trajstore import layouts
from trajstore.loader import TrajectoryLoader
from trajstore.offline import ILQLDataset, ilql_dataset
from trajstore.schema import list_of

ROUNDS = 5
PART = 10
BATCH = 128


def rows(count: int) -> pa.Table:
    """`count` stored rows of 2 to 5 turns, about 300 tokens each, half of them sampled."""
    rng = np.random.default_rng(0)
    turns = 2 * rng.integers(2, 6, count)
    sizes = rng.integers(20, 67, int(turns.sum()))
    row = np.repeat(np.arange(count), turns)
    lengths = np.bincount(row, sizes).astype(np.int64)
    first = np.cumsum(turns) - turns
    sampled = (np.arange(len(row)) - first[row]) % 2
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    tokens = rng.integers(1, 32000, int(lengths.sum()), np.int32)
    mask = np.repeat(sampled.astype(np.int8), sizes)
    return pa.table(
        {
            "id": pa.array([str(i) for i in range(count)]),
            "id_hash": rng.integers(0, 2**62, count),
            "length": lengths.astype(np.int32),
            "prompt_length": sizes[first].astype(np.int32),
            "tokens": pa.ListArray.from_arrays(offsets, pa.array(tokens), type=list_of(pa.int32())),
            "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(mask), type=list_of(pa.int8())),
            "reward": rng.normal(size=count),
            "terminated": np.ones(count, bool),
        }
    )


def dialogues(table: pa.Table) -> list[list[tuple[bool, tuple[int, ...]]]]:
    """The rows as trlX's tokenize_dialogue hands them on: (is_output, tokens) for each turn. Not timed."""
    out = []
    for tokens, mask in zip(
        table.column("tokens").to_pylist(), table.column("loss_mask").to_pylist(), strict=True
    ):
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
        out.append([(bool(mask[a]), tuple(tokens[a:b])) for a, b in pairwise(edges)])
    return out


def trlx_loop(samples: list[list[tuple[bool, tuple[int, ...]]]], returns: list[float]) -> list[Any]:
    """What make_experience does, written again: tensors made sample by sample."""
    ids, actions, states, dones = [], [], [], []
    for sample in samples:
        length = 0
        ids.append(torch.tensor(sum((tokens for _, tokens in sample), ())))
        ixs = []
        for is_output, tokens in sample:
            if is_output:
                ixs.append(torch.arange(length - 1, length + len(tokens) - 1))
            length += len(tokens)
        states.append(torch.hstack((*ixs, torch.tensor(length - 1))))
        dones.append(torch.tensor([1] * (len(states[-1]) - 1) + [0], dtype=torch.int))
        actions.append(torch.hstack(ixs))
    scaled = torch.tensor(returns, dtype=torch.float64)
    scaled = scaled - scaled.mean()
    scaled = scaled / (scaled.std() + torch.finfo(scaled.dtype).eps)
    rewards = [torch.zeros(len(ixs)) for ixs in actions]
    for row, value in zip(rewards, scaled, strict=True):
        row[-1] = value
    masks = [torch.ones(len(x), dtype=int) for x in ids]
    return list(zip(ids, masks, rewards, states, actions, dones, strict=True))


def cpu(what: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    out = what()
    return time.process_time() - start, out


def main(count: int) -> None:
    console = Console()
    table = rows(count)
    part = table.slice(0, count // PART)
    samples, returns = dialogues(part), part.column("reward").to_pylist()
    mask = table.column("loss_mask").chunk(0).values.to_numpy().view(np.bool_)
    seconds: dict[str, list[float]] = {}

    def note(name: str, took: float) -> None:
        seconds.setdefault(name, []).append(took)

    for _ in range(ROUNDS):
        took, made = cpu(lambda: ilql_dataset(table))
        note("sound", took)
        took, made = cpu(lambda: ilql_dataset(table, scale="global"))
        note("sound, scaled", took)
        # What the set holds beside the tokens, which stay where they are in Arrow's memory.
        names = ("rewards", "states_ixs", "actions_ixs", "dones", "terminals", "action_mask")
        output = [c.values.to_numpy() for n in names for c in made.table.column(n).chunks]
        took, _ = cpu(lambda arrays=output: (np.flatnonzero(mask), [x.copy() for x in arrays]))
        note("least", took)
        tokens = [c.values.to_numpy() for c in made.table.column("input_ids").chunks]
        took, _ = cpu(lambda arrays=[*output, *tokens]: (np.flatnonzero(mask), [x.copy() for x in arrays]))
        note("least, with tokens", took)
        took, _ = cpu(lambda: ilql_dataset(table, compat="trlx"))
        note('compat="trlx"', took)
        took, _ = cpu(lambda: trlx_loop(samples, returns))
        note("trlx loop", took * PART)
    median = {name: statistics.median(values) for name, values in seconds.items()}

    shown = Table(
        "", "CPU s", "asked", "measured", title=f"ILQL data from {count:,} rows, {len(mask):,} tokens"
    )
    for name, value in median.items():
        asked = found = ""
        if name.startswith(("sound", "compat")):
            asked = ">= 30x trlX, <= 3x least"
            found = (
                f"{median['trlx loop'] / value:.0f}x trlX, {value / median['least, with tokens']:.2f}x least"
            )
            found += f" ({value / median['least']:.2f}x when the tokens, which are not copied, do not count)"
        shown.add_row(name, f"{value:.3f}", asked, found)
    console.print(shown)
    collate(console, ilql_dataset(table.slice(0, min(count, 20000))))


def collate(console: Console, data: ILQLDataset) -> None:
    """The set's own batches, the loader's of the same rows in the same order, and a memcpy of both' bytes."""
    torch.set_num_threads(1)

    def loader(**options: Any) -> TrajectoryLoader:
        return TrajectoryLoader(data, batch_size=BATCH, prefetch=0, **options)

    def empty(batches: Iterable[Any]) -> None:
        for _ in batches:
            pass

    held = list(data.batches(BATCH, shuffle=False))
    arrays = [t.numpy() for batch in held for t in vars(batch).values() if t is not None]
    size = sum(x.nbytes for x in arrays)
    ways: dict[str, Callable[[], Any]] = {
        "data.batches": lambda: empty(data.batches(BATCH, shuffle=False)),
        "TrajectoryLoader(data)": lambda: empty(loader()),
        "TrajectoryLoader(data, reuse_buffers=True)": lambda: empty(loader(reuse_buffers=True)),
        "memcpy into fresh memory": lambda: empty(x.copy() for x in arrays),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            seconds[name].append(cpu(way)[0])
    title = f"{len(held)} batches of {BATCH}, {size / 1e6:.0f} MB ({layouts.kernel()} kernel)"
    shown = Table("", "CPU s", "GB/s", title=title)
    for name, values in seconds.items():
        took = statistics.median(values)
        shown.add_row(name, f"{took:.3f}", f"{size / took / 1e9:.2f}")
    console.print(shown)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
