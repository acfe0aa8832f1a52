"""Owns the definitions of SQL views and macros, and the DuckDB they live in; runs no user's text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files as package_files

import duckdb
import pyarrow as pa

from trajstore.schema import Column


def locked() -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory, with the macros, that reads and writes nothing outside and keeps it so.

    Its cursors are as confined, cost next to nothing, and have views of their own.
    """
    connection = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            # A name in FROM must never mean a Python variable of the caller.
            "python_enable_replacements": "false",
            # A sort that does not fit in memory fails, rather than spill rows into the working directory.
            "temp_directory": "",
        },
    )
    connection.execute(_text("macros"))
    connection.execute("set global timezone = 'UTC'")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def unlocked() -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory, with the macros, that may do whatever DuckDB can: for code of one's own."""
    connection = duckdb.connect(":memory:")
    connection.execute(_text("macros"))
    connection.execute("set global timezone = 'UTC'")
    return connection


def over_parquet(paths: Sequence[str], schema: pa.Schema) -> str:
    """A query for these columns of local Parquet files; it reads `nothing`, a table without rows.

    A file may lack columns that were added later: they are null in its rows.
    """
    files = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
    names = ", ".join('"' + name.replace('"', '""') + '"' for name in schema.names)
    return (
        f"select {names} from (from nothing union all by name"
        f" from read_parquet([{files}], union_by_name = true, hive_partitioning = false))"
    )


def define(
    connection: duckdb.DuckDBPyConnection,
    schema: pa.Schema,
    current_version: int | None,
    views: Sequence[str],
) -> None:
    """Makes views over what is registered as `stored`.

    Args:
        connection: where.
        schema: the columns of `stored`.
        current_version: the trainer's policy version, None when not known.
        views: which; each is a file in sql/.
    """
    number = "null::bigint" if current_version is None else f"({int(current_version)})"
    for view in views:
        text = _text(view).replace("$current_version", number)
        connection.execute(text.replace("$token_columns", _token_columns(schema)))


def _text(name: str) -> str:
    return package_files("trajstore.query").joinpath(f"sql/{name}.sql").read_text()


def _token_columns(schema: pa.Schema) -> str:
    """Every per-token column, cut to a piece of the row and unnested under its own name."""
    names = [f.name for f in schema if pa.types.is_list(f.type) and _per_token(f)]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    return ",\n        ".join(
        f'unnest({name}[piece.start + 1 : piece."end"]) as {"token" if name == _TOKENS else name}'
        for name in quoted
    )


_TOKENS = '"tokens"'


def _per_token(field: pa.Field) -> bool:
    return Column.from_field(field).role == "token"
