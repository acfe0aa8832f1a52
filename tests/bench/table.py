"""The table next to plain Parquet and to what else rows are kept in: latency, bytes, encodings, writers.

Run: python tests/bench/table.py [--long] [--folder DIR]. `--long` adds 1000 commits and more rounds. Peers
(`pip install datasets pylance orjson`) that are missing are named and left out. Rows are of ~1k tokens: the
text of ../shared/data/tau_bench_airline.json in a byte-level BPE trained on the spot (16k ids), cut into
rows; loss_mask marks the assistant's tokens, behavior_log_probs are f32, mostly near 0 with a long tail,
advantages are one number per row, 0 off the mask. In every part contenders take turns, and wall time is
taken, as waiting for the disk is part of it. What each does:

- trajstore: `append`, from Trajectory objects to a durable commit: encoding, checks, Parquet, digest, fsync.
- plain Parquet + fsync: pyarrow writes the finished table with our settings. Nothing is checked or committed.
- pyarrow default, write_deltalake, Lance, datasets: the finished table too, each with its own defaults and no
  fsync; write_deltalake and Lance append to a table. JSONL: `to_dict` and orjson, of the objects.
- bytes per token count everything a call added to its folder, logs included.

The sweep writes each list column alone, zstd-1, with every encoding: the size is that of the column chunk.
Targets are those of the project.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LANCE_LOG", "error")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trajstore.codec import encode
from trajstore.schema import SCHEMA
from trajstore.store.files import ROW_GROUP_ROWS, settings
from trajstore.store.store import TrajectoryStore
from trajstore.trajectory import PolicyVersion, Trajectory, TrajectoryStatus

DATA = Path(__file__).parents[3] / "shared/data/tau_bench_airline.json"
VOCABULARY, MEAN, SMALL, LARGE, SIBLINGS = 16_384, 1_000, 64, 1024, 8
WINDOW = 20  # appends between two checkpoints of the log: every window holds exactly one
OURS, PLAIN = "trajstore", "plain Parquet + fsync"
LISTS = ("tokens", "loss_mask", "behavior_log_probs", "advantages")
ENCODINGS = ("dictionary", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED", "PLAIN")
PEERS = {"JSONL (orjson)": "orjson", "datasets": "datasets", "Lance": "lance", "write_deltalake": "deltalake"}

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


def chosen(name: str) -> str:
    """The encoding that `settings` gives a list column."""
    ours, path = settings(SCHEMA), f"{name}.list.element"
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
        ours, best = chosen(table.column_names[0]), min(sizes, key=lambda e: sizes[e])
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
    found = real_tokens()
    if found is None:
        print(f"no {DATA} or no tokenizers: tokens are drawn from a Zipf distribution, sizes mean little")
        found = zipf_tokens(np.random.default_rng(0), LARGE * MEAN)
    rows = make_rows(LARGE, *found)
    on = float(np.concatenate([np.asarray(r.loss_mask) for r in rows]).mean())
    print(f"{len(found[0])} tokens, {len(np.unique(found[0]))} different ones, {on:.0%} on the loss mask")
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="trajstore-bench-") as name:
        folder = Path(name)
        os.environ.setdefault("HF_HOME", str(folder / "hf"))
        one = copy.copy(rows[0])
        levels = [Level(folder, n, one) for n in ((10, 100, 1000) if given.long else (10, 100))]
        latency(rows, folder, levels, {SMALL: 100, LARGE: 60} if given.long else {SMALL: 40, LARGE: 20})
        opening(levels, one, 31 if given.long else 15)
        for count in (SMALL, LARGE):
            inner = folder / f"peers-{count}"
            inner.mkdir()
            peers(rows[:count], inner, 9 if given.long else 5)
        sweeps(rows, folder, 5 if given.long else 3)
        many_writers(rows[:256], folder, 8, 5 if given.long else 3)
        rewriting(rows, folder, 9 if given.long else 5)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
