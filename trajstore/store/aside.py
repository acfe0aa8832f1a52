"""Owns making a file or folder aside, so that it is seen whole or not at all; must not know what is made.

What is being made has a file beside it which its maker keeps locked. The lock goes with the process: what a
killed one left is known by it, and removed when the same is made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from trajstore.store.disk import settle

_MADE, _OWNED = ".making", ".making.owner"


@contextmanager
def workplace(target: Path) -> Iterator[Path]:
    """A path beside `target` that is its maker's alone; what is there after the block is removed."""
    aside = _nearest(target) / f".{target.name}-{uuid.uuid4().hex}{_MADE}"
    owner = aside.with_suffix(_OWNED)
    descriptor = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield aside
    finally:
        _remove(aside)
        owner.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def made_aside(target: Path) -> Iterator[Path]:
    """Where to make a file or folder; it is moved into place after the block, or removed when that fails.

    Raises:
        StoreExistsError: something has appeared at `target` in the meantime.
    """
    with workplace(target) as aside:
        yield aside
        target.parent.mkdir(parents=True, exist_ok=True)
        settle(aside, target)


def sweep_aside(target: Path) -> None:
    """Removes what makers of `target` left that are no more; what others are making stays."""
    for owner in _nearest(target).glob(f".{escape(target.name)}-{'[0-9a-f]' * 32}{_OWNED}"):
        try:
            descriptor = os.open(owner, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove(owner.with_suffix(""))
            owner.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _nearest(target: Path) -> Path:
    """The folder above that is there already."""
    parent = target.parent
    while not parent.exists():
        parent = parent.parent
    return parent
