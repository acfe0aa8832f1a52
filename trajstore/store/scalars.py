"""Owns the decoded scalar columns of data files, kept while a handle lives; knows no steps.

Data files are immutable, so a column of a file is decoded once: nothing is ever invalidated, and every
scan and every snapshot of one handle shares it. What is kept is bounded; the least recently used goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.selection.derived import PER_ROW, PER_SNAPSHOT
from trajstore.store import files
from trajstore.store.datafile import LogFile
from trajstore.store.place import Place

if TYPE_CHECKING:
    import polars as pl

Int64s = NDArray[np.int64]

MAX_BYTES = 1 << 30
ARRIVED = "__arrived"
"""The snapshot that brought a row: `ingest_snapshot`, or that of the file where it is null."""
ORDER = (ARRIVED, "writer_id", "writer_seq")
"""The order of arrival."""


class ScalarCache:
    """Columns of files by name, shared by the scans of one handle and its snapshots; safe for threads.

    Args:
        max_bytes: how much is kept, counted as polars holds it.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._columns: OrderedDict[tuple[str, str], pl.Series] = OrderedDict()
        self._bytes = 0
        self._frames: OrderedDict[tuple[str, ...], Frame] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Bytes that are kept now, without those of the frames in use."""
        return self._bytes

    def frame(self, place: Place, kept: Sequence[LogFile], schema: pa.Schema) -> Frame:
        """All rows of these files, in order of arrival; columns are read when they are asked for."""
        key = (*(file.name for file in kept), *schema.names)
        with self._lock:
            found = self._frames.pop(key, None) or Frame(self, place, tuple(kept), schema)
            self._frames[key] = found
            while len(self._frames) > 2:  # the newest snapshot, and the one before it
                self._frames.popitem(last=False)
        return found

    def series(
        self,
        place: Place,
        file: LogFile,
        names: Sequence[str],
        read: Callable[[LogFile, list[str]], pa.Table],
    ) -> dict[str, pl.Series]:
        """Columns of one file, read where they are not kept yet."""
        import polars as pl

        with self._lock:
            there = {n: self._columns[file.name, n] for n in names if (file.name, n) in self._columns}
            for name in there:
                self._columns.move_to_end((file.name, name))
        missing = [name for name in names if name not in there]
        if missing:
            table = read(file, missing)
            for name in missing:
                column = pl.from_arrow(table.column(name))
                assert isinstance(column, pl.Series)
                there[name] = column.alias(name)
            with self._lock:
                for name in missing:
                    self._keep((file.name, name), there[name])
        return there

    def _keep(self, key: tuple[str, str], column: pl.Series) -> None:
        size = int(column.estimated_size())
        if key in self._columns or size > self.max_bytes // 4:
            return
        self._columns[key] = column
        self._bytes += size
        while self._bytes > self.max_bytes:
            _, gone = self._columns.popitem(last=False)
            self._bytes -= int(gone.estimated_size())


@dataclass
class Frame:
    """The rows of some files in order of arrival: `row[i]` of `files[file[i]]`."""

    cache: ScalarCache
    place: Place
    files: tuple[LogFile, ...]
    schema: pa.Schema

    def __post_init__(self) -> None:
        self._made: dict[str, pl.Series] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return sum(file.rows for file in self.files)

    def columns(self, names: Sequence[str]) -> pl.DataFrame:
        """These columns, [N] each, without a copy when they are there; unknown names are derived ones."""
        import polars as pl

        with self._lock:
            wanted = [name for name in names if name not in self._made]
            stored = [name for name in wanted if name not in PER_SNAPSHOT]
            if stored:
                self._made |= self._ordered(stored)
            for name, derived in PER_SNAPSHOT.items():
                if name in wanted:
                    self._made[name] = derived.compute(self.columns(derived.sources)).alias(name)
            return pl.DataFrame([self._made[name] for name in names])

    @cached_property
    def file(self) -> Int64s:
        """Number of each row's file, [N]."""
        numbers = np.repeat(np.arange(len(self.files)), [file.rows for file in self.files])
        return numbers[self._order]

    @cached_property
    def row(self) -> Int64s:
        """Position of each row in its file, [N]."""
        counts = np.array([file.rows for file in self.files], np.int64)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        return (np.arange(len(self)) - starts)[self._order]

    @cached_property
    def _order(self) -> Int64s:
        """Positions, in the files one after another, of the rows in order of arrival."""
        parts, spans = [], []
        for file in self.files:
            part = self._read(file, ORDER)
            parts.append([part[name] for name in ORDER])
            arrived = part[ARRIVED].to_numpy()
            spans.append((arrived.min(initial=2**62), arrived.max(initial=-1)))
        starts = np.cumsum([0, *(file.rows for file in self.files)])
        if all(a[1] < b[0] for a, b in pairwise(spans)):  # files in the order they came
            orders = [_argsort(*part) + start for part, start in zip(parts, starts, strict=False)]
            return np.concatenate([np.empty(0, np.int64), *orders])
        import polars as pl

        return _argsort(*(pl.concat(column) for column in zip(*parts, strict=True)))

    def _ordered(self, names: list[str]) -> dict[str, pl.Series]:
        import polars as pl

        # The order is needed as well: a file is opened once for both.
        parts = [self._read(file, [*dict.fromkeys((*names, *ORDER))]) for file in self.files]
        if not parts:
            empty = {name: pa.nulls(0, self._type(name)) for name in names}
            return {name: pl.Series(name, pl.from_arrow(values)) for name, values in empty.items()}
        whole = {name: pl.concat([part[name] for part in parts], rechunk=True) for name in names}
        if (self._order == np.arange(len(self))).all():
            return whole
        return {name: column.gather(self._order) for name, column in whole.items()}

    def _type(self, name: str) -> pa.DataType:
        if name == ARRIVED:
            return pa.int64()
        if name not in PER_ROW:
            return self.schema.field(name).type
        return PER_ROW[name].compute(self._schema(PER_ROW[name].sources).empty_table()).type

    def _read(self, file: LogFile, names: Sequence[str]) -> dict[str, pl.Series]:
        return self.cache.series(self.place, file, names, self._decode)

    def _decode(self, file: LogFile, names: list[str]) -> pa.Table:
        """Columns of a file, derived ones among them, from its bytes."""
        plain = [name for name in names if name not in PER_ROW and name != ARRIVED]
        if ARRIVED in names and "ingest_snapshot" not in names:
            plain.append("ingest_snapshot")
        read = files.read(self.place, file, self._schema(plain)) if plain else None
        columns = []
        for name in names:
            derived = PER_ROW.get(name)
            if derived is None:
                assert read is not None
                stored = read.column("ingest_snapshot" if name == ARRIVED else name)
                columns.append(stored.fill_null(file.snapshot) if name == ARRIVED else stored)
            elif derived.always is not None and file.nulls.get(derived.always) == 0:
                columns.append(pa.repeat(True, file.rows))
            else:
                columns.append(derived.compute(files.read(self.place, file, self._schema(derived.sources))))
        return pa.Table.from_arrays(columns, names=names)

    def _schema(self, names: Sequence[str]) -> pa.Schema:
        return pa.schema([self.schema.field(name) for name in names])


def _argsort(arrived: pl.Series, writer: pl.Series, number: pl.Series) -> Int64s:
    """Positions by snapshot, writer and the writer's own number; polars' own sort when several are mixed."""
    if arrived.n_unique() <= 1 and writer.n_unique() <= 1:
        order: Int64s = np.argsort(number.to_numpy(), kind="stable")
        return order
    import polars as pl

    keys = pl.DataFrame({"arrived": arrived, "writer": writer, "number": number})
    return (
        keys.select(pl.arg_sort_by("arrived", "writer", "number", maintain_order=True))
        .to_series()
        .to_numpy()
        .astype(np.int64)
    )
