"""Owns the shell verbs that give rows out: export and replay; computes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from trajstore.batch import TrajectoryBatch
from trajstore.cli import show
from trajstore.cli.options import AtSnapshot, Json, Store, opened_at
from trajstore.errors import QueryError, StoreExistsError
from trajstore.importers.trajstore_jsonl import write_line
from trajstore.store.aside import made_aside, sweep_aside


class Pairing(StrEnum):
    """Pairs of a group."""

    best_worst = "best_worst"
    all = "all"


class LogProbs(StrEnum):
    """Whose log-probs."""

    trainer = "trainer"
    behavior = "behavior"


class Order(StrEnum):
    """In what order rows come again."""

    version = "version"
    ingest = "ingest"
    step = "step"


class Target(StrEnum):
    """What a replay is written as."""

    jsonl = "jsonl"


app = typer.Typer()

Where = Annotated[
    str | None, typer.Option("--where", metavar="SQL", help="Only rows for which this is true.")
]


@app.command(epilog="Example: trajstore export air air.slime --as slime --where 'reward > 0'")
def export(
    store: Store,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File or folder to make; nothing is replaced.")],
    format: Annotated[
        str,
        typer.Option(
            "--as", metavar="FORMAT", help="jsonl, hf, verl, slime, trl, atif, ilql, ppo, dpo, kto or sft."
        ),
    ] = "jsonl",
    where: Where = None,
    min_reward: Annotated[
        float | None,
        typer.Option("--min-reward", metavar="R", help="sft: rows from R on; kto: good from R on."),
    ] = None,
    top: Annotated[
        float | None, typer.Option("--top", metavar="Q", help="sft: the best part Q of each group.")
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", metavar="M", help="dpo: rewards of a pair differ by more than M.")
    ] = 0.0,
    pairing: Annotated[
        Pairing, typer.Option("--pairing", help="dpo: the best and worst of a group, or all pairs.")
    ] = Pairing.best_worst,
    log_probs: Annotated[
        LogProbs,
        typer.Option("--log-probs", help="ppo: behavior = the engine's where there are no others."),
    ] = LogProbs.trainer,
    snapshot: AtSnapshot = None,
    json: Json = False,
) -> None:
    """Write rows as files of another program, or as a set for a trainer."""
    from trajstore.export import SetOptions
    from trajstore.export import export as write_out

    options = SetOptions(min_reward, top, margin, pairing.value, log_probs.value)
    terminal = show.console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task(out.name, total=None)
        done = write_out(
            opened_at(store, snapshot).scan(where),
            out,
            format,
            options=options,
            report=lambda rows, total: bar.update(task, completed=rows, total=total),
        )
    if json:
        show.as_json({**vars(done), "path": str(done.path), "format": format})
        return
    files = f" in {done.files:,} files" if done.files > 1 else ""
    text = f"wrote {out}: {done.rows:,} rows as {format}{files}, {show.size(done.bytes)}"
    show.console().print(text, markup=False)
    if done.left_behind:
        told = ", ".join(f"{name} ({rows:,} rows)" for name, rows in sorted(done.left_behind.items()))
        show.console().print(f"{format} has no place for {told}", markup=False)
    for reason, count in done.dropped.items():
        show.console().print(f"left out {count:,}: {reason}", markup=False)


@app.command(epilog="Example: trajstore replay air --by version --to jsonl | head")
def replay(
    store: Store,
    by: Annotated[
        Order | None,
        typer.Option("--by", help="Policy version (the default), order of arrival, or training step."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Only what this training step was given.")
    ] = None,
    to: Annotated[Target, typer.Option("--to", help="What rows are written as.")] = Target.jsonl,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="File to make, instead of the output."),
    ] = None,
    where: Where = None,
    snapshot: AtSnapshot = None,
) -> None:
    """Give the rows again in the order of the run, one line each."""
    from trajstore.replay import replay as run_again

    opened = opened_at(store, snapshot)
    batches: Iterable[TrajectoryBatch]
    if step is not None:
        if where is not None or by is not None:
            wrong = "--where" if where is not None else "--by"
            raise QueryError(f"{wrong} does not go with --step: it gives what was trained on, exactly")
        batches = [run_again(opened, step=step)]
    else:
        batches = (moment.batch for moment in run_again(opened, by=(by or Order.version).value, where=where))
    if out is None:
        for batch in batches:
            sys.stdout.writelines(write_line(row) + "\n" for row in batch)
        sys.stdout.flush()
        return
    if os.path.lexists(out):
        raise StoreExistsError(f"{out} exists", hint="choose another file")
    sweep_aside(out.absolute())
    with made_aside(out.absolute()) as aside, aside.open("x", encoding="utf-8", newline="\n") as file:
        for batch in batches:
            file.writelines(write_line(row) + "\n" for row in batch)
