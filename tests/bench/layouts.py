"""Layouts against memcpy of the bytes they write, and against what people use for the same rows.

Shuffled rows, log-normal lengths (mean 1,000, at most 8,192), seven list columns; every contender gets the
same rows, interleaved round by round in one process, torch at one thread; median CPU time. Run:
python tests/bench/layouts.py [ROWS] [ROUNDS]
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import torch
from torch.nn.utils.rnn import pad_sequence

from trajstore import layouts
from trajstore.layouts import Buffers, Options, Ragged, Rows
from trajstore.plan import Recipe, plan
from trajstore.selection import seeded_keys

INTEGERS = {"tokens": np.int32, "attention_mask": np.int8, "loss_mask": np.int8}
FLOATS = ("log_probs", "behavior_log_probs", "advantages", "returns")
NAMES = {"tokens": "input_ids"}
TORCH = {"tokens": torch.int64, "attention_mask": torch.int64}


def synthetic(count: int) -> tuple[Rows, dict[str, np.ndarray], np.ndarray]:
    """Rows over flat columns in four chunks, as four data files would give; the flat columns; the bounds."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(1000) - 0.4, 0.9, count), 8, 8192).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    total = int(bounds[-1])
    flat: dict[str, np.ndarray] = {
        "tokens": rng.integers(0, 150_000, total, np.int32),
        "attention_mask": np.ones(total, np.int8),
        "loss_mask": (rng.random(total) < 0.7).astype(np.int8),
    }
    flat |= {name: rng.standard_normal(total, np.float32) for name in FLOATS}
    file_of = np.arange(count) * 4 // count
    first = np.searchsorted(file_of, np.arange(5))
    columns = {}
    for name, values in flat.items():
        chunks = tuple(values[bounds[a] : bounds[b]] for a, b in itertools.pairwise(first))
        columns[name] = Ragged(chunks, file_of, bounds[:-1] - bounds[first[file_of]], lengths)
    rows = Rows(
        [str(i) for i in range(count)],
        lengths,
        lengths // 3,
        rng.random(count),
        np.zeros(count, np.int64),
        columns,
        {},
        np.arange(count),
    )
    return rows, flat, bounds


class Rounds:
    """CPU seconds of each contender, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        made = work()
        self.seconds[name].append(time.process_time() - start)
        return made

    def ms(self, name: str) -> float:
        return 1e3 * statistics.median(self.seconds[name])


class Memory:
    """Copies of so many bytes: of those just copied, which a large cache may hold, or of others each time."""

    def __init__(self) -> None:
        self._to, self._from = np.ones(2**30, np.uint8), np.ones(2**30, np.uint8)
        self._next = 0

    def copy(self, size: int) -> None:
        np.copyto(self._to[:size], self._from[:size])

    def copy_others(self, size: int) -> None:
        if self._next + size > 2**30:
            self._next = 0
        np.copyto(self._to[:size], self._from[self._next : self._next + size])
        self._next += size

    def clear(self, size: int) -> None:
        self._to[:size].fill(0)


FORMS = [form for form in ("c", "numpy") if form == "numpy" or layouts.kernel() == "c"]
ASKED = {
    ("padded", "c"): "0.9", ("padded", "numpy"): "1.4", ("padded, untouched", "c"): "0.4",
    ("packed", "c"): "1.7", ("packed", "numpy"): "4", ("bucketed", "c"): "2",
}  # fmt: skip


def against_memory(rows: Rows, batch_size: int, rounds: int) -> None:
    keys = seeded_keys(rows.keys, batch_size)
    shuffled = plan(rows.lengths, Recipe(batch_size), keys=keys)
    bucketed = plan(rows.lengths, Recipe(batch_size, bucket_window=64), keys=keys)
    memory = Memory()
    kinds = {
        "padded": (layouts.padded, shuffled, False),
        "padded, untouched": (layouts.padded, shuffled, True),
        "padded, compact": (layouts.padded, shuffled, False),
        "packed": (layouts.packed, shuffled, False),
        "bucketed": (layouts.padded, bucketed, False),
    }
    buffers = {(kind, form): Buffers(untouched=kinds[kind][2]) for kind in kinds for form in FORMS}
    took = Rounds()
    for kind, (make, planned, _) in kinds.items():
        options = Options(dtypes="compact" if kind == "padded, compact" else "torch")
        for step in range(rounds):
            chosen = planned.batch(step % len(planned))
            for form in FORMS:
                os.environ["TRAJSTORE_KERNEL"] = form
                out = buffers[kind, form]
                taken = took.time(f"{kind} take", lambda c=chosen: rows.take(c))
                batch = took.time(f"{kind} {form}", lambda t=taken, o=out, m=make, how=options: m(t, how, o))
            took.time(f"{kind} memcpy", lambda size=batch.nbytes: memory.copy(size))
            took.time(f"{kind} memcpy of others", lambda size=batch.nbytes: memory.copy_others(size))
            took.time(f"{kind} memset", lambda size=batch.nbytes: memory.clear(size))
    for kind in kinds:
        base = took.ms(f"{kind} memcpy")
        line = (
            f"{batch_size:>5}  {kind:<18} memcpy {base:7.2f} ms  take {took.ms(f'{kind} take') / base:5.2f}x"
        )
        line += f"  of bytes not in a cache {took.ms(f'{kind} memcpy of others') / base:5.2f}x"
        line += f"  memset {took.ms(f'{kind} memset') / base:5.2f}x"
        for form in FORMS:
            asked = ASKED.get((kind, form))
            line += f"  {form} {took.ms(f'{kind} {form}') / base:5.2f}x" + (
                f" (asked {asked})" if asked else ""
            )
        print(line)


# What people use, for the same rows and the same seven padded outputs


def peers(rows: Rows, flat: dict[str, np.ndarray], bounds: np.ndarray, folder: Path) -> dict[str, Any]:
    names = list(flat)
    slices = {name: torch.from_numpy(values) for name, values in flat.items()}

    def padded_tensors(lists: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {
            NAMES.get(name, name): pad_sequence(
                [row.to(TORCH.get(name, torch.float32)) for row in lists[name]], batch_first=True
            )
            for name in names
        }

    def by_slices(chosen: np.ndarray) -> Any:
        return padded_tensors({n: [slices[n][bounds[i] : bounds[i + 1]] for i in chosen] for n in names})

    def by_lists(chosen: np.ndarray) -> Any:
        return {
            NAMES.get(n, n): pad_sequence(
                [torch.tensor(row, dtype=TORCH.get(n, torch.float32)) for row in lists_of[n]],
                batch_first=True,
            )
            for n in names
        }

    lists_of: dict[str, list[list[float]]] = {}

    def prepare(chosen: np.ndarray) -> None:
        lists_of.update({n: [flat[n][bounds[i] : bounds[i + 1]].tolist() for i in chosen] for n in names})

    table = pa.table(
        {n: pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(values)) for n, values in flat.items()}
    )
    found: dict[str, Any] = {
        "torch.tensor for each row (lists at hand)": (by_lists, prepare, 20),
        "pad_sequence over zero-copy slices": (by_slices, None, 4),
    }
    try:
        import datasets

        held = datasets.Dataset(datasets.table.InMemoryTable(table)).with_format("torch")
        found["HF datasets, torch format + pad"] = (
            lambda chosen: padded_tensors(held[chosen.tolist()]), None, 8
        )  # fmt: skip
    except ImportError:
        print("datasets is not installed: pip install -e '.[bench]'")
    try:
        import lance

        stored = lance.write_dataset(table, str(folder / "rows.lance"))

        def by_lance(chosen: np.ndarray) -> Any:
            part = stored.take(chosen.tolist())
            columns = {n: part.column(n).combine_chunks() for n in names}
            return padded_tensors(
                {
                    n: [torch.from_numpy(np.array(row.values)) for row in column]
                    for n, column in columns.items()
                }
            )

        found["Lance take + pad"] = (by_lance, None, 10)
    except ImportError:
        print("pylance is not installed: pip install -e '.[bench]'")
    try:
        from tensordict import TensorDict
        from torchrl.data import LazyMemmapStorage

        width, few = 8192, min(len(rows), 1000)
        storage = LazyMemmapStorage(few, scratch_dir=str(folder / "torchrl"))
        for start in range(0, few, 100):
            part = layouts.to_torch(
                layouts.padded(
                    rows.take(np.arange(start, start + 100)), Options(pad_to_multiple_of=width)
                ).arrays
            )
            storage.set(range(start, start + 100), TensorDict(part, batch_size=[100]))
        found["torchrl LazyMemmapStorage (fixed width)"] = (
            lambda chosen: storage.get(torch.from_numpy(chosen % few)).clone(), None, 5
        )  # fmt: skip
    except ImportError:
        print("torchrl is not installed, so it is not compared")
    return found


def against_peers(rows: Rows, flat: dict[str, np.ndarray], bounds: np.ndarray, rounds: int) -> None:
    planned = plan(rows.lengths, Recipe(256), keys=seeded_keys(rows.keys, 7))
    took, buffers = Rounds(), {form: Buffers() for form in FORMS}
    with tempfile.TemporaryDirectory() as folder:
        others = peers(rows, flat, bounds, Path(folder))
        for step in range(rounds):
            chosen = planned.batch(step % len(planned))
            for form in FORMS:
                os.environ["TRAJSTORE_KERNEL"] = form
                ours = took.time(form, lambda c=chosen, f=form: layouts.padded(rows.take(c), out=buffers[f]))
            for name, (work, prepare, _) in others.items():
                if prepare is not None:
                    prepare(chosen)
                theirs = took.time(name, lambda w=work, c=chosen: w(c))
                if step == 0 and isinstance(theirs, dict):
                    for column, tensor in theirs.items():
                        assert np.array_equal(tensor.numpy(), ours.arrays[column]), (name, column)
    print("\n256 rows, padded, take included: ours " + ", ".join(f"{f} {took.ms(f):.2f} ms" for f in FORMS))
    for name, (_, _, asked) in others.items():
        ratios = "  ".join(f"{form} {took.ms(name) / took.ms(form):6.1f}x" for form in FORMS)
        print(f"  {name:<44} {took.ms(name):8.2f} ms   {ratios}   (asked of C: {asked}x)")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    torch.set_num_threads(1)
    rows, flat, bounds = synthetic(count)
    print(f"{count} rows, {bounds[-1] / 1e6:.1f} M tokens; load {os.getloadavg()[0]:.1f}; x: times memcpy")
    for batch_size in (64, 256, 512):
        against_memory(rows, batch_size, rounds)
    against_peers(rows, flat, bounds, max(5, rounds // 3))


if __name__ == "__main__":
    main()
