"""Selection and SQL against hand-written DuckDB, polars and pandas over the same Parquet, and a Python deque.

python tests/bench/query.py [--rows 1000000] [--tokens 64] [--rounds 7]

Contenders are interleaved round by round in one process; numbers are medians of process CPU milliseconds.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trajstore import TrajectoryStore
from trajstore.codec import id_hashes
from trajstore.plan import Recipe, plan
from trajstore.query import connect, fresh, metrics, stratified_sample
from trajstore.query.measures import DRIFT, RATIO_COLUMNS
from trajstore.query.survey import SCALARS, importance_ratio, survey
from trajstore.schema import ROW_SCHEMA

AT, VERSIONS, LIMIT, N = 200, 200, 20, 1024


def rows(first: int, versions: Any, tokens: int, rng: np.random.Generator) -> pa.RecordBatch:
    """Rows of about `tokens` tokens each, in the columns of a store."""
    count = len(versions)
    lengths = np.clip(rng.lognormal(np.log(tokens * 0.88), 0.5, count), 4, 8 * tokens).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(offsets[-1])
    ids = [f"row-{first + i:08}" for i in range(count)]
    log_probs = rng.normal(-1, 0.5, total).astype(np.float32)

    def lists(values: Any, name: str) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, values, type=ROW_SCHEMA.field(name).type)

    mask = (np.arange(total) - np.repeat(offsets[:-1], lengths) >= 2).astype(np.int8)
    known: dict[str, Any] = {
        "id": ids,
        "id_hash": id_hashes(ids),
        "group_id": [f"g{(first + i) // 8}" for i in range(count)],
        "prompt": [""] * count,
        "response": [""] * count,
        "tokens": lists(rng.zipf(1.3, total).clip(0, 50_000).astype(np.int32), "tokens"),
        "prompt_length": np.full(count, 2, np.int32),
        "response_length": lengths - 2,
        "length": lengths,
        "loss_mask": lists(mask, "loss_mask"),
        "log_probs": lists(log_probs, "log_probs"),
        "behavior_log_probs": lists(
            log_probs + rng.normal(0, 0.1, total).astype(np.float32), "behavior_log_probs"
        ),
        "reward": rng.random(count),
        "version_id": versions,
        "oldest_version_id": versions,
        "newest_version_id": versions,
        "version_known": ["exact"] * count,
        "status": ["completed"] * count,
        "generation_time_ms": np.zeros(count),
        "tokens_retokenized": np.zeros(count, bool),
    }
    columns = [
        pa.array(known[f.name], f.type) if f.name in known else pa.nulls(count, f.type) for f in ROW_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


def make(path: Path, count: int, tokens: int, *, shuffled: bool) -> TrajectoryStore:
    rng = np.random.default_rng(0)
    versions = np.sort(rng.integers(0, VERSIONS, count))
    if shuffled:
        rng.shuffle(versions)
    store = TrajectoryStore.create(path)
    step = max(1, min(100_000, count // 10))
    for first in range(0, count, step):
        store.append(rows(first, versions[first : first + step], tokens, rng))
    return store


def race(title: str, contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """CPU median of each in ms; what they return is compared."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):  # the first round warms
        for name, run in contenders.items():
            start = time.process_time()
            run()
            if number:
                taken[name].append((time.process_time() - start) * 1e3)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    print(f"\n{title}")
    for name, value in medians.items():
        print(f"  {name:44} {value:10.2f} ms")
    return medians


def verdict(medians: dict[str, float], best: list[str], ours: str, ratio: float, slack: float = 5.0) -> None:
    least = min(medians[name] for name in best)
    allowed = ratio * least + slack
    word = "ok" if medians[ours] <= allowed else "SHORT"
    asked = f"at most {ratio}x + {slack:.0f} ms = {allowed:.2f} ms"
    print(f"  -> {ours}: {medians[ours]:.2f} ms, asked: {asked}: {word}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--store", type=Path, help="keep the store here, and use the one that is there")
    options = parser.parse_args()
    folder = options.store or Path(tempfile.mkdtemp())
    if (folder / "ordered").exists():
        store = TrajectoryStore.open(folder / "ordered")
    else:
        store = make(folder / "ordered", options.rows, options.tokens, shuffled=False)
    files = store.scan().data_files()
    megabytes = sum(Path(f).stat().st_size for f in files) / 1e6
    print(f"{store.count():,} rows, {len(files)} files, {megabytes:.0f} MB")
    own = duckdb.connect()
    own.execute(f"create view t as select * from read_parquet({files!r})")
    lazy = pl.scan_parquet(files, hive_partitioning=False)
    sql = connect(store, current_version=AT)
    held = store.scan(columns=["oldest_version_id", "length"]).to_arrow()
    numbers = (held["oldest_version_id"].to_pylist(), range(len(held)), held["length"].to_pylist())
    queue = deque(zip(*numbers, strict=True))
    rounds = options.rounds

    def counted(query: str) -> Callable[[], Any]:
        return lambda: own.execute(query).fetchall()

    found = race(
        "staleness filter + count",
        {
            "trajstore": lambda: store.scan(where=fresh(AT, LIMIT)).count(),
            "trajstore sql": lambda: sql.sql(
                f"select count(*) from trajectories where version_gap <= {LIMIT}"
            ),
            "duckdb": counted(f"select count(*) from t where {AT} - oldest_version_id <= {LIMIT}"),
            "polars": lambda: (
                lazy.filter(AT - pl.col("oldest_version_id") <= LIMIT).select(pl.len()).collect()
            ),
            "pandas": lambda: (
                AT - pd.concat(pd.read_parquet(f, columns=["oldest_version_id"]) for f in files) <= LIMIT
            ).sum(),
            "deque": lambda: sum(1 for v, _, _ in queue if AT - v <= LIMIT),
        },
        rounds,
    )
    verdict(found, ["duckdb", "polars"], "trajstore", 1.3)
    verdict(found, ["duckdb", "polars"], "trajstore sql", 2.5)
    verdict(found, ["pandas", "deque"], "trajstore", 1.0, 0.0)

    found = race(
        "gap histogram",
        {
            "trajstore": lambda: (
                store.scan(columns=["oldest_version_id"])
                .to_polars()
                .group_by(AT - pl.col("oldest_version_id"))
                .len()
            ),
            "trajstore sql": lambda: sql.sql("select version_gap, count(*) from trajectories group by 1"),
            "duckdb": counted(f"select {AT} - oldest_version_id, count(*) from t group by 1"),
            "polars": lambda: lazy.group_by(AT - pl.col("oldest_version_id")).len().collect(),
            "pandas": lambda: pd.concat(
                pd.read_parquet(f, columns=["oldest_version_id"]) for f in files
            ).value_counts(),
            "deque": lambda: Counter(AT - v for v, _, _ in queue),
        },
        rounds,
    )
    verdict(found, ["duckdb", "polars"], "trajstore", 1.3)
    verdict(found, ["duckdb", "polars"], "trajstore sql", 2.5)
    verdict(found, ["pandas", "deque"], "trajstore", 1.0, 0.0)

    by = pl.col("oldest_version_id") // 25
    each = N // 8
    ranked_sql = (
        "select id from (select id, row_number() over (partition by oldest_version_id // 25"
        f" order by hash(xor(id_hash, 7))) as r from {{}}) where r <= {each}"
    )

    def draw() -> list[int]:
        """What a trainer with a deque writes: rows by stratum, then a sample of each."""
        strata: dict[int, list[int]] = {}
        for version, i, _ in queue:
            strata.setdefault(version // 25, []).append(i)
        random = Random(7)
        return [i for members in strata.values() for i in random.sample(members, min(each, len(members)))]

    found = race(
        f"stratified {N} of 8 strata, hash-ranked",
        {
            "trajstore": lambda: stratified_sample(store.scan(), N, by=by, seed=7).count(),
            "trajstore sql": lambda: sql.sql(ranked_sql.format("trajectories")),
            "duckdb": counted(ranked_sql.format("t")),
            "polars": lambda: (
                lazy.select("id", "id_hash", stratum=by)
                .filter((pl.col("id_hash") ^ 7).hash().rank("ordinal").over("stratum") <= each)
                .collect()
            ),
            "pandas": lambda: (
                pd.concat(pd.read_parquet(f, columns=["id", "id_hash", "oldest_version_id"]) for f in files)
                .assign(s=lambda d: d.oldest_version_id // 25, h=lambda d: d.id_hash ^ 7)
                .sort_values("h")
                .groupby("s")
                .head(each)
            ),
            "deque": draw,
        },
        rounds,
    )
    verdict(found, ["duckdb", "polars"], "trajstore", 1.3)
    verdict(found, ["duckdb", "polars"], "trajstore sql", 2.5)
    verdict(found, ["pandas", "deque"], "trajstore", 1.0, 0.0)

    size = 256
    padded = (
        f"select 1 - sum(n)::double / sum(c * m) from (select sum(length) n, count(*) c, max(length) m from"
        f" (select length, (row_number() over () - 1) // {size} as b from {{}}) group by b)"
    )

    def ours() -> float:
        lengths = store.scan(columns=["length"]).to_arrow()["length"].to_numpy().astype(np.int64)
        return plan(lengths, Recipe(batch_size=size)).padding_ratio(lengths)

    def by_pandas() -> float:
        lengths = pd.concat((pd.read_parquet(f, columns=["length"]) for f in files), ignore_index=True)
        of = lengths.groupby(np.arange(len(lengths)) // size)["length"].agg(["sum", "count", "max"])
        return float(1 - of["sum"].sum() / (of["count"] * of["max"]).sum())

    def by_deque() -> float:
        padded = tokens = 0
        rows = iter(queue)
        while batch := [n for _, _, n in islice(rows, size)]:
            tokens += sum(batch)
            padded += max(batch) * len(batch)
        return 1 - tokens / padded

    found = race(
        f"padding ratio, batches of {size} in row order",
        {
            "trajstore": ours,
            "trajstore sql": lambda: sql.sql(padded.format("trajectories")),
            "duckdb": counted(padded.format("t")),
            "polars": lambda: (
                lazy.select("length")
                .with_row_index()
                .group_by(pl.col("index") // size)
                .agg(n=pl.col("length").sum(), c=pl.len(), m=pl.col("length").max())
                .select(1 - pl.col("n").sum() / (pl.col("c").cast(pl.Int64) * pl.col("m")).sum())
                .collect()
            ),
            "pandas": by_pandas,
            "deque": by_deque,
        },
        rounds,
    )
    verdict(found, ["duckdb", "polars"], "trajstore", 1.3)
    verdict(found, ["duckdb", "polars"], "trajstore sql", 2.5)
    verdict(found, ["pandas", "deque"], "trajstore", 1.0, 0.0)

    importance(store, own, max(2, rounds // 3))
    pruning(folder, options, max(2, rounds // 3))


def importance(store: TrajectoryStore, own: Any, rounds: int) -> None:
    """Mean importance ratio over trained tokens: the library and flat buffers by hand, against unnest."""
    names = ("log_probs", "behavior_log_probs", "loss_mask")
    source = store.scan().rows(names)
    held = store.scan(columns=["tokens", *SCALARS, *RATIO_COLUMNS]).to_batch()
    own.register("held", held.to_arrow())

    def flat() -> float:
        total = count = 0.0
        for p, q, m in zip(*(source.columns[name].chunks for name in names), strict=True):
            for at in range(0, len(p), 1 << 16):
                kept = m[at : at + (1 << 16)] > 0
                ratio = np.exp(p[at : at + (1 << 16)] - q[at : at + (1 << 16)])
                total += float(ratio[kept].sum(dtype=np.float64))
                count += int(kept.sum())
        return total / count

    unnested = (
        "select avg(exp(p - q)) from (select unnest(log_probs) p, unnest(behavior_log_probs) q,"
        " unnest(loss_mask) m from {}) where m = 1"
    )
    found = race(
        "mean importance ratio",
        {
            "trajstore, Parquet": lambda: importance_ratio(store),
            "duckdb unnest, Parquet": lambda: own.execute(unnested.format("t")).fetchall(),
            "trajstore, decoded": lambda: importance_ratio(held),
            "drift at every gap, decoded": lambda: metrics.drift(survey(held, measures=DRIFT).frame),
            "duckdb unnest, decoded": lambda: own.execute(unnested.format("held")).fetchall(),
            "flat buffers by hand, decoded": flat,
        },
        rounds,
    )
    times = found["duckdb unnest, decoded"] / found["trajstore, decoded"]
    print(f"  -> flat buffers: {times:.1f}x faster than unnest, asked: 3x: {'ok' if times >= 3 else 'SHORT'}")
    times = found["duckdb unnest, Parquet"] / found["trajstore, Parquet"]
    print(f"  -> decoding the Parquet included: {times:.1f}x")


def pruning(folder: Path, options: argparse.Namespace, rounds: int) -> None:
    """A staleness gate over all columns: files in version order against shuffled ones.

    A store's own files are in version order inside, so one whose appends were shuffled skips row groups all
    the same; what shuffled rows cost elsewhere is a plain Parquet file of them, read with the same filter.
    """
    stores = {}
    for name in ("ordered-small", "shuffled-small"):
        path = folder / name
        stores[name] = (
            TrajectoryStore.open(path)
            if path.exists()
            else make(path, options.rows // 5, options.tokens, shuffled=name.startswith("shuffled"))
        )
    plain = folder / "shuffled.parquet"
    if not plain.exists():
        table = stores["shuffled-small"].scan().to_arrow()
        order = np.random.default_rng(1).permutation(len(table))
        pq.write_table(table.take(order), plain, compression="zstd", row_group_size=1024)
    recent = pc.field("oldest_version_id") >= AT - LIMIT
    found = race(
        "staleness gate, all columns (a tenth of the rows)",
        {
            "in version order": lambda: stores["ordered-small"].scan(where=fresh(AT, LIMIT)).to_arrow(),
            "shuffled appends": lambda: stores["shuffled-small"].scan(where=fresh(AT, LIMIT)).to_arrow(),
            "shuffled rows, plain Parquet": lambda: pq.read_table(plain, filters=recent),
        },
        rounds,
    )
    ordered = found["in version order"]
    times = found["shuffled rows, plain Parquet"] / ordered
    print(f"  -> {times:.1f}x faster than shuffled rows, asked: 4x: {'ok' if times >= 4 else 'SHORT'}")
    print(f"  -> {found['shuffled appends'] / ordered:.1f}x faster than shuffled appends to a store")


if __name__ == "__main__":
    main()
