"""Owns group commit: rows from many threads become few commits; knows of a table only how to append to it."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import deque
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import pyarrow as pa

from trajstore.codec import Nulls, cache_refs_left_out, conform, encode
from trajstore.errors import InputError
from trajstore.store.append import STAMPS, append
from trajstore.store.table import Table
from trajstore.trajectory import Trajectory


@dataclass(frozen=True)
class WriterMetrics:
    """What a writer has done so far.

    Attributes:
        rows, bytes, commits: committed.
        retries: commits that were tried again because another writer was first.
        queued_rows, queued_bytes: accepted and not yet durable.
        commit_p50_ms, commit_p99_ms: time of a commit, its file included; NaN before the first.
    """

    rows: int
    bytes: int
    commits: int
    retries: int
    queued_rows: int
    queued_bytes: int
    commit_p50_ms: float
    commit_p99_ms: float


class StoreWriter:
    """Gathers rows and commits them by count, by bytes and by age; safe to share between threads.

    `add` checks the rows at once, so a bad row is an error for the caller who gave it; it waits while too
    much is queued. `flush` returns when all that was added before it is durable. An error of a commit
    surfaces at the next `add` or `flush`, and at `close`. Leaving the context, and the interpreter's exit,
    flush; a killed process loses only what was not flushed.
    """

    def __init__(
        self,
        table: Table,
        *,
        writer_id: str,
        max_rows: int,
        max_bytes: int,
        max_age: float,
        nulls: Nulls,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_bytes", max_bytes), ("max_age", max_age)):
            if value <= 0:
                raise InputError(f"{name} is {value}, expected more than 0")
        self._table = table
        self._writer_id = writer_id
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._nulls = nulls
        last = table.committed_batch(writer_id)
        self._batch_no = 0 if last is None else last + 1
        self._change = threading.Condition()
        self._queue: deque[tuple[pa.RecordBatch, int]] = deque()  # and how many cache references it lost
        self._queued_rows = self._queued_bytes = 0
        self._oldest = 0.0
        self._added = self._durable = self._wanted = 0  # counts of rows
        self._bytes = 0
        self._error: BaseException | None = None
        self._closing = False
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._run, name="trajstore-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, rows: Trajectory | Sequence[Trajectory]) -> Awaitable[None]:
        """Accepts rows; they are durable after the next `flush`, or when their commit comes.

        Waits while twice a commit's worth is queued. Inside a running event loop it must be awaited, and
        then it lets other tasks run meanwhile; elsewhere it simply blocks.

        Raises:
            ValidationError: a row breaks the contract; none of `rows` is accepted.
            InputError: the writer is closed.
        """
        given = [rows] if isinstance(rows, Trajectory) else rows
        batch, left_out = encode(given, nulls=self._nulls), cache_refs_left_out(given)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._put(batch, left_out)
            return _Done()
        return asyncio.to_thread(self._put, batch, left_out)

    def put(self, batch: pa.RecordBatch, *, cache_refs_left_out: int = 0) -> None:
        """Accepts rows that are encoded and checked already; blocks as `add` does outside an event loop.

        Args:
            batch: the columns of the row, and the store's own.
            cache_refs_left_out: how many of its rows lost an object in `kv_cache_ref`, for the commit's note.

        Raises:
            SchemaError: the columns are not the store's.
            InputError: the writer is closed.
        """
        unstamped = pa.schema([f for f in self._table.schema if f.name not in STAMPS])
        self._put(conform(batch, unstamped), cache_refs_left_out)

    def flush(self) -> None:
        """Returns when every row added before is durable.

        Raises:
            TrajstoreError: what a commit failed with.
        """
        with self._change:
            goal = self._wanted = self._added
            self._change.notify_all()
            self._change.wait_for(lambda: self._durable >= goal or self._error is not None)
            self._raise()

    def close(self) -> None:
        """Flushes and ends the writer; a second call does nothing.

        Raises:
            TrajstoreError: what a commit failed with.
        """
        with self._change:
            self._closing = True
            self._change.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.close)
        with self._change:
            self._raise()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def metrics(self) -> WriterMetrics:
        """What has been done so far."""
        with self._change:
            p50, p99 = np.percentile(self._times, [50, 99]) * 1e3 if self._times else (np.nan, np.nan)
            return WriterMetrics(
                rows=self._durable,
                bytes=self._bytes,
                commits=len(self._times),
                retries=self._table.conflicts,
                queued_rows=self._queued_rows,
                queued_bytes=self._queued_bytes,
                commit_p50_ms=float(p50),
                commit_p99_ms=float(p99),
            )

    def _put(self, batch: pa.RecordBatch, left_out: int) -> None:
        with self._change:
            self._change.wait_for(lambda: self._has_room() or self._error is not None or self._closing)
            self._raise()
            if self._closing:
                raise InputError("the writer is closed", hint="make another with store.writer()")
            if not self._queue:
                self._oldest = time.monotonic()
            self._queue.append((batch, left_out))
            self._queued_rows += batch.num_rows
            self._queued_bytes += batch.nbytes
            self._added += batch.num_rows
            self._change.notify_all()

    def _has_room(self) -> bool:
        return self._queued_rows < 2 * self._max_rows and self._queued_bytes < 2 * self._max_bytes

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _due(self) -> bool:
        """Whether what is queued should be committed now."""
        if not self._queue:
            return False
        return (
            self._closing
            or self._wanted > self._durable
            or self._queued_rows >= self._max_rows
            or self._queued_bytes >= self._max_bytes
            or time.monotonic() - self._oldest >= self._max_age
        )

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._due():
                    if self._closing or self._error is not None:
                        return
                    age = time.monotonic() - self._oldest
                    self._change.wait(max(self._max_age - age, 0.001) if self._queue else None)
                taken = list(self._queue)
            try:
                self._commit(taken)
            except BaseException as error:  # handed to the callers: this thread has nobody to tell
                with self._change:
                    self._error = error
                    self._change.notify_all()
                return

    def _commit(self, taken: list[tuple[pa.RecordBatch, int]]) -> None:
        started = time.monotonic()
        rows = pa.concat_tables([pa.Table.from_batches([b]) for b, _ in taken], promote_options="default")
        done = append(
            self._table,
            rows,
            self._writer_id,
            self._batch_no,
            nulls=self._nulls,
            on_error="raise",
            cache_refs_left_out=sum(left_out for _, left_out in taken),
            resent=False,
        )
        with self._change:
            self._batch_no += 1
            for batch, _ in taken:
                self._queue.popleft()
                self._queued_rows -= batch.num_rows
                self._queued_bytes -= batch.nbytes
                self._durable += batch.num_rows
            self._oldest = time.monotonic()
            self._bytes += done.bytes
            self._times.append(time.monotonic() - started)
            self._change.notify_all()


class _Done:
    """An awaitable that has happened."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()
