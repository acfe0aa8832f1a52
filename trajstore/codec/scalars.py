"""Owns one-value-a-row columns and JSON texts: Python values → Arrow arrays; knows no per-token column."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.codec.flat import shorten
from trajstore.errors import ValidationError
from trajstore.schema import BY_NAME, SEGMENT
from trajstore.trajectory import TrajectoryStatus, VersionSegment

Int64s = NDArray[np.int64]

# By identity: an enum's own hash runs Python code for every row.
_STATUS_TEXT = {id(status): status.value for status in TrajectoryStatus}
_MISFITS = (TypeError, ValueError, OverflowError, AttributeError, pa.ArrowException)


class Scalars:
    """Columns of one value a row; a value of the wrong type is an error that names its row.

    Args:
        ids: N trajectory ids, for messages.
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = ids

    def refuse(self, row: int, column: str, reason: str, hint: str | None = None) -> NoReturn:
        """Raises the ValidationError for a row's value."""
        raise ValidationError(reason, row=row, id=self.ids[row], column=column, hint=hint)

    def integers(self, column: str, values: Sequence[Any]) -> Int64s:
        """[N] int64 of values none of which may be missing."""
        buffer = array("q")
        try:
            buffer.extend(values)
        except (TypeError, OverflowError):
            self._fault(column, values, "an integer", lambda v: array("q", [v]))
        return np.frombuffer(buffer, np.int64)

    def nullable_ints(self, column: str, values: Sequence[Any]) -> pa.Array:
        """The column, with None as null."""
        kind = BY_NAME[column].type
        filled, mask = values, None
        missing = [v is None for v in values]
        if any(missing):
            if all(missing):
                return pa.nulls(len(values), kind)
            filled, mask = [0 if v is None else v for v in values], np.array(missing, bool)
        wide = self.integers(column, filled)
        narrow = wide.astype(kind.to_pandas_dtype())
        outside = wide != narrow
        if outside.any():
            i = int(outside.argmax())
            self.refuse(i, column, f"found {wide[i]}, expected a value that fits {kind}")
        return pa.array(narrow, mask=mask)

    def floats(self, column: str, values: Sequence[Any]) -> pa.Array:
        """The float64 column, with None as null where the column has nulls."""
        filled, mask, nullable = values, None, BY_NAME[column].nullable
        missing = [v is None for v in values] if nullable else []
        if any(missing):
            if all(missing):
                return pa.nulls(len(values), pa.float64())
            filled, mask = [0.0 if v is None else v for v in values], np.array(missing, bool)
        buffer = array("d")
        try:
            buffer.extend(filled)
        except (TypeError, OverflowError):
            self._fault(column, filled, "a number", lambda v: array("d", [v]))
        return pa.array(np.frombuffer(buffer, np.float64), mask=mask)

    def strings(self, column: str, values: Sequence[Any]) -> pa.Array:
        """The text column, with None as null where the column has nulls."""
        nullable = BY_NAME[column].nullable
        types = set(map(type, values))
        if nullable and types == {type(None)}:
            return pa.nulls(len(values), pa.string())
        # Types are looked at because Arrow takes bytes for text.
        if all(issubclass(t, str) or (nullable and t is type(None)) for t in types):
            try:
                return pa.array(values, pa.string())
            except (pa.ArrowException, UnicodeEncodeError):
                pass
        for i, value in enumerate(values):
            if isinstance(value, str):
                try:
                    value.encode()
                except UnicodeEncodeError as error:
                    reason = f"found {shorten(value)}, expected text that UTF-8 can hold ({error.reason})"
                    self.refuse(i, column, reason, "replace lone surrogates: text.encode('utf-8', 'replace')")
            elif value is not None or not nullable:
                expected = "text or None" if nullable else "text"
                self.refuse(i, column, f"found {shorten(value)}, expected {expected}")
        raise ValidationError(f"more than {2**31 - 1} bytes of text do not fit one batch", column=column)

    def bools(self, column: str, values: Sequence[Any]) -> pa.Array:
        """The column of True and False, with None as null where the column has nulls."""
        nullable = BY_NAME[column].nullable
        try:
            made = pa.array(values, pa.bool_())
        except (pa.ArrowException, TypeError):
            made = None
        if made is None or (made.null_count and not nullable):
            expected = "True, False or None" if nullable else "True or False"
            self._fault(column, values, expected, lambda v: _one_bool(v, nullable))
        return made

    def statuses(self, values: Sequence[Any]) -> pa.Array:
        """The texts of TrajectoryStatus members."""
        try:
            return pa.array([_STATUS_TEXT[key] for key in map(id, values)], pa.string())
        except KeyError:
            i = next(i for i, v in enumerate(values) if not isinstance(v, TrajectoryStatus))
            hint = f"TrajectoryStatus(text), with one of {', '.join(_STATUS_TEXT.values())}"
            self.refuse(i, "status", f"found {shorten(values[i])}, expected a TrajectoryStatus", hint)

    def segments(self, entries: Sequence[VersionSegment], counts: Int64s) -> pa.StructArray:
        """All rows' segments one after another; row i has `counts[i]` of them.

        Bounds outside int32 are clipped, so that they still are out of every row's range.
        """
        try:
            start, end, version, step = (
                np.frombuffer(array("q", map(get, entries)), np.int64) for get in _SEGMENT_INTS
            )
            times = np.frombuffer(array("d", map(attrgetter("version.timestamp"), entries)), np.float64)
        except (TypeError, OverflowError, AttributeError):
            rows = np.repeat(np.arange(len(counts)), counts).tolist()
            row, found = next((r, s) for r, s in zip(rows, entries, strict=True) if not _sound_segment(s))
            expected = "expected VersionSegment(start, end, version)"
            self.refuse(row, "version_segments", f"found {shorten(found)}, {expected}")
        bound = np.iinfo(np.int32)
        clipped = [np.clip(a, bound.min, bound.max).astype(np.int32) for a in (start, end)]
        return pa.StructArray.from_arrays([*clipped, version, times, step], fields=list(SEGMENT))

    def json(self, column: str, values: Sequence[Any]) -> pa.Array:
        """Texts of JSON objects (`metadata`) or lists (`messages`), with None as null."""
        wanted, empty = (dict, "{}") if column == "metadata" else (list, "[]")
        if set(map(type, values)) <= {wanted, type(None)} and not any(values):
            return self.strings(column, [None if value is None else empty for value in values])
        texts: list[str | None] = []
        for i, value in enumerate(values):
            if value is None:
                texts.append(None)
            elif not isinstance(value, wanted):
                self.refuse(i, column, f"found {shorten(value)}, expected a {wanted.__name__} or None")
            else:
                try:
                    texts.append(json_text(value) if value else empty)
                except (TypeError, ValueError, RecursionError) as error:
                    hint = "store numbers, text, lists and dicts with text keys"
                    self.refuse(i, column, f"cannot be written as JSON: {error}", hint)
        return self.strings(column, texts)

    def _fault(
        self, column: str, values: Sequence[Any], expected: str, convert: Callable[[Any], object]
    ) -> NoReturn:
        for i, value in enumerate(values):
            try:
                convert(value)
            except _MISFITS:
                self.refuse(i, column, f"found {shorten(value)}, expected {expected}")
        raise ValidationError(f"its values do not join, expected {expected}", column=column)


_SEGMENT_INTS = tuple(map(attrgetter, ("start", "end", "version.version_id", "version.step")))


def _sound_segment(segment: Any) -> bool:
    try:
        array("q", [get(segment) for get in _SEGMENT_INTS])
        array("d", [segment.version.timestamp])
    except (TypeError, OverflowError, AttributeError):
        return False
    return True


def _one_bool(value: Any, nullable: bool) -> None:
    if value is None and not nullable:
        raise TypeError
    pa.array([value], pa.bool_())


def json_text(value: Any) -> str:
    """JSON of a value; NaN and infinities in Python's form, so that nothing is lost.

    Raises:
        TypeError: a key is not text, or a value has no JSON form.
        ValueError, RecursionError: the value holds itself, or is nested too deep.
    """
    _refuse_lossy_keys(value)
    text = json.dumps(value, ensure_ascii=False, default=_json_default)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON can escape it, UTF-8 cannot hold it
        text = json.dumps(value, default=_json_default)
    return text


def _json_default(value: Any) -> Any:
    if not hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        raise TypeError(f"{type(value).__name__} has no JSON form")
    plain = value.tolist()
    _refuse_lossy_keys(plain)
    return plain


def _refuse_lossy_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not text")
            _refuse_lossy_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_lossy_keys(inner)
