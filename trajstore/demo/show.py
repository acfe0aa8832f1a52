"""Owns what the demo prints: the tables one asks of a finished run, each by the library's own verbs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console
from rich.table import Table

from trajstore.demo.policy import Policy, log_probs_of
from trajstore.demo.train import EPOCHS, MAX_STALENESS, Update
from trajstore.loader import TrajectoryLoader
from trajstore.plan import Recipe, plan
from trajstore.query import Connection, connect, stratified_sample
from trajstore.selection import seeded_keys
from trajstore.store import Scan, TrajectoryStore

BATCH_ROWS = 32
BUCKET_WINDOW = 8
SAMPLED_OF_EACH_GAP = 8
BAR = 32

GAPS = """\
select version_gap, count(*) as n, sum(length) as tokens, avg(reward) as reward
from trajectories where status = 'completed'
group by version_gap order by version_gap"""

PARTIALS = """\
select count(*) filter (status = 'aborted') as aborted,
    count(*) filter (parent_id is not null) as continued,
    count(*) filter (newest_version_id > oldest_version_id) as spanning
from trajectories"""

LEARNT = (
    "select version_id, count(*) n, avg(reward) r from trajectories where status = 'completed' "
    "group by 1 order by 1"
)


def everything(
    console: Console,
    store: TrajectoryStore,
    policy: Policy,
    current: int,
    updates: Sequence[Update],
    seed: int,
) -> None:
    """Prints the tables of a run whose newest policy version is `current`."""
    finished = store.scan("status = 'completed'")
    with connect(store, current_version=current) as sql:
        _written(console, store, sql)
        _trained(console, updates)
        facts = finished.columns(["id", "id_hash", "length", "oldest_version_id"]).to_polars()
        facts = facts.with_columns(gap=current - pl.col("oldest_version_id"))
        _gaps(console, sql, _drift(finished, facts, policy))
        _padding(console, facts, seed)
        sample = _sample(console, finished, facts, current, seed)
        _batch(console, sample)
        _learnt(console, sql)
    _next(console, store.path, current)


def _written(console: Console, store: TrajectoryStore, sql: Connection) -> None:
    appends = [snapshot for snapshot in store.history() if snapshot.operation == "append"]
    writers = len({snapshot.writer_id for snapshot in appends})
    counts = sql.sql(PARTIALS).to_pylist()[0]
    _say(console, f"{store.count():,} rows in {len(appends)} commits of {writers} writers at the same time.")
    _say(
        console,
        f"Partial rollouts: {counts['aborted']:,} aborted when new weights came or the run ended, "
        f"{counts['continued']:,} continued as new rows; {counts['spanning']:,} rows span several versions.",
    )


def _trained(console: Console, updates: Sequence[Update]) -> None:
    gaps: Counter[int] = sum((update.gaps for update in updates), Counter())
    spread = ", ".join(f"{gaps[gap]:,} at gap {gap}" for gap in sorted(gaps))
    rows = sum(update.rows for update in updates)
    _say(
        console,
        f"The trainer made {len(updates)} updates from {rows:,} rows, {EPOCHS} epochs each, read with",
    )
    _say(console, f"fresh(at=version, max_staleness={MAX_STALENESS}): {spread}.")


def _drift(scan: Scan, facts: pl.DataFrame, policy: Policy) -> dict[int, float]:
    """Mean |log-ratio| of the sampled tokens at each version gap: newest against behavior policy."""
    gap_of = dict(facts.select("id", "gap").iter_rows())
    ratios: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    with torch.no_grad():
        for batch in TrajectoryLoader(scan, batch_size=2 * BATCH_ROWS, bucket_window=BUCKET_WINDOW):
            log_ratio = log_probs_of(policy, batch["input_ids"]) - batch["behavior_log_probs"]
            totals = (log_ratio.abs() * batch["loss_mask"]).sum(1).tolist()
            counts = batch["loss_mask"].sum(1).tolist()
            for id, total, count in zip(batch["ids"], totals, counts, strict=True):
                ratios[gap_of[id]] += total
                tokens[gap_of[id]] += count
    return {gap: ratios[gap] / tokens[gap] for gap in tokens}


def _gaps(console: Console, sql: Connection, drift: dict[int, float]) -> None:
    _head(console, "How old is the data, and how far off the newest policy?")
    _code(console, GAPS)
    rows = sql.sql(GAPS).to_pylist()
    _table(
        console,
        ("version gap", "rows", "tokens", "mean reward", "mean |log-ratio|"),
        (
            (gap, row["n"], row["tokens"], f"{row['reward']:.3f}", f"{drift[gap]:.3f}")
            for row in rows
            for gap in [row["version_gap"]]
        ),
    )
    _say(console, "|log-ratio|: log-probs under the newest weights against the stored behavior log-probs.")


def _padding(console: Console, facts: pl.DataFrame, seed: int) -> None:
    _head(console, f"How much of a batch of {BATCH_ROWS} is padding?")
    lengths = facts["length"].cast(pl.Int64).to_numpy()
    keys = seeded_keys(facts["id_hash"].to_numpy(), seed)
    plans = {
        "order of arrival": plan(lengths, Recipe(BATCH_ROWS)),
        "shuffled": plan(lengths, Recipe(BATCH_ROWS), keys=keys),
        f"shuffled, length buckets in windows of {BUCKET_WINDOW} batches": plan(
            lengths, Recipe(BATCH_ROWS, bucket_window=BUCKET_WINDOW), keys=keys
        ),
    }
    _table(
        console,
        ("order", "batches", "padding ratio"),
        ((name, len(batches), f"{batches.padding_ratio(lengths):.1%}") for name, batches in plans.items()),
    )


def _sample(console: Console, scan: Scan, facts: pl.DataFrame, current: int, seed: int) -> Scan:
    before = Counter(facts["gap"].to_list())
    n = SAMPLED_OF_EACH_GAP * len(before)
    _head(console, "A stratified sample: as many rows of each version gap")
    _code(console, f'stratified_sample(scan, {n}, by="version_gap", at={current}, seed={seed})')
    sample = stratified_sample(scan, n, by="version_gap", at=current, seed=seed)
    oldest = sample.columns(["oldest_version_id"]).to_polars()["oldest_version_id"]
    after = Counter((current - oldest).to_list())
    _table(
        console,
        ("version gap", "rows", "sampled"),
        ((gap, before[gap], after[gap]) for gap in sorted(before)),
    )
    return sample


def _batch(console: Console, sample: Scan) -> None:
    _head(console, "A batch of the sample, as a trainer takes it")
    _code(console, f"next(iter(TrajectoryLoader(sample, batch_size={BATCH_ROWS}, shuffle=True)))")
    batch = next(iter(TrajectoryLoader(sample, batch_size=BATCH_ROWS, shuffle=True)))
    _table(console, ("key", "shape", "dtype"), (_described(name, value) for name, value in batch.items()))


def _described(name: str, value: Any) -> tuple[str, str, str]:
    if isinstance(value, torch.Tensor):
        return name, str(list(value.shape)), str(value.dtype).removeprefix("torch.")
    shown = f"{len(value)} of them" if isinstance(value, list) else f"{value:.4g}"
    return name, shown, type(value).__name__


def _learnt(console: Console, sql: Connection) -> None:
    _head(console, "Did it learn? Mean reward by the version a row was started under")
    mark = "#" if console.options.ascii_only else "█"
    _table(
        console,
        ("version", "rows", "mean reward", ""),
        (
            (row["version_id"], row["n"], f"{row['r']:.3f}", mark * round(BAR * row["r"]))
            for row in sql.sql(LEARNT).to_pylist()
        ),
    )


def commands(path: Path, current: int) -> list[str]:
    """What to try next, as one types it in a shell."""
    where = shlex.quote(str(path))
    return [
        f"trajstore info {where}",
        f'trajstore sql {where} "{LEARNT}"',
        f"trajstore sample {where} -n 8 --by version_gap --at {current}",
    ]


def _next(console: Console, path: Path, current: int) -> None:
    _head(console, "Try next")
    for command in commands(path, current):
        _code(console, command)


def _head(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold", markup=False, highlight=False)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _code(console: Console, text: str) -> None:
    """Something to copy: never broken into lines that its author did not make."""
    console.print(text, style="cyan", markup=False, highlight=False, soft_wrap=True)


def _table(console: Console, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(header_style="bold")
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    for i, name in enumerate(names):
        numeric = all(row[i][:1].isdigit() and " " not in row[i] for row in cells)
        table.add_column(name, justify="right" if numeric else "left")
    for row in cells:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console.print(table)
