"""Owns which rows of a buffer are siblings: a chain of slots for each group; knows no rows' contents."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.buffer.columns import Column

Int64s = NDArray[np.int64]

_END = -1


class Groups:
    """Groups by small codes; a row without a group has code -1. Codes of groups that left are used again."""

    def __init__(self) -> None:
        self._code: dict[str, int] = {}
        self._name: list[str] = []
        self._free: list[int] = []
        self._full = 1024  # with so many codes it is time to look for empty groups
        self._next = Column(np.int64)  # for each slot, the next one of its group
        self._head, self._tail = Column(np.int64), Column(np.int64)
        self._count, self._meant = Column(np.int64), Column(np.int64)
        self._worst, self._broken = Column(np.int64), Column(np.bool_)

    def codes(self, names: pa.Array) -> Int64s:
        """Codes of the groups of these names [N]; new ones are made."""
        if names.null_count == len(names):
            return np.full(len(names), -1)
        if len(self._name) > self._full:
            self._drop_empty()
        found = names.dictionary_encode()
        codes = np.array(self._of(found.dictionary.to_pylist()))
        indices = found.indices.fill_null(-1).to_numpy()
        return np.where(indices < 0, -1, codes[indices])

    def _of(self, names: list[str]) -> list[int]:
        """A code for each of these names, which differ."""
        known = [self._code.get(name) for name in names]
        self._make_room(known.count(None))
        codes = []
        for name, code in zip(names, known, strict=True):
            if code is None:
                code = self._code[name] = self._free.pop()
                self._name[code] = name
            codes.append(code)
        empty = [
            code for code, count in zip(codes, self._count.values[codes].tolist(), strict=True) if not count
        ]
        if empty:  # new ones, and those that all rows have left
            self._head.values[empty] = self._tail.values[empty] = _END
            self._meant.values[empty] = 0
            self._worst.values[empty] = np.iinfo(np.int64).max
            self._broken.values[empty] = False
        return codes

    def _make_room(self, count: int) -> None:
        """Sees to `count` free codes: one growth for all names of a batch."""
        more = count - len(self._free)
        if more > 0:
            known = len(self._name)
            self._name += [""] * more
            for column in (self._head, self._tail, self._count, self._meant, self._worst, self._broken):
                column.append(np.zeros(more, np.int64))
            self._free += range(known + more - 1, known - 1, -1)

    def _drop_empty(self) -> None:
        """Forgets the names of groups that left: not when they leave, but once many may have."""
        for code in np.flatnonzero(self._count.values == 0).tolist():
            if self._code.get(self._name[code]) == code:
                del self._code[self._name[code]]
                self._free.append(code)
        self._full = 2 * (len(self._name) - len(self._free)) + 1024

    def add(self, codes: Int64s, slots: Int64s, versions: Int64s, meant: pa.Array) -> None:
        """Adds rows [N] at new slots; `meant` is how many their groups were to have, where known."""
        self._next.append(np.full(len(slots), _END))
        grouped = codes >= 0
        if not grouped.any():
            return
        self._link(codes[grouped], slots[grouped])
        np.add.at(self._count.values, codes[grouped], 1)
        np.minimum.at(self._worst.values, codes[grouped], versions[grouped])
        if meant.null_count < len(meant):
            np.maximum.at(self._meant.values, codes[grouped], meant.fill_null(0).to_numpy()[grouped])

    def _link(self, codes: Int64s, slots: Int64s) -> None:
        """Hangs slots behind the chains of their groups."""
        order = np.argsort(codes, kind="stable")
        codes, slots = codes[order], slots[order]
        last = np.append(codes[1:] != codes[:-1], True)
        first = np.append(True, last[:-1])
        self._next.values[slots[:-1][~last[:-1]]] = slots[1:][~last[:-1]]
        heads, ends = slots[first], slots[last]
        groups = codes[first]
        old = self._tail.values[groups]
        self._head.values[groups[old == _END]] = heads[old == _END]
        self._next.values[old[old != _END]] = heads[old != _END]
        self._tail.values[groups] = ends

    def slots(self, code: int) -> Int64s:
        """Slots that were ever added to a group since it came, ascending."""
        chain, following = [int(self._head.values[code])], self._next.values
        while (after := int(following[chain[-1]])) != _END:
            chain.append(after)
        return np.array(chain)

    def sizes(self, codes: Int64s) -> Int64s:
        """How many rows of these groups are held; of -1, which is no group, anything."""
        return self._count.values[codes] if len(self._count.values) else np.zeros(len(codes), np.int64)

    def remove(self, codes: Int64s) -> None:
        """Counts off rows that left; a group that lost some of its rows is never whole again."""
        codes = codes[codes >= 0]
        np.subtract.at(self._count.values, codes, 1)
        self._broken.values[codes] = True

    def whole(self) -> tuple[Int64s, Int64s]:
        """Groups that reached the size they were meant to have and lost nobody, and their oldest versions."""
        count = self._count.values
        codes = np.flatnonzero((count > 0) & (count >= self._meant.values) & ~self._broken.values)
        return codes, self._worst.values[codes]

    def renumber(self, codes: Int64s) -> None:
        """Makes the chains anew for slots 0 .. N-1, all held, of groups `codes` [N]."""
        self._next = Column(np.int64, len(codes))
        self._next.append(np.full(len(codes), _END))
        self._head.values[:] = self._tail.values[:] = _END
        grouped = np.flatnonzero(codes >= 0)
        if len(grouped):
            self._link(codes[grouped], grouped)
