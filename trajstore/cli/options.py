"""Owns what several verbs are told in the same words: a store, a snapshot of it, --json; runs no verb."""

from __future__ import annotations

from typing import Annotated

import typer

from trajstore.store import TrajectoryStore

Store = Annotated[str, typer.Argument(metavar="STORE", help="Folder of the store, or s3://bucket/prefix.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
AtSnapshot = Annotated[
    str | None,
    typer.Option("--snapshot", metavar="N", help="Read the store as it was at this snapshot, or tag."),
]


def opened_at(store: str, snapshot: str | None) -> TrajectoryStore:
    """The store as it was at a snapshot that was given as text; None: as it is.

    Raises:
        StoreNotFoundError: there is no store.
        QueryError: there is no such snapshot or tag.
    """
    opened = TrajectoryStore.open(store)
    return opened if snapshot is None else opened.at(reference(snapshot))


def reference(text: str) -> int | str:
    """A snapshot's number, or its tag."""
    return int(text) if text.isdecimal() else text
