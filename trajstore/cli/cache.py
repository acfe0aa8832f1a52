"""Owns the shell verbs of the column cache: what is in it, and its removal; decodes nothing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trajstore.cli import show
from trajstore.cli.options import Json
from trajstore.errors import InputError
from trajstore.store import TrajectoryStore
from trajstore.store.cache import ColumnCache, Entry, keys
from trajstore.store.place import Place

app = typer.Typer(no_args_is_help=True, help="Columns that loaders have decoded: list them, or remove them.")


@app.command("ls", epilog="Example: trajstore cache ls")
def ls(
    store: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="Only what belongs to this store.")
    ] = None,
    json: Json = False,
) -> None:
    """List the data files that have decoded columns, least recently used first."""
    cache = ColumnCache()
    only = None if store is None else _keys(store)
    found: dict[str, list[Entry]] = {}
    for entry in cache.entries():
        if only is None or entry.data_file in only:
            found.setdefault(entry.data_file, []).append(entry)
    rows: list[dict[str, Any]] = [
        {
            "data_file": name,
            "columns": len(entries),
            "bytes": sum(e.bytes for e in entries),
            "last_used": max(e.used for e in entries).isoformat(sep=" ", timespec="seconds"),
        }
        for name, entries in found.items()
    ]
    total = sum(row["bytes"] for row in rows)
    if json:
        show.as_json({"folder": cache.folder, "bytes": total, "limit": cache.limit(), "files": rows})
        return
    show.table(rows, columns=["data_file", "columns", "bytes", "last_used"])
    show.console().print(f"{total:,} of {cache.limit():,} bytes in {cache.folder}", markup=False)


@app.command("rm", epilog="Example: trajstore cache rm --all")
def rm(
    store: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="Remove what belongs to this store.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all of it.")] = False,
    json: Json = False,
) -> None:
    """Remove decoded columns; loaders that have them open go on, and others decode them again."""
    if (store is None) != everything:
        raise InputError("say what goes", hint="a STORE, or --all; one of the two")
    cache = ColumnCache()
    freed = cache.remove(None if store is None else _keys(store))
    if json:
        show.as_json({"folder": cache.folder, "freed": freed})
    else:
        show.console().print(f"freed {freed:,} bytes in {cache.folder}", markup=False)


def _keys(store: str) -> set[str]:
    TrajectoryStore.open(store)  # says so when there is none
    return keys(Place.of(store))
