"""Owns the shell verbs that judge a store: doctor, plan and report; computes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trajstore.cli import show
from trajstore.cli.options import AtSnapshot, Json, Store, opened_at
from trajstore.errors import InputError, StorageError

if TYPE_CHECKING:
    from trajstore.query.planner import Forecast

FAILED = 1


class Layout(StrEnum):
    """How a batch is laid out."""

    padded = "padded"
    packed = "packed"
    prompt_response = "prompt_response"


app = typer.Typer()

Version = Annotated[
    int | None,
    typer.Option("--at", metavar="V", help="Current policy version; the newest in the store if not given."),
]
By = Annotated[str, typer.Option("--by", metavar="COLUMN", help="What a task is: a column, or metadata.KEY.")]


@app.command(epilog="Example: trajstore doctor air")
def doctor(
    store: Store,
    at: Version = None,
    by: By = "source",
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on a warning, too.")] = False,
    snapshot: AtSnapshot = None,
    json: Json = False,
) -> None:
    """Say what is wrong with the rows before one trains on them. Exits 1 on an error."""
    from trajstore.query.doctor import doctor as examine

    opened = opened_at(store, snapshot)
    found = examine(opened, at=at, by=by)
    if json:
        show.as_json([vars(f) for f in found])
    else:
        show.findings(found, rows=opened.scan().count())
    serious = ("error", "warning") if strict else ("error",)
    if any(f.level in serious for f in found):
        raise typer.Exit(FAILED)


@app.command(epilog="Example: trajstore plan air --max-staleness 4 --group 8 --max-tokens 16384 --buckets 3")
def plan(
    store: Store,
    max_staleness: Annotated[
        list[int] | None,
        typer.Option("--max-staleness", metavar="K", help="Only rows at most K versions behind."),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            "--group", metavar="G", help="Only whole groups of G completed rows or more, none stale."
        ),
    ] = None,
    max_tokens: Annotated[
        list[int] | None, typer.Option("--max-tokens", metavar="T", help="Token positions of a batch.")
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option("--batch-size", metavar="B", help="Rows of a batch; 32 if no --max-tokens is given."),
    ] = None,
    buckets: Annotated[
        list[int] | None,
        typer.Option("--buckets", metavar="W", help="Sort by length in windows of W batches."),
    ] = None,
    layout: Annotated[Layout, typer.Option("--layout", help="What --max-tokens counts.")] = Layout.padded,
    ranks: Annotated[int, typer.Option("--ranks", metavar="R", help="Ranks; each has a batch a step.")] = 1,
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Read log-probs too, for the ESS of importance ratios.")
    ] = False,
    at: Version = None,
    by: By = "source",
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Chooses the shuffle.")] = 0,
    snapshot: AtSnapshot = None,
    json: Json = False,
) -> None:
    """Say what gates would drop and what batches would be like, from lengths and versions alone.

    Options that may be given several times are compared: one line for each combination.
    """
    from trajstore.plan import Recipe
    from trajstore.query.planner import BATCH_ROWS, forecast
    from trajstore.query.survey import facts, survey

    stalenesses: list[int | None] = [*max_staleness] if max_staleness else [None]
    windows: list[int | None] = [*buckets] if buckets else [None]
    sizes: list[tuple[int | None, int | None]] = [(None, n) for n in max_tokens or ()]
    sizes += [(n, None) for n in batch_size or ()]
    rows = (survey if log_probs else facts)(opened_at(store, snapshot), at=at, by=by)
    made = []
    for staleness, (count, budget), window in itertools.product(
        stalenesses, sizes or [(BATCH_ROWS, None)], windows
    ):
        recipe = Recipe(count, budget, layout.value, window, world_size=ranks)
        asked = {"max_staleness": staleness, "batch_size": count, "max_tokens": budget, "buckets": window}
        made.append((asked, forecast(rows, recipe, max_staleness=staleness, group=group, seed=seed)))
    if json:
        show.as_json(
            [{**asked, **vars(f), "by_task": f.by_task.to_dicts(), "starved": f.starved} for asked, f in made]
        )
        return
    if not rows.frame["length"].sum():
        empty = "no row has tokens" if len(rows) else "there are no rows"
        show.console().print(f"[yellow]warning[/] {empty}: batches would be empty")
    given = [name for name in made[0][0] if any(asked[name] is not None for asked, _ in made)]
    ratios = any(f.ess_tokens == f.ess_tokens for _, f in made)
    show.table([_line({name: asked[name] for name in given}, f, ranks, ratios) for asked, f in made])
    reasons = {reason for _, f in made for reason in f.dropped}
    if reasons:
        # What a row is dropped for does not hang on the batches, but for the length that fits in one.
        gates = [name for name in ("max_staleness", "max_tokens") if name in given]
        lost = {tuple(asked[name] for name in gates): (asked, f) for asked, f in made}
        show.table(
            [line for asked, f in lost.values() for line in _lost(asked, gates, f, reasons)],
            title=f"dropped, by {by}",
        )
        for asked, f in lost.values():
            _warn(asked, gates, f)


def _line(asked: Mapping[str, Any], f: Forecast, ranks: int, ratios: bool) -> dict[str, Any]:
    line = {
        **asked,
        "kept": f"{f.kept:,} of {f.rows:,}",
        "batches": f"{f.batches:,}",
        "rows/batch": f"{f.rows_per_batch:,.1f}",
        "tokens/batch": f"{f.tokens_per_batch:,.0f} ({f.fewest_tokens:,} to {f.most_tokens:,})",
        "padding": f"{f.padding:.1%}" if f.tokens_per_batch else None,
        "ESS freshness": _share(f.ess_freshness),
    }
    if ranks > 1:
        line |= {"steps": f"{f.batches // ranks:,}", "tokens/step": f"{f.tokens_per_batch * ranks:,.0f}"}
    if ratios:
        line |= {"ESS tokens": _share(f.ess_tokens), "ESS rows": _share(f.ess_rows)}
    return line


def _lost(
    asked: Mapping[str, Any], gates: Iterable[str], f: Forecast, reasons: Iterable[str]
) -> Iterator[dict[str, Any]]:
    names = {"rows", "kept", *reasons}
    for task in f.by_task.to_dicts():
        line: dict[str, Any] = {**{name: asked[name] for name in gates}, "task": _task(task["task"])}
        line |= {name: value for name, value in task.items() if name in names}
        line["kept %"] = f"{task['kept'] / task['rows']:.1%}"
        for name, title in (("kept_length", "mean length kept"), ("dropped_length", "mean length dropped")):
            line[title] = None if task[name] is None else round(task[name], 1)
        yield line


def _warn(asked: Mapping[str, Any], gates: Iterable[str], f: Forecast) -> None:
    """Names the tasks of which nothing is left, and why."""
    at = ", ".join(f"{name} {asked[name]}" for name in gates if asked[name] is not None)
    for task in f.by_task.to_dicts():
        if task["task"] in f.starved:
            why = ", ".join(f"{task[reason]:,} {reason}" for reason in f.dropped if task[reason])
            name = show.cell(_task(task["task"]), cut=False)
            show.console().print(f"[yellow]warning[/] {at and at + ': '}nothing is left of {name}: {why}")


def _task(name: str | None) -> str:
    return "unknown" if name is None else name


def _share(value: float) -> str | None:
    return f"{value:.2f}" if value == value else None


@app.command(epilog="Example: trajstore report air -o report.html")
def report(
    store: Store,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="File to write.")] = Path(
        "report.html"
    ),
    at: Version = None,
    by: By = "source",
    snapshot: AtSnapshot = None,
) -> None:
    """Write one page with the plots and numbers of a store; it needs no network."""
    from trajstore.report import gather, page

    if out.is_dir() or not out.absolute().parent.is_dir():
        what = (
            "is a folder" if out.is_dir() else f"cannot be made: there is no folder {out.absolute().parent}"
        )
        raise InputError(f"{out} {what}", hint="give the file to write: -o report.html")
    text = page(gather(opened_at(store, snapshot), at=at, by=by))
    try:
        out.write_text(text)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}") from error
    show.console().print(f"wrote {out} ({show.size(out.stat().st_size)})", markup=False)
