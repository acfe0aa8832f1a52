"""Bytes and time of the table next to others', and every encoding of every list column.

Run: python tests/bench/table_size.py [--long] [--folder DIR]. Peers (`pip install datasets pylance orjson`)
that are missing are named and left out. table_rows.py says what the rows are. What each does:

- trajstore: `append`, from Trajectory objects to a durable commit: encoding, checks, Parquet, digest, fsync.
- pyarrow default, write_deltalake, Lance, datasets: the finished table, each with its own defaults and no
  fsync; write_deltalake and Lance append to a table. JSONL: `to_dict` and orjson, of the objects.
- bytes per token count everything a call added to its folder, logs included.

The sweep writes each list column alone, zstd-1, with every encoding: the size is that of the column chunk.
Targets are those of the project.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LANCE_LOG", "error")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from table_rows import (
    LARGE,
    SIBLINGS,
    SMALL,
    VOCABULARY,
    bench_rows,
    clocked,
    finished,
    make_rows,
    ms,
    real_tokens,
    size_of,
    take_turns,
    verdict,
)

from trajstore.codec import encode
from trajstore.schema import SCHEMA
from trajstore.store.files import ROW_GROUP_ROWS, runs, settings
from trajstore.store.store import TrajectoryStore
from trajstore.trajectory import Trajectory

OURS = "trajstore"
LISTS = ("tokens", "loss_mask", "behavior_log_probs", "advantages")
ENCODINGS = ("dictionary", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED", "PLAIN")
PEERS = {"JSONL (orjson)": "orjson", "datasets": "datasets", "Lance": "lance", "write_deltalake": "deltalake"}


# Bytes and time, next to others


def jsonl(rows: Sequence[Trajectory], path: Path) -> None:
    import orjson

    with path.open("wb") as sink:
        for row in rows:
            sink.write(orjson.dumps(row.to_dict(), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")


def writers_of(rows: Sequence[Trajectory], folder: Path) -> dict[str, Sized]:
    """What to call for each contender; each has a folder of its name and adds to it."""
    table = finished(rows, folder)
    number = itertools.count()
    homes = {name: folder / f"{len(rows)}-{i}" for i, name in enumerate((OURS, *PEERS, "pyarrow default"))}
    for name, home in homes.items():
        if name != OURS:
            home.mkdir()
    store = TrajectoryStore.create(homes[OURS])

    def fresh(name: str, suffix: str = "") -> Path:
        return homes[name] / f"{next(number)}{suffix}"

    def save(dataset: Any) -> None:
        dataset.save_to_disk(str(fresh("datasets")))

    out: dict[str, Callable[[], Any]] = {OURS: lambda: store.append(rows)}
    out["pyarrow default"] = lambda: pq.write_table(table, fresh("pyarrow default", ".parquet"))
    for name, module in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{name}: not installed, skipped")
            continue
        peer = importlib.import_module(module)
        if name == "write_deltalake":
            out[name] = partial(peer.write_deltalake, str(homes[name]), table, mode="append")
        elif name == "Lance":
            peer.write_dataset(table.slice(0, 0), str(homes[name]), mode="create")
            out[name] = partial(peer.write_dataset, table, str(homes[name]), mode="append")
        elif name == "datasets":
            peer.disable_progress_bars()
            out[name] = partial(save, peer.Dataset(peer.table.InMemoryTable(table)))
        else:
            out[name] = lambda: jsonl(rows, fresh("JSONL (orjson)", ".jsonl"))
    return {name: Sized(run, homes[name]) for name, run in out.items()}


class Sized:
    """A contender that notes what it adds to its folder; looking is not part of the time it is given."""

    def __init__(self, run: Callable[[], Any], home: Path) -> None:
        self.run, self.home = run, home
        self.times: list[float] = []
        self.sizes: list[int] = []

    def __call__(self) -> None:
        before = size_of(self.home)
        self.times.append(clocked(self.run))
        self.sizes.append(size_of(self.home) - before)


def peers(rows: Sequence[Trajectory], folder: Path, rounds: int) -> None:
    contenders = writers_of(rows, folder)
    take_turns(contenders, rounds)
    tokens = sum(row.total_length for row in rows)
    times = {name: statistics.median(c.times[1:]) for name, c in contenders.items()}
    sizes = {name: statistics.median(c.sizes[1:]) / tokens for name, c in contenders.items()}
    print(f"\n{len(rows)} rows, {tokens} tokens, {rounds} rounds")
    print(f"{'':40}{'ms':>9}{'x ours':>8}{'B/token':>10}{'x ours':>8}")
    for name, taken in times.items():
        cells = f"{sizes[name]:10.3f}{sizes[name] / sizes[OURS]:8.2f}"
        print(f"{name:40}{taken * 1e3:9.1f}{taken / times[OURS]:8.2f}{cells}")
    for name, size in sizes.items():
        if name != OURS:
            verdict(
                sizes[OURS] < size, f"{len(rows)} rows, ours {sizes[OURS]:.3f} B/token, {name} {size:.3f}"
            )


# Encodings


def chosen(table: pa.Table) -> str:
    """The encoding that our writer gives a list column with these values."""
    (name,) = table.column_names
    found = runs(table.combine_chunks().to_batches()[0])
    ours, path = settings(SCHEMA, found), f"{name}.list.element"
    return "dictionary" if path in ours["use_dictionary"] else str(ours["column_encoding"].get(path, "PLAIN"))


def chunk_size(table: pa.Table, encoding: str, path: Path) -> int:
    leaf = f"{table.column_names[0]}.list.element"
    asked: dict[str, Any] = {"use_dictionary": [leaf]}
    if encoding != "dictionary":
        asked = {"use_dictionary": False, "column_encoding": {leaf: encoding}}
    level = {"compression": "zstd", "compression_level": 1, "write_statistics": False}
    pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS, **level, **asked)
    metadata = pq.ParquetFile(path).metadata
    chunk = metadata.row_group(0).column(0)
    assert chunk.path_in_schema == leaf, chunk.path_in_schema
    want = {"dictionary": "RLE_DICTIONARY"}.get(encoding, encoding)
    assert want in chunk.encodings, (encoding, chunk.encodings)
    return sum(metadata.row_group(i).column(0).total_compressed_size for i in range(metadata.num_row_groups))


def sweep(title: str, columns: dict[str, pa.Table], folder: Path, rounds: int, judged: bool = True) -> None:
    """Every encoding of each column; the keys are what is printed, the tables have one column."""
    print(f"\n{title}, {rounds} rounds\n{'':34}" + "".join(f"{e:>27}" for e in ENCODINGS))
    print(f"{'':34}" + f"{'B/token':>18}{'ms':>9}" * len(ENCODINGS))
    ours_total = best_total = 0.0
    path = folder / "sweep.parquet"
    for label, table in columns.items():
        kind = table.schema.field(0).type.value_type
        tried = [e for e in ENCODINGS if not (pa.types.is_floating(kind) and e == "DELTA_BINARY_PACKED")]
        values = len(table.column(0).combine_chunks().values)
        sizes = {e: chunk_size(table, e, path) / values for e in tried}
        taken = take_turns({e: partial(chunk_size, table, e, path) for e in tried}, rounds)
        cells = [
            f"{sizes[e]:18.4f}{ms(taken[e]):9.1f}" if e in sizes else f"{'-':>18}{'-':>9}" for e in ENCODINGS
        ]
        print(f"{label:34}" + "".join(cells))
        ours, best = chosen(table), min(sizes, key=lambda e: sizes[e])
        ours_total += sizes[ours]
        best_total += sizes[best]
        ratio = sizes[ours] / sizes[best]
        text = f"{label}: {ours} {ratio:.3f}x the best, {best}"
        if judged:
            verdict(ratio <= 1.05, f"{text}, target 1.05x")
        else:
            print(text)
    if judged:
        ratio = ours_total / best_total
        verdict(
            ratio <= 1.05, f"all list columns {ours_total:.3f} B/token, {ratio:.3f}x the best, target 1.05x"
        )


def variants_of(rows: Sequence[Trajectory]) -> dict[str, pa.Table]:
    """Columns as other data would have them: what repeats, and how large the ids are, decides."""
    rng = np.random.default_rng(1)
    plain = [np.asarray(row.tokens) for row in rows]
    ends = np.cumsum([len(t) for t in plain])[:-1]
    far = rng.choice(150_000, VOCABULARY * 2, replace=False).astype(np.int32)
    variants = {
        "ids anywhere in 150k": [far[t] for t in plain],
        "shuffled, so nothing repeats": np.split(rng.permutation(np.concatenate(plain)), ends),
        f"{SIBLINGS} siblings share 1/4 as prompt": [
            np.concatenate([plain[i // SIBLINGS * SIBLINGS][: len(t) // 4], t[len(t) // 4 :]])
            for i, t in enumerate(plain)
        ],
    }
    bare = real_tokens(system=False)
    if bare is not None:
        variants["without the system prompt"] = [np.asarray(r.tokens) for r in make_rows(len(rows), *bare)]
    kind = SCHEMA.field("tokens").type
    tables = {label: pa.table({"tokens": pa.array(lists, kind)}) for label, lists in variants.items()}
    gae = [rng.standard_normal(len(t)).astype(np.float32) for t in plain]
    kind = SCHEMA.field("advantages").type
    return tables | {"advantages, one per token (GAE)": pa.table({"advantages": pa.array(gae, kind)})}


def sweeps(rows: Sequence[Trajectory], folder: Path, rounds: int) -> None:
    for count in (SMALL, LARGE):
        batch = pa.Table.from_batches([encode(rows[:count])])
        sweep(f"encodings, {count} rows", {n: batch.select([n]) for n in LISTS}, folder, rounds)
    sweep(
        f"encodings of other data, {LARGE} rows, no target", variants_of(rows), folder, rounds, judged=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--long", action="store_true", help="more rounds")
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: the folder for temporary files)"
    )
    given = parser.parse_args()
    started = time.perf_counter()
    rows = bench_rows()
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="trajstore-bench-") as name:
        folder = Path(name)
        os.environ.setdefault("HF_HOME", str(folder / "hf"))
        for count in (SMALL, LARGE):
            inner = folder / f"peers-{count}"
            inner.mkdir()
            peers(rows[:count], inner, 9 if given.long else 5)
        sweeps(rows, folder, 5 if given.long else 3)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
