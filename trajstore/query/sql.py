"""Owns SQL: a confined DuckDB connection over a store or a scan; must not let a query touch a disk.

Views read registered Arrow data, and external access and spilling are switched off and locked: the text of a
query can read the store's rows and nothing else, and can write nowhere. One text is one query, so that none
changes what the next one sees. A query that needs scalar columns only is answered from what the handle has
decoded already; one that needs a list column reads the files. Only a connection that its owner calls trusted
is DuckDB as it is.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import CorruptFileError, QueryError
from trajstore.plan import Recipe, plan
from trajstore.query.views import define, locked, over_parquet, unlocked
from trajstore.store import Scan, TrajectoryStore
from trajstore.trajectory import PolicyVersion, version_number

VIEWS = ("trajectories", "tokens", "segments", "groups", "batches")

Batches = Iterable[NDArray[np.int64]]


class Connection:
    """A DuckDB connection that sees the rows of one snapshot, as the views of `VIEWS`.

    One open result at a time; `cursor()` gives a second one over the same snapshot.
    """

    def __init__(self, rows: Rows, current_version: int | None) -> None:
        self._rows = rows
        self._current_version = current_version
        self._planner: duckdb.DuckDBPyConnection | None = None
        self._narrow: duckdb.DuckDBPyConnection | None = None
        self._loaded: set[str] = set()
        self._full: duckdb.DuckDBPyConnection | None = None

    @property
    def snapshot(self) -> int:
        """The snapshot that queries see."""
        return self._rows.scan.snapshot

    def sql(self, query: str, parameters: Any = None) -> pa.Table:
        """The result of one query as an Arrow table.

        Args:
            query: one query in DuckDB's dialect: select, from, with, pivot, describe, summarize, explain. On
                a trusted connection, any statements; the result is the last one's.
            parameters: values for `?` or `$name` in it.

        Raises:
            QueryError: the query is wrong, or asks for what a confined connection may not do.
            CorruptFileError: a data file of the snapshot went away.
        """
        try:
            if self._rows.trusted:
                return _result(self._over_files(query), query, parameters)
            if _SHOW_TABLES.fullmatch(query):
                return pa.table({"name": self._rows.views()})
            kind = _check_reads(query)
            narrow = self._over_scalars(query, parameters) if kind == duckdb.StatementType.SELECT else None
            if narrow is not None:
                # What is folded away, as in typeof(tokens), still has to be there when names are looked up.
                with suppress(duckdb.BinderException):
                    return _result(narrow, query, parameters)
            return _result(self._over_files(query), query, parameters)
        except duckdb.Error as error:
            raise QueryError(_first_line(error), hint=_hint(error)) from error

    def cursor(self) -> Connection:
        """Another connection over the same rows, for another thread."""
        return Connection(self._rows, self._current_version)

    def close(self) -> None:
        """Frees the connection."""
        for connection in (self._planner, self._narrow, self._full):
            if connection is not None:
                connection.close()
        self._planner = self._narrow = self._full = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Which rows answer

    def _over_files(self, query: str) -> duckdb.DuckDBPyConnection:
        if self._full is None:
            self._full = self._open(self._rows.everything())
        self._add_batches(self._full, query)
        return self._full

    def _over_scalars(self, query: str, parameters: Any) -> duckdb.DuckDBPyConnection | None:
        """The connection over the scalars in memory, None when they are not enough for the query."""
        needed = self._needed(query, parameters)
        if needed is None or not needed <= self._rows.scalar_names:
            return None
        if self._narrow is None:
            self._narrow = self._rows.duckdb.cursor()
        wanted = {"oldest_version_id"} | needed
        if _names("groups", query):
            wanted |= set(_OF_GROUPS) & self._rows.scalar_names
        if not wanted <= self._loaded:
            self._loaded |= wanted
            table = self._rows.scalars([name for name in self._rows.schema.names if name in self._loaded])
            self._narrow.register("stored", table)
            views = ("trajectories", *(["groups"] if set(_OF_GROUPS) <= self._loaded else []))
            define(self._narrow, table.schema, self._current_version, views)
        self._add_batches(self._narrow, query)
        return self._narrow

    def _add_batches(self, connection: duckdb.DuckDBPyConnection, query: str) -> None:
        if _names("batches", query):
            connection.register("batch_padding", self._rows.padding())
            define(connection, self._rows.schema, self._current_version, ("batches",))

    def _needed(self, query: str, parameters: Any) -> set[str] | None:
        """Columns that a query reads, by DuckDB's own plan of it; None when the plan does not say."""
        if self._planner is None:
            self._planner = self._open(self._rows.schema.empty_table())
            self._planner.register("batch_padding", _PADDING.empty_table())
            define(self._planner, self._rows.schema, self._current_version, ("batches",))
        planned = self._planner.execute(f"explain (format json) {query}", parameters).fetchall()
        try:
            scans = list(_scans(json.loads(planned[0][1])))
        except (IndexError, ValueError, KeyError, TypeError):
            return None
        names: set[str] = set()
        for scan in scans:
            if scan["name"] in ("COLUMN_DATA_SCAN", "EMPTY_RESULT"):
                return None  # describe, and what was answered from the empty rows of the planner
            listed = scan["extra_info"].get("Projections", [])
            names |= {listed} if isinstance(listed, str) else set(listed)
            filters = str(scan["extra_info"].get("Filters", ""))
            names |= {name for name in self._rows.schema.names if name in filters}
        return names & set(self._rows.schema.names)

    def _open(self, stored: Any) -> duckdb.DuckDBPyConnection:
        connection = self._rows.duckdb.cursor()
        schema = self._rows.schema
        if isinstance(stored, str):
            connection.register("nothing", schema.empty_table())
            connection.execute(f"create or replace temp view stored as {stored}")
        else:
            connection.register("stored", stored)
        define(connection, schema, self._current_version, self._rows.views()[:-1])
        return connection


_OF_GROUPS = (
    *("group_id", "group_size", "status", "reward", "length"),
    *("oldest_version_id", "newest_version_id"),
)
_OF_TOKENS = (
    *("id", "group_id", "length", "prompt_length", "version_segments", "oldest_version_id"),
    *("newest_version_id", "tokens", "loss_mask", "action_mask", "log_probs", "behavior_log_probs"),
)
_NEEDED_BY = {
    "tokens": _OF_TOKENS,
    "segments": ("id", "group_id", "version_segments"),
    "groups": _OF_GROUPS,
}
_PADDING = pa.schema(
    [
        *(("plan", pa.string()), ("batch", pa.int64()), ("rows", pa.int64()), ("tokens", pa.int64())),
        *(("longest", pa.int64()), ("padded_tokens", pa.int64()), ("padding_ratio", pa.float64())),
    ]
)


class Rows:
    """What connections read, shared by the cursors of one connection; safe for threads.

    Args:
        scan: the rows.
        plans: batching plans by name, each the positions of its batches, in the order of the rows.
        trusted: whether queries may do all that DuckDB can.
    """

    def __init__(self, scan: Scan, plans: Mapping[str, Batches] | None, *, trusted: bool = False) -> None:
        if "oldest_version_id" not in scan.schema.names:
            scan = scan.columns([*scan.schema.names, "oldest_version_id"])
        self.scan = scan
        self.schema = scan.schema
        self.scalar_names = {f.name for f in self.schema if not pa.types.is_nested(f.type)}
        self._plans = plans
        self._padding: pa.Table | None = None
        self._lock = threading.Lock()
        self.trusted = trusted
        self.duckdb = unlocked() if trusted else locked()
        self._everything: Any = None
        if scan.is_whole and scan.data_files():
            try:
                self._everything = scan.to_dataset()
            except (OSError, pa.ArrowException) as error:
                raise CorruptFileError(
                    f"a data file cannot be read: {error}",
                    hint="restore the file from a backup, or go back to a snapshot that does not use it",
                ) from error

    def everything(self) -> Any:
        """The snapshot's files as a dataset, or the chosen rows of a narrowed scan.

        For a trusted connection over local files, a query by DuckDB's own reader, which is faster.
        """
        if self.trusted and self.scan.is_whole and self.scan.place.folder is not None:
            paths = self.scan.data_files()
            if paths and not any(set(path) & set("*?[") for path in paths):  # a name, never a pattern
                return over_parquet(paths, self.schema)
        with self._lock:
            if self._everything is None:
                self._everything = self.scan.to_arrow()
            return self._everything

    def views(self) -> list[str]:
        """Views for which the columns are there, in the order of `VIEWS`; `batches`, last, always is."""
        return [view for view in VIEWS if set(_NEEDED_BY.get(view, ())) <= set(self.schema.names)]

    def scalars(self, names: Sequence[str]) -> pa.Table:
        """Scalar columns of the rows, from the handle's cache."""
        return self.scan.columns(names).to_arrow()

    def padding(self) -> pa.Table:
        """What every batch of the plans pads, one row a batch."""
        with self._lock:
            if self._padding is None:
                lengths = self.scan.columns(["length"]).to_arrow()["length"].to_numpy().astype(np.int64)
                plans = self._plans
                if plans is None:
                    plans = {
                        "row order": plan(lengths, Recipe(batch_size=256)),
                        "bucketed": plan(lengths, Recipe(batch_size=256, bucket_window=64)),
                    }
                rows = [row for name, made in plans.items() for row in _padding(name, made, lengths)]
                self._padding = pa.Table.from_pylist(rows, _PADDING)
            return self._padding


def _padding(name: str, batches: Batches, lengths: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
    for number, positions in enumerate(batches):
        rows = np.asarray(positions, np.int64)
        tokens, longest = int(lengths[rows].sum()), int(lengths[rows].max(initial=0))
        padded = longest * len(rows)
        yield {
            "plan": name,
            "batch": number,
            "rows": len(rows),
            "tokens": tokens,
            "longest": longest,
            "padded_tokens": padded,
            "padding_ratio": 1 - tokens / padded if padded else 0.0,
        }


def connect(
    source: TrajectoryStore | Scan,
    *,
    current_version: PolicyVersion | int | None = None,
    plans: Mapping[str, Batches] | None = None,
    trusted: bool = False,
) -> Connection:
    """A connection over a store, a store at a snapshot, or a scan.

    Args:
        source: what to ask about. A scan of chosen columns shows these and what `version_gap` needs.
        current_version: the trainer's policy version, for `version_gap`.
        plans: batching plans by name for the view `batches`: each gives arrays of positions in the order
            of the scan's rows, as a `trajstore.plan.Plan` does.
        trusted: for SQL of your own, never for what somebody else typed: nothing is confined. Queries may
            read and write any file, make tables and load extensions, and DuckDB itself reads the files.

    Raises:
        CorruptFileError: a data file of the snapshot is missing.
    """
    scan = source.scan() if isinstance(source, TrajectoryStore) else source
    version = None if current_version is None else version_number(current_version)
    return Connection(Rows(scan, plans, trusted=trusted), version)


def _names(view: str, query: str) -> bool:
    return re.search(rf"\b{view}\b", query, re.IGNORECASE) is not None


def _result(connection: duckdb.DuckDBPyConnection, query: str, parameters: Any) -> pa.Table:
    # The stub does not say it: a statement that is no query has no result.
    answer: duckdb.DuckDBPyRelation | None = connection.sql(query, params=parameters)
    return pa.table({}) if answer is None else _whole_numbers(answer.to_arrow_table())


def _scans(nodes: Any) -> Iterator[Any]:
    """The leaves of a plan that read rows."""
    for node in nodes if isinstance(nodes, list) else [nodes]:
        if node["name"].strip() in ("PYTHON_ARROW_SCAN", "ARROW_SCAN", "COLUMN_DATA_SCAN", "EMPTY_RESULT"):
            yield {**node, "name": node["name"].strip()}
        yield from _scans(node["children"])


def _whole_numbers(table: pa.Table) -> pa.Table:
    """DuckDB sums integers in 128 bits, which Arrow has only as decimals: back to int64 where they fit."""
    for i, field in enumerate(table.schema):
        if pa.types.is_decimal(field.type) and field.type.precision == 38 and field.type.scale == 0:
            try:
                table = table.set_column(i, field.name, table.column(i).cast(pa.int64()))
            except pa.ArrowInvalid:  # a sum beyond 64 bits stays a decimal
                continue
    return table


_READS_ONLY = "SQL here reads the store's rows only; use your own DuckDB on Scan.data_files() for more"
_SHOW_TABLES = re.compile(r"\s*show\s+(all\s+)?tables\s*;?\s*", re.IGNORECASE)
_QUERIES = (duckdb.StatementType.SELECT, duckdb.StatementType.MULTI)  # MULTI is a pivot
_EXPLAIN = re.compile(r"\s*explain\b(\s*\([^)]*\)|\s+analyze\b)*", re.IGNORECASE)


def _check_reads(text: str) -> Any:
    """The type of a text that is one query; duckdb.Error when it is no SQL at all."""
    statements = duckdb.extract_statements(text)
    if len(statements) != 1:
        raise QueryError(f"found {len(statements)} statements, expected one query")
    try:
        kind = statements[0].type
    except ValueError as error:  # a type that DuckDB's own Python does not know is no query
        raise QueryError("found a statement that is no query", hint=_READS_ONLY) from error
    explained = _EXPLAIN.match(text)
    if kind == duckdb.StatementType.EXPLAIN and explained:  # `explain analyze` runs what follows
        _check_reads(text[explained.end() :])
    elif kind not in _QUERIES:
        raise QueryError(
            f"found a statement of type {kind.name.lower()}, expected a query",
            hint=_READS_ONLY,
        )
    return kind


def _first_line(error: duckdb.Error) -> str:
    return str(error).partition("\n")[0]


def _hint(error: duckdb.Error) -> str:
    if isinstance(error, duckdb.PermissionException):
        return _READS_ONLY
    for line in str(error).splitlines()[1:]:
        # DuckDB's guess at a table is one of its own catalogue, not a view.
        if line.startswith("Candidate") or (
            line.startswith("Did you mean") and "Table with name" not in _first_line(error)
        ):
            return line
    return f"views: {', '.join(VIEWS)}; their columns: describe {VIEWS[0]}"
