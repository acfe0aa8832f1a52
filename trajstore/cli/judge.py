"""Owns the shell verbs that judge a store: doctor, plan and report; computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trajstore.cli import show
from trajstore.cli.maintain import reference
from trajstore.store import TrajectoryStore

FAILED = 1
SHOWN_IDS = 3

app = typer.Typer()

Store = Annotated[str, typer.Argument(metavar="STORE", help="Folder of the store, or s3://bucket/prefix.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
AtSnapshot = Annotated[
    str | None,
    typer.Option("--snapshot", metavar="N", help="Read the store as it was at this snapshot, or tag."),
]
Version = Annotated[
    int | None,
    typer.Option("--at", metavar="V", help="Current policy version; the newest in the store if not given."),
]
By = Annotated[str, typer.Option("--by", metavar="COLUMN", help="What a task is: a column, or metadata.KEY.")]


def _open(store: str, snapshot: str | None) -> TrajectoryStore:
    opened = TrajectoryStore.open(store)
    return opened if snapshot is None else opened.at(reference(snapshot))


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

    found = examine(_open(store, snapshot), at=at, by=by)
    if json:
        show.as_json([vars(f) for f in found])
    else:
        show.findings(found)
    serious = ("error", "warning") if strict else ("error",)
    if any(f.level in serious for f in found):
        raise typer.Exit(FAILED)


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

    out.write_text(page(gather(_open(store, snapshot), at=at, by=by)))
    show.console().print(f"wrote {out} ({show.size(out.stat().st_size)})", markup=False)
