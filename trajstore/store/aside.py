"""Owns making a folder aside, so that it is seen whole or not at all; must not know what is made in it.

A folder that is being made has a file beside it which its maker keeps locked. The lock goes with the process:
what a killed one left is known by it, and removed when the same folder is made again.
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

from trajstore.errors import StoreExistsError

_MADE, _OWNED = ".importing", ".importing.owner"


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """Where to make `folder`; it is moved into place after the block, or removed when that fails.

    Raises:
        StoreExistsError: something has appeared at `folder` in the meantime.
    """
    aside = _nearest(folder) / f".{folder.name}-{uuid.uuid4().hex}{_MADE}"
    owner = aside.with_suffix(_OWNED)
    descriptor = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield aside
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.rename(folder)
        except OSError as error:
            raise StoreExistsError(f"{folder} appeared while its first rows were read: {error}") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    finally:
        owner.unlink(missing_ok=True)
        os.close(descriptor)


def sweep_aside(folder: Path) -> None:
    """Removes what makers of `folder` left that are no more; what others are making stays."""
    for owner in _nearest(folder).glob(f".{escape(folder.name)}-{'[0-9a-f]' * 32}{_OWNED}"):
        try:
            descriptor = os.open(owner, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(owner.with_suffix(""), ignore_errors=True)
            owner.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _nearest(folder: Path) -> Path:
    """The folder above that is there already."""
    parent = folder.parent
    while not parent.exists():
        parent = parent.parent
    return parent
