"""Owns the invariants of the row, checked on whole Arrow columns; must not convert or fill anything."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trajstore.errors import LengthMismatchError, SchemaError, ValidationError
from trajstore.schema import ROW_SCHEMA, TOKEN_MASKS, Column
from trajstore.trajectory import TrajectoryStatus

STATUSES = tuple(status.value for status in TrajectoryStatus)
VERSION_KNOWN = ("exact", "span", "list", "absent")

Bools = NDArray[np.bool_]
Int64s = NDArray[np.int64]


def check(batch: pa.RecordBatch) -> None:
    """Refuses a record batch that breaks the contract of the row.

    Args:
        batch: all columns of `schema.ROW_SCHEMA`, and any extra ones whose fields say their role.

    Raises:
        LengthMismatchError: a per-token column is not as long as `tokens`.
        ValidationError: a value is out of its range, or two columns contradict each other.
        SchemaError: a column is missing, or an extra one does not say its role.
    """
    missing = set(ROW_SCHEMA.names).difference(batch.schema.names)
    if missing:
        raise SchemaError(f"column {min(missing)!r} is missing", hint="bring the batch to the schema first")
    _Check(batch).run()


class _Check:
    """One pass over a batch of N rows; columns that are null throughout cost next to nothing."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.size = batch.num_rows
        self.columns = [Column.from_field(field) for field in batch.schema]
        self.arrays: dict[str, pa.Array] = dict(zip(batch.schema.names, batch.columns, strict=True))
        self.offsets = self.arrays["tokens"].offsets.to_numpy()
        self.total = self._lengths("tokens")

    def run(self) -> None:
        for column in self.columns:
            array = self.arrays[column.name]
            nulls = array.null_count
            if nulls and not column.nullable:
                self._refuse(column.name, ~self._valid(column.name), "is null, expected a value")
            if nulls == len(array) or column.role == "scalar":
                continue
            if array.values.null_count and array.flatten().null_count:
                row = next(i for i, item in enumerate(array) if item.is_valid and item.values.null_count)
                self._refuse_row(column.name, row, "holds a null element, expected a value")
            if column.role == "token":
                self._aligned(column.name)
            if column.name in TOKEN_MASKS:
                self._elements(column.name, 1, "0 or 1")
            elif column.name in _IDS:
                self._elements(column.name, 2**31 - 1, "a token id from 0 to 2147483647")
        self._refuse("length", self._scalar("length") != self.total, "is not the number of tokens")
        self._split()
        self._words("status", STATUSES)
        self._words("version_known", VERSION_KNOWN)
        self._known()
        self._segments()
        self._retokenized()
        for name in ("continuation_count", "group_size"):
            if self._given(name):
                self._refuse(name, self._scalar(name) < 0, "is negative")

    def _aligned(self, name: str) -> None:
        offsets = self.arrays[name].offsets.to_numpy()
        if np.array_equal(offsets, self.offsets):
            return
        lengths = np.diff(offsets)  # what null rows hide is not looked at
        wrong = (lengths != self.total) & self._valid(name)
        if wrong.any():
            i = int(wrong.argmax())
            raise LengthMismatchError(
                f"has {lengths[i]} values, expected {self.total[i]} (tokens)",
                row=i,
                id=self._id(i),
                column=name,
                hint="a per-token column is null, or exactly as long as tokens",
            )

    def _elements(self, name: str, high: int, expected: str) -> None:
        values = self.arrays[name].flatten().to_numpy()  # without what slices and null rows hide
        # One pass: read as unsigned, negative ones are huge.
        if not values.size or values.view(f"u{values.dtype.itemsize}").max() <= high:
            return
        at = int(((values < 0) | (values > high)).argmax())
        lengths = self._lengths(name)
        ends = np.cumsum(lengths)
        row = int(np.searchsorted(ends, at, side="right"))
        index = at - int(ends[row] - lengths[row])
        self._refuse_row(name, row, f"{values[at]} at index {index}, expected {expected}")

    def _split(self) -> None:
        known = self._valid("prompt_length")
        half = known != self._valid("response_length")
        self._refuse("prompt_length", half, "is known without response_length, or the other way round")
        prompt, response = self._scalar("prompt_length"), self._scalar("response_length")
        negative = (prompt < 0) | (response < 0)
        self._refuse("prompt_length", known & negative, "is negative, or response_length is")
        wrong = known & (prompt + response != self.total)
        if wrong.any():
            i = int(wrong.argmax())
            raise LengthMismatchError(
                f"{prompt[i]} + response_length {response[i]} is not the {self.total[i]} of tokens",
                row=i,
                id=self._id(i),
                column="prompt_length",
                hint="give both lengths so that they add up, or null for both",
            )

    def _words(self, name: str, allowed: tuple[str, ...]) -> None:
        wrong = set(self.arrays[name].unique().to_pylist()).difference(allowed)
        if wrong:
            rows = pc.is_in(self.arrays[name], pa.array(wrong, pa.string()))
            self._refuse(name, np.asarray(rows), f"is not one of {', '.join(allowed)}")

    def _known(self) -> None:
        has = self._valid("oldest_version_id")
        half = has != self._valid("newest_version_id")
        self._refuse("oldest_version_id", half, "is known without newest_version_id, or the other way round")
        if has.any():
            above = has & (self._scalar("oldest_version_id") > self._scalar("newest_version_id"))
            self._refuse("oldest_version_id", above, "is above newest_version_id")
        known = self.arrays["version_known"]
        absent = np.asarray(pc.equal(known, "absent"))
        self._refuse("version_known", absent & has, "contradicts the version that is given")
        self._refuse("version_known", ~absent & ~has, "says a version is known, but none is given")
        segmented = self._valid("version_segments")
        bare = ~segmented & ~self._valid("version_id")
        if (bare & has).any():
            exact = np.asarray(pc.equal(known, "exact"))
            self._refuse("version_known", bare & exact, "needs version_id or version_segments")
        if segmented.any():
            vague = segmented & np.asarray(pc.not_equal(known, "exact"))
            self._refuse("version_known", vague, "contradicts version_segments, which say it exactly")

    def _segments(self) -> None:
        if not self._given("version_segments"):
            return
        flat = self.arrays["version_segments"].flatten()
        counts = self._lengths("version_segments")
        rows = np.repeat(np.arange(len(counts)), counts)
        for field in flat.type:
            if flat.field(field.name).null_count:
                k = int(np.asarray(flat.field(field.name).is_null()).argmax())
                self._refuse_row(
                    "version_segments", int(rows[k]), f"holds a segment whose {field.name} is null"
                )
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

    def _covered(self, rows: Int64s, start: Int64s, end: Int64s, has: Bools) -> None:
        """Every sampled token lies in a segment; where nothing says what was sampled, nothing is checked."""
        begins = np.cumsum(self.total) - self.total
        size = int(self.total.sum())
        covered = _ranges(begins[rows] + start, begins[rows] + end, size)
        prompt = np.where(self._valid("prompt_length"), self._scalar("prompt_length"), self.total)
        sampled = _ranges(begins + prompt, begins + self.total, size)
        for name in ("loss_mask", "action_mask"):
            if self._given(name):
                valid = np.repeat(self._valid(name), self.total)
                sampled[valid] = self.arrays[name].flatten().to_numpy() > 0
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
        if not self.arrays["tokens_retokenized"].true_count:
            return
        again = np.asarray(self.arrays["tokens_retokenized"])
        for name in ("log_probs", "behavior_log_probs"):
            reason = "is given, but tokens_retokenized says its tokens were not the sampled ones"
            self._refuse(name, again & self._valid(name), reason, "leave the log-probs out")

    def _given(self, name: str) -> bool:
        return bool(self.arrays[name].null_count < self.size)

    def _valid(self, name: str) -> Bools:
        array = self.arrays[name]
        if not array.null_count:
            return np.ones(self.size, bool)
        return np.asarray(array.is_valid()) if self._given(name) else np.zeros(self.size, bool)

    def _scalar(self, name: str) -> Int64s:
        """The values of an integer column as [N] int64, 0 where null."""
        array = self.arrays[name]
        if not self._given(name):
            return np.zeros(self.size, np.int64)
        known = array.fill_null(0) if array.null_count else array
        return known.to_numpy().astype(np.int64)  # type: ignore[no-any-return]  # pyarrow is untyped

    def _lengths(self, name: str) -> Int64s:
        """The lengths of a list column's rows as [N] int64, 0 where null."""
        lengths = np.diff(self.arrays[name].offsets.to_numpy()).astype(np.int64)
        return np.where(self._valid(name), lengths, 0) if self.arrays[name].null_count else lengths

    def _id(self, row: int) -> str:
        return self.arrays["id"][row].as_py() or ""

    def _refuse(self, column: str, rows: Bools, reason: str, hint: str | None = None) -> None:
        if rows.any():
            row = int(rows.argmax())
            value = self.arrays[column][row]
            found = "" if pa.types.is_nested(value.type) or not value.is_valid else f"{value.as_py()!r} "
            self._refuse_row(column, row, found + reason, hint)

    def _refuse_row(self, column: str, row: int, reason: str, hint: str | None = None) -> None:
        raise ValidationError(reason, row=row, id=self._id(row), column=column, hint=hint)


_IDS = ("tokens", "prompt_tokens", "response_tokens")


def _ranges(starts: Int64s, ends: Int64s, size: int) -> Bools:
    """[size] True at every position of the half-open ranges."""
    edges = np.zeros(size + 1, np.int32)
    np.add.at(edges, starts, 1)
    np.add.at(edges, ends, -1)
    return np.cumsum(edges[:-1]) > 0
