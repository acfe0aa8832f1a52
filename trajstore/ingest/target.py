"""Owns where an import writes: a store that is there, or is made when the first thing goes into it.

It must not know what goes in. A store that is made is seen with what was put into it first or, when that
fails, not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from trajstore.errors import StoreExistsError
from trajstore.store import Place, TrajectoryStore
from trajstore.store.aside import made_aside, sweep_aside

T = TypeVar("T")


class Target:
    """The store of one import.

    Attributes:
        store: None as long as there is none; while it is being made, the one that is made aside.
        at: where `store` is now.
    """

    def __init__(self, path: str | Path) -> None:
        """Looks what is there, and removes what a killed import of the same store left beside it.

        Raises:
            StoreExistsError: there is something at `path` that is not a store.
        """
        self.at = Place.of(path)
        if self.at.folder is not None:
            sweep_aside(self.at.folder)
        self.store = TrajectoryStore.open(self.at) if self.at.is_table() else None
        if self.store is None and not self.at.is_free():
            raise StoreExistsError(f"{path} exists and is not a store", hint="choose another path")

    def fill(self, work: Callable[[TrajectoryStore], T]) -> T:
        """What `work` gives for the store, which is made if there is none; `work` may call this again."""
        if self.store is not None:
            return work(self.store)
        at = self.at
        try:
            with self._made(at) as (self.at, self.store):
                done = work(self.store)
        except BaseException:
            self.at, self.store = at, None
            raise
        self.at, self.store = at, TrajectoryStore.open(at)
        return done

    @staticmethod
    @contextmanager
    def _made(at: Place) -> Iterator[tuple[Place, TrajectoryStore]]:
        """A new store and where it is: aside on disk. A bucket has no move, so there it is removed again.

        It is removed only while nothing was committed to it: another process may have found it meanwhile.
        """
        if at.folder is not None:
            with made_aside(at.folder) as aside:
                yield Place.of(aside), TrajectoryStore.create(aside)
            return
        store = TrajectoryStore.create(at)  # when another process was first, nothing there is ours
        made = store.snapshot
        try:
            yield at, store
        except BaseException:
            if TrajectoryStore.open(at).snapshot == made:
                for entry in at.entries():
                    at.delete(entry.name)
            raise
