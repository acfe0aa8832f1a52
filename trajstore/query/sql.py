"""Owns SQL: a confined DuckDB connection over a store or a scan; must not let a query touch a disk.

Views read a registered Arrow dataset, and external access is switched off and locked: the text of a query
can read the store's rows and nothing else, and can write nowhere.
"""

from __future__ import annotations

from importlib.resources import files as package_files
from types import TracebackType
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs

from trajstore.errors import QueryError
from trajstore.store import Scan, TrajectoryStore
from trajstore.trajectory import PolicyVersion, version_number

VIEWS = ("trajectories",)


class Connection:
    """A DuckDB connection that sees the rows of one snapshot, as the views of `VIEWS`.

    One open result at a time; `cursor()` gives a second one over the same snapshot.
    """

    def __init__(self, scan: Scan, current_version: int | None) -> None:
        self._scan = scan
        self._current_version = current_version
        self._stored = _stored(scan)
        self._duckdb = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"})
        self._duckdb.register("stored", self._stored)
        for view in VIEWS:
            text = package_files("trajstore.query").joinpath(f"sql/{view}.sql").read_text()
            number = "null::bigint" if current_version is None else str(int(current_version))
            self._duckdb.execute(text.replace("$current_version", number))
        # A name in FROM must never mean a Python variable of the caller.
        self._duckdb.execute("set python_enable_replacements = false")
        self._duckdb.execute("set enable_external_access = false")
        self._duckdb.execute("set lock_configuration = true")

    @property
    def snapshot(self) -> int:
        """The snapshot that queries see."""
        return self._scan.snapshot

    def sql(self, query: str, parameters: Any = None) -> pa.Table:
        """The result of one query as an Arrow table.

        Args:
            query: SQL in DuckDB's dialect.
            parameters: values for `?` or `$name` in it.

        Raises:
            QueryError: the query is wrong, or asks for what a confined connection may not do.
        """
        try:
            result: Any = self._duckdb.sql(query, params=parameters)  # None for a statement without rows
            return pa.table({}) if result is None else _whole_numbers(result.to_arrow_table())
        except duckdb.Error as error:
            raise QueryError(_first_line(error), hint=_hint(error)) from error

    def cursor(self) -> Connection:
        """Another connection over the same rows, for another thread."""
        return Connection(self._scan, self._current_version)

    def close(self) -> None:
        """Frees the connection."""
        self._duckdb.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    source: TrajectoryStore | Scan, *, current_version: PolicyVersion | int | None = None
) -> Connection:
    """A connection over a store, a store at a snapshot, or a scan.

    Args:
        source: what to ask about.
        current_version: the trainer's policy version, for `version_gap`.
    """
    scan = source.scan() if isinstance(source, TrajectoryStore) else source
    return Connection(scan, None if current_version is None else version_number(current_version))


def _stored(scan: Scan) -> Any:
    """What DuckDB reads: the snapshot's files as a dataset, or the chosen rows of a narrowed scan."""
    paths = scan.data_files()
    if not scan.is_whole or not paths:
        return scan.to_arrow()
    return pads.dataset(paths, scan.schema, format="parquet", filesystem=pyarrow.fs.LocalFileSystem())


def _whole_numbers(table: pa.Table) -> pa.Table:
    """DuckDB sums integers as 128-bit ones, which Arrow has only as decimals: back to int64 where they fit."""
    for i, field in enumerate(table.schema):
        if pa.types.is_decimal(field.type) and field.type.precision == 38 and field.type.scale == 0:
            try:
                table = table.set_column(i, field.name, table.column(i).cast(pa.int64()))
            except pa.ArrowInvalid:  # a sum beyond 64 bits stays a decimal
                continue
    return table


def _first_line(error: duckdb.Error) -> str:
    return str(error).partition("\n")[0]


def _hint(error: duckdb.Error) -> str | None:
    if isinstance(error, duckdb.PermissionException):
        return "SQL here reads the store's rows only; use your own DuckDB on Scan.data_files() for more"
    if isinstance(error, duckdb.CatalogException):
        return f"views: {', '.join(VIEWS)}"
    return None
