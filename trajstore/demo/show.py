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

from trajstore.demo.offline import Epoch
from trajstore.demo.train import EPOCHS, MAX_STALENESS, Update
from trajstore.errors import TrajstoreError
from trajstore.loader import TrajectoryLoader
from trajstore.plan import Recipe, plan
from trajstore.query import Connection, connect, stratified_sample
from trajstore.report import Facts, gather, page
from trajstore.selection import seeded_keys
from trajstore.store import Scan, TrajectoryStore

BATCH_ROWS = 32
BUCKET_WINDOW = 8
SAMPLED_OF_EACH_GAP = 8
BAR = 32

TASK = "metadata.task"

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
    current: int,
    updates: Sequence[Update],
    seed: int,
    recomputed: int,
    epoch: Epoch,
) -> None:
    """Prints the tables of a run whose newest policy version is `current`, and writes its report."""
    finished = store.scan("status = 'completed'")
    with connect(store, current_version=current) as sql:
        _written(console, store, sql)
        _trained(console, updates)
        _say(
            console, f"Then it stored log-probs under the newest weights beside those of {recomputed:,} rows."
        )
        found = gather(store, at=current, by=TASK)
        facts = finished.columns(["id", "id_hash", "length", "oldest_version_id"]).to_polars()
        facts = facts.with_columns(gap=current - pl.col("oldest_version_id"))
        _gaps(console, found)
        _padding(console, facts, seed)
        sample = _sample(console, finished, facts, current, seed)
        _batch(console, sample)
        _learnt(console, sql)
    _offline(console, epoch)
    _doctor(console, found, store.path)
    _report(console, found, store.path)
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


def _gaps(console: Console, facts: Facts) -> None:
    _head(console, "How old is the data, and how far off the newest policy?")
    _code(console, "metrics.drift(survey(store.scan(\"status = 'completed'\")).frame)")
    rewards = {row["gap"]: row["reward"] for row in facts.ages.to_dicts()}
    _table(
        console,
        ("version gap", "rows", "tokens", "mean reward", "mean |log-ratio|", "KL (k3)", "ESS / n"),
        (
            (
                *(row["drift_gap"], row["rows"], row["tokens"], f"{rewards[row['drift_gap']]:.3f}"),
                *(f"{row['abs_log_ratio']:.3f}", f"{row['k3']:.3f}", f"{row['ess_tokens']:.2f}"),
            )
            for row in facts.drift.to_dicts()
        ),
    )
    _say(
        console,
        "log-ratio: log-probs under the newest weights less the behavior log-probs, of sampled tokens.",
    )


def _doctor(console: Console, facts: Facts, path: Path) -> None:
    _head(console, "What should one know before training on it?")
    _code(console, f"trajstore doctor {shlex.quote(str(path))} --by {TASK}")
    _table(
        console,
        ("level", "check", "what"),
        ((finding.level, finding.check, finding.what) for finding in facts.findings),
    )


def _report(console: Console, facts: Facts, path: Path) -> None:
    """Writes the report beside the store; a missing plotting library is told, and no failure."""
    out = path.with_name(f"{path.name}-report.html")
    _head(console, "All of it as one page, to open in a browser")
    try:
        out.write_text(page(facts))
    except TrajstoreError as error:
        _say(console, f"No report: {error.message}; {error.hint}")
    else:
        _code(console, str(out))


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


def _offline(console: Console, epoch: Epoch) -> None:
    _head(console, "Offline: an epoch of ILQL from the same rows")
    _code(console, "data = ilql_dataset(store.scan(\"status = 'completed'\")); TrajectoryLoader(data, ...)")
    _say(
        console,
        f"{epoch.rows:,} rows, {epoch.actions:,} actions, {epoch.steps} steps; {epoch.cut_off:,} rows were "
        "cut off, so they bootstrap.",
    )
    names = {"loss_q": "Q", "loss_v": "V", "loss_cql": "conservative Q", "loss_awac": "policy"}
    _table(
        console,
        ("loss", "at the start", "at the end"),
        ((names[name], *(f"{value:.3f}" for value in ends)) for name, ends in epoch.terms.items()),
    )


def commands(path: Path, current: int) -> list[str]:
    """What to try next, as one types it in a shell."""
    where = shlex.quote(str(path))
    return [
        f"trajstore plan {where} --max-staleness 4 --by {TASK}",
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
