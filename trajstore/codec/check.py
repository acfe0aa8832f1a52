"""Owns the invariants of the row, checked on whole Arrow columns; must not convert or fill anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trajstore.errors import LengthMismatchError, SchemaError, ValidationError
from trajstore.schema import Column
from trajstore.trajectory import TrajectoryStatus

STATUSES = [status.value for status in TrajectoryStatus]
VERSION_KNOWN = ["exact", "span", "list", "absent"]

Bools = NDArray[np.bool_]


def check(batch: pa.RecordBatch) -> None:
    """Refuses a record batch that breaks the contract of the row.

    Args:
        batch: all columns of `schema.ROW_SCHEMA`, and any extra ones whose fields say their role.

    Raises:
        LengthMismatchError: a per-token column is not as long as `tokens`.
        ValidationError: a value is out of its range, or two columns contradict each other.
        SchemaError: an extra column does not say its role.
    """
    _Check(batch).run()


class _Check:
    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.columns = [Column.from_field(field) for field in batch.schema]
        self.total = self._lengths("tokens")

    def run(self) -> None:
        for column in self.columns:
            array = self.batch.column(column.name)
            if not column.nullable and array.null_count:
                self._refuse(column.name, np.asarray(array.is_null()), "is null, expected a value")
            if array.null_count == len(array):
                continue
            if column.role != "scalar" and _values(array).null_count:
                row = next(i for i, item in enumerate(array) if item.is_valid and item.values.null_count)
                self._refuse_row(column.name, row, "holds a null element, expected a value")
            if column.role == "token":
                self._aligned(column)
        self._tokens()
        self._split()
        self._words("status", STATUSES)
        self._words("version_known", VERSION_KNOWN)
        self._known()
        self._segments()
        self._retokenized()
        self._counts()

    def _aligned(self, column: Column) -> None:
        array = self.batch.column(column.name)
        lengths = self._lengths(column.name)
        wrong = np.asarray(array.is_valid()) & (lengths != self.total)
        if wrong.any():
            i = int(wrong.argmax())
            raise LengthMismatchError(
                f"has {lengths[i]} values, expected {self.total[i]} (tokens)",
                row=i,
                id=self._id(i),
                column=column.name,
                hint="a per-token column is null, or exactly as long as tokens",
            )
        if column.type == pa.list_(pa.field("element", pa.int8(), False)):
            self._elements(column.name, 0, 1, "0 or 1")

    def _tokens(self) -> None:
        for name in ("tokens", "prompt_tokens", "response_tokens"):
            self._elements(name, 0, 2**31 - 1, "a token id from 0 to 2147483647")
        length = self._scalar("length")
        self._refuse("length", length != self.total, "is not the number of tokens")

    def _elements(self, name: str, low: int, high: int, expected: str) -> None:
        array = self.batch.column(name)
        if array.null_count == len(array):
            return
        values = _values(array).to_numpy(zero_copy_only=True)
        if values.size and (values.min() < low or values.max() > high):
            at = int(((values < low) | (values > high)).argmax())
            ends = np.cumsum(self._lengths(name))
            row = int(np.searchsorted(ends, at, side="right"))
            index = at - int(ends[row] - self._lengths(name)[row])
            self._refuse_row(name, row, f"{values[at]} at index {index}, expected {expected}")

    def _split(self) -> None:
        prompt, response = self.batch.column("prompt_length"), self.batch.column("response_length")
        half = np.asarray(pc.xor(prompt.is_null(), response.is_null()))
        self._refuse("prompt_length", half, "is known without response_length, or the other way round")
        p, r = self._scalar("prompt_length"), self._scalar("response_length")
        known = np.asarray(prompt.is_valid())
        self._refuse("prompt_length", known & ((p < 0) | (r < 0)), "is negative, or response_length is")
        wrong = known & (p + r != self.total)
        if wrong.any():
            i = int(wrong.argmax())
            raise LengthMismatchError(
                f"{p[i]} + response_length {r[i]} is not the {self.total[i]} of tokens",
                row=i,
                id=self._id(i),
                column="prompt_length",
                hint="give both lengths so that they add up, or null for both",
            )

    def _words(self, name: str, allowed: list[str]) -> None:
        wrong = pc.invert(pc.is_in(self.batch.column(name), pa.array(allowed)))
        reason = f"is not one of {', '.join(allowed)}"
        self._refuse(name, np.asarray(wrong), reason)

    def _known(self) -> None:
        known = self.batch.column("version_known")
        oldest, newest = self.batch.column("oldest_version_id"), self.batch.column("newest_version_id")
        has = np.asarray(oldest.is_valid())
        half = has != np.asarray(newest.is_valid())
        self._refuse("oldest_version_id", half, "is known without newest_version_id, or the other way round")
        reversed_ = has & (self._scalar("oldest_version_id") > self._scalar("newest_version_id"))
        self._refuse("oldest_version_id", reversed_, "is above newest_version_id")
        absent = np.asarray(pc.equal(known, "absent"))
        self._refuse("version_known", absent & has, "is 'absent', but a version is given")
        self._refuse("version_known", ~absent & ~has, "says a version is known, but none is given")

    def _segments(self) -> None:
        array = self.batch.column("version_segments")
        if array.null_count == len(array):
            return
        flat = _values(array)
        counts = self._lengths("version_segments")
        rows = np.repeat(np.arange(len(counts)), counts)
        start, end = (flat.field(name).to_numpy().astype(np.int64) for name in ("start", "end"))
        total = self.total[rows]
        wrong = (start < 0) | (end > total) | (start >= end)
        if wrong.any():
            k = int(wrong.argmax())
            reason = f"[{start[k]}, {end[k]}) is not a range within the {total[k]} tokens"
            self._refuse_row("version_segments", int(rows[k]), reason)
        overlap = (rows[1:] == rows[:-1]) & (start[1:] < end[:-1])
        if overlap.any():
            k = int(overlap.argmax())
            reason = f"[{start[k + 1]}, {end[k + 1]}) begins before [{start[k]}, {end[k]}) has ended"
            self._refuse_row("version_segments", int(rows[k]), reason, "give them in order, without overlap")
        self._covered(rows, start, end, counts > 0)

    def _covered(self, rows: Any, start: Any, end: Any, has: Bools) -> None:
        """Every sampled token lies in a segment; where nothing says what was sampled, nothing is checked."""
        begins = np.cumsum(self.total) - self.total
        size = int(self.total.sum())
        covered = _ranges(begins[rows] + start, begins[rows] + end, size)
        known = np.asarray(self.batch.column("prompt_length").is_valid())
        prompt = np.where(known, self._scalar("prompt_length"), self.total)
        sampled = _ranges(begins + prompt, begins + self.total, size)
        for name in ("loss_mask", "action_mask"):
            mask = self.batch.column(name)
            valid = np.repeat(np.asarray(mask.is_valid()), self.total)
            sampled[valid] = _values(mask).to_numpy() > 0
        bare = sampled & ~covered & np.repeat(has, self.total)
        if bare.any():
            at = int(bare.argmax())
            row = int(np.searchsorted(begins + self.total, at, side="right"))
            self._refuse_row(
                "version_segments",
                row,
                f"no segment covers the sampled token at index {at - begins[row]}",
                "cover every sampled token, or say which tokens were sampled in action_mask",
            )

    def _retokenized(self) -> None:
        again = np.asarray(self.batch.column("tokens_retokenized"))
        for name in ("log_probs", "behavior_log_probs"):
            given = np.asarray(self.batch.column(name).is_valid())
            reason = "is given, but tokens_retokenized says its tokens were not the sampled ones"
            self._refuse(name, again & given, reason)

    def _counts(self) -> None:
        for name in ("continuation_count", "group_size"):
            self._refuse(name, self._scalar(name) < 0, "is negative")

    def _scalar(self, name: str) -> NDArray[np.int64]:
        if self.batch.column(name).null_count == self.batch.num_rows:
            return np.zeros(self.batch.num_rows, np.int64)
        return self.batch.column(name).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)

    def _lengths(self, name: str) -> NDArray[np.int64]:
        array = self.batch.column(name)
        if not array.null_count:
            return np.diff(array.offsets.to_numpy()).astype(np.int64)
        return pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    def _id(self, row: int) -> str:
        return self.batch.column("id")[row].as_py() or ""

    def _refuse(self, column: str, rows: Bools, reason: str) -> None:
        if rows.any():
            row = int(rows.argmax())
            value = self.batch.column(column)[row]
            found = "" if pa.types.is_nested(value.type) or not value.is_valid else f"{value.as_py()!r} "
            self._refuse_row(column, row, found + reason)

    def _refuse_row(self, column: str, row: int, reason: str, hint: str | None = None) -> None:
        raise ValidationError(reason, row=row, id=self._id(row), column=column, hint=hint)


def _values(array: pa.ListArray) -> pa.Array:
    return array.flatten()  # respects slices and leaves out what null rows hide, unlike .values


def _ranges(starts: NDArray[np.int64], ends: NDArray[np.int64], size: int) -> Bools:
    edges = np.zeros(size + 1, np.int32)
    np.add.at(edges, starts, 1)
    np.add.at(edges, ends, -1)
    return np.cumsum(edges[:-1]) > 0  # type: ignore[no-any-return]  # numpy comparison


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch in the columns and types of `schema`; nothing is cast with a loss.

    Nullable columns that are not there become null.

    Raises:
        SchemaError: a column is missing, unknown, or of a type that would lose values.
    """
    unknown = [name for name in batch.schema.names if name not in schema.names]
    if unknown:
        raise SchemaError(
            f"column {unknown[0]!r} is not in the store",
            hint="declare it at create (extra=[Column(...)]), or put it under metadata",
        )
    return pa.record_batch([_cast(batch, field) for field in schema], schema=schema)


def _cast(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in batch.schema.names:
        if not field.nullable:
            raise SchemaError(f"column {field.name!r} is missing", hint=f"give it as {field.type}")
        return pa.nulls(batch.num_rows, field.type)
    array = batch.column(field.name)
    found, wanted = _element(array.type), _element(field.type)
    lossy = pa.types.is_floating(found) and pa.types.is_integer(wanted)
    try:
        if lossy and array.null_count != len(array):
            raise pa.ArrowInvalid(f"{found} values in a column of {wanted}")
        cast = array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"column {field.name!r} has type {array.type}, which does not fit {field.type}: {error}",
            hint="cast it yourself, so that nothing is lost unseen",
        ) from error
    if pa.types.is_floating(wanted) and pa.types.is_floating(found) and wanted.bit_width < found.bit_width:
        before, after = (_values(a) if pa.types.is_nested(a.type) else a for a in (array, cast))
        if pc.any(pc.and_(pc.is_finite(before), pc.invert(pc.is_finite(after)))).as_py():
            raise SchemaError(f"column {field.name!r} holds a value outside {wanted}")
    return cast


def _element(type: pa.DataType) -> pa.DataType:
    return type.value_type if pa.types.is_list(type) or pa.types.is_large_list(type) else type
