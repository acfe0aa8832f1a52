"""Owns SQL: a confined DuckDB connection over a store or a scan; must not let a query touch a disk.

Views read a registered Arrow dataset, and external access and spilling are switched off and locked: the text
of a query can read the store's rows and nothing else, and can write nowhere. One text is one query, so that
none changes what the next one sees.
"""

from __future__ import annotations

import re
from importlib.resources import files as package_files
from types import TracebackType
from typing import Any

import duckdb
import pyarrow as pa

from trajstore.errors import CorruptFileError, QueryError
from trajstore.store import Scan, TrajectoryStore
from trajstore.trajectory import PolicyVersion, version_number

VIEWS = ("trajectories",)


class Connection:
    """A DuckDB connection that sees the rows of one snapshot, as the views of `VIEWS`.

    One open result at a time; `cursor()` gives a second one over the same snapshot.
    """

    def __init__(self, scan: Scan, current_version: int | None, stored: Any = None) -> None:
        self._scan = scan
        self._current_version = current_version
        self._stored = _stored(scan) if stored is None else stored
        self._duckdb = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"})
        self._duckdb.register("stored", self._stored)
        for view in VIEWS:
            text = package_files("trajstore.query").joinpath(f"sql/{view}.sql").read_text()
            number = "null::bigint" if current_version is None else str(int(current_version))
            self._duckdb.execute(text.replace("$current_version", number))
        # A name in FROM must never mean a Python variable of the caller.
        self._duckdb.execute("set python_enable_replacements = false")
        # A sort that does not fit in memory fails, rather than spill rows into the working directory.
        self._duckdb.execute("set temp_directory = ''")
        self._duckdb.execute("set timezone = 'UTC'")
        self._duckdb.execute("set enable_external_access = false")
        self._duckdb.execute("set lock_configuration = true")

    @property
    def snapshot(self) -> int:
        """The snapshot that queries see."""
        return self._scan.snapshot

    def sql(self, query: str, parameters: Any = None) -> pa.Table:
        """The result of one query as an Arrow table.

        Args:
            query: one query in DuckDB's dialect: select, from, with, pivot, describe, summarize, explain.
            parameters: values for `?` or `$name` in it.

        Raises:
            QueryError: the query is wrong, or asks for what a confined connection may not do.
        """
        try:
            _check_reads(query)
            return _whole_numbers(self._duckdb.sql(query, params=parameters).to_arrow_table())
        except duckdb.Error as error:
            raise QueryError(_first_line(error), hint=_hint(error)) from error

    def cursor(self) -> Connection:
        """Another connection over the same rows, for another thread."""
        return Connection(self._scan, self._current_version, self._stored)

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
        source: what to ask about. A scan of chosen columns shows these and what `version_gap` needs.
        current_version: the trainer's policy version, for `version_gap`.

    Raises:
        CorruptFileError: a data file of the snapshot is missing.
    """
    scan = source.scan() if isinstance(source, TrajectoryStore) else source
    return Connection(scan, None if current_version is None else version_number(current_version))


def _stored(scan: Scan) -> Any:
    """What DuckDB reads: the snapshot's files as a dataset, or the chosen rows of a narrowed scan."""
    if "oldest_version_id" not in scan.schema.names:
        scan = scan.columns([*scan.schema.names, "oldest_version_id"])
    if not scan.is_whole or not scan.data_files():
        return scan.to_arrow()
    try:
        return scan.to_dataset()
    except (OSError, pa.ArrowException) as error:
        raise CorruptFileError(
            f"a data file cannot be read: {error}",
            hint="restore the file from a backup, or go back to a snapshot that does not use it",
        ) from error


def _whole_numbers(table: pa.Table) -> pa.Table:
    """DuckDB sums integers in 128 bits, which Arrow has only as decimals: back to int64 where they fit."""
    for i, field in enumerate(table.schema):
        if pa.types.is_decimal(field.type) and field.type.precision == 38 and field.type.scale == 0:
            try:
                table = table.set_column(i, field.name, table.column(i).cast(pa.int64()))
            except pa.ArrowInvalid:  # a sum beyond 64 bits stays a decimal
                continue
    return table


_QUERIES = (duckdb.StatementType.SELECT, duckdb.StatementType.MULTI)  # MULTI is a pivot
_EXPLAIN = re.compile(r"\s*explain\b(\s*\([^)]*\)|\s+analyze\b)*", re.IGNORECASE)


def _check_reads(text: str) -> None:
    """Refuses a text that is not one query; duckdb.Error when it is no SQL at all."""
    statements = duckdb.extract_statements(text)
    if len(statements) != 1:
        raise QueryError(f"found {len(statements)} statements, expected one query")
    kind = statements[0].type
    explained = _EXPLAIN.match(text)
    if kind == duckdb.StatementType.EXPLAIN and explained:  # `explain analyze` runs what follows
        _check_reads(text[explained.end() :])
    elif kind not in _QUERIES:
        raise QueryError(
            f"found a statement of type {kind.name.lower()}, expected a query",
            hint="SQL here reads the store's rows only; use your own DuckDB on Scan.data_files() for more",
        )


def _first_line(error: duckdb.Error) -> str:
    return str(error).partition("\n")[0]


def _hint(error: duckdb.Error) -> str:
    if isinstance(error, duckdb.PermissionException):
        return "SQL here reads the store's rows only; use your own DuckDB on Scan.data_files() for more"
    for line in str(error).splitlines()[1:]:
        if line.startswith(("Candidate", "Did you mean")):
            return line
    return f"views: {', '.join(VIEWS)}; their columns: describe {VIEWS[0]}"
