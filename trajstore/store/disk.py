"""Owns what makes files last: fsync, and moving what was made aside into its place; knows no store."""

from __future__ import annotations

import os
from pathlib import Path

from trajstore.errors import StoreExistsError

_MANY = 256
"""From so many files on, one sync of the disk is quicker than one of each."""


def sync(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(made: Path, target: Path) -> None:
    """Moves a file or folder to its place; it is whole there, or not there, also after a power cut.

    Raises:
        StoreExistsError: there is something at `target`, but for an empty folder in the place of a folder.
    """
    parts = [made, *made.rglob("*")]
    if len(parts) < _MANY:
        for part in parts:
            sync(part)
    else:
        os.sync()
    try:
        if made.is_file() and os.path.lexists(target):
            raise FileExistsError(f"{target} exists")
        made.rename(target)
    except OSError as error:
        raise StoreExistsError(
            f"{target} appeared while it was being made: {error}", hint="choose another path"
        ) from error
    sync(target.parent)
