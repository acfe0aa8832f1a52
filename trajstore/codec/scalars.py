"""Owns one-value-a-row columns and JSON texts: Python values → Arrow arrays; knows no per-token column."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import ValidationError
from trajstore.schema import BY_NAME, SEGMENT
from trajstore.trajectory import TrajectoryStatus, VersionSegment

Int64s = NDArray[np.int64]
_STATUS_TEXT = {status: status.value for status in TrajectoryStatus}


class Scalars:
    """Columns of one value a row; a value of the wrong type is an error that names its row."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = ids

    def refuse(self, row: int, column: str, reason: str, hint: str | None = None) -> NoReturn:
        raise ValidationError(reason, row=row, id=self.ids[row], column=column, hint=hint)

    def integers(self, column: str, values: Sequence[Any]) -> Int64s:
        buffer = array("q")
        try:
            buffer.extend(values)
        except (TypeError, OverflowError):
            self._fault(column, values, "an integer", lambda v: array("q", [v]))
        return np.frombuffer(buffer, np.int64)

    def nullable_ints(self, column: str, values: Sequence[Any]) -> pa.Array:
        kind = BY_NAME[column].type
        missing = [v is None for v in values]
        if all(missing):
            return pa.nulls(len(values), kind)
        filled = self.integers(column, [0 if v is None else v for v in values])
        narrow = np.iinfo(kind.to_pandas_dtype())
        outside = (filled < narrow.min) | (filled > narrow.max)
        if outside.any():
            i = int(outside.argmax())
            self.refuse(i, column, f"found {filled[i]}, expected a value that fits {kind}")
        return pa.array(filled.astype(kind.to_pandas_dtype()), mask=np.array(missing, bool))

    def floats(self, column: str, values: Sequence[Any]) -> pa.Array:
        missing = [v is None for v in values] if BY_NAME[column].nullable else None
        if missing and all(missing):
            return pa.nulls(len(values), pa.float64())
        buffer = array("d")
        try:
            buffer.extend([0.0 if v is None else v for v in values] if missing else values)
        except (TypeError, OverflowError):
            self._fault(column, values, "a number", lambda v: v is None and missing or array("d", [v]))
        return pa.array(np.frombuffer(buffer, np.float64), mask=np.array(missing, bool) if missing else None)

    def strings(self, column: str, values: Sequence[Any]) -> pa.Array:
        try:
            made = pa.array(values, pa.string())
        except (pa.ArrowException, UnicodeEncodeError, TypeError):
            made = None
        if made is None or (not BY_NAME[column].nullable and made.null_count):
            expected = "text" if BY_NAME[column].nullable is False else "text or None"
            self._fault(column, values, expected, lambda v: self._one_string(column, v))
        return made

    @staticmethod
    def _one_string(column: str, value: Any) -> None:
        if value is None and not BY_NAME[column].nullable or isinstance(value, bytes):
            raise TypeError
        pa.array([value], pa.string())

    def bools(self, column: str, values: Sequence[Any]) -> pa.Array:
        try:
            made = pa.array(values, pa.bool_())
        except (pa.ArrowException, TypeError):
            made = None
        if made is None or (not BY_NAME[column].nullable and made.null_count):
            self._fault(column, values, "True or False", lambda v: self._one_bool(column, v))
        return made

    @staticmethod
    def _one_bool(column: str, value: Any) -> None:
        if value is None and not BY_NAME[column].nullable:
            raise TypeError
        pa.array([value], pa.bool_())

    def statuses(self, values: Sequence[Any]) -> pa.Array:
        try:
            return pa.array(list(map(_STATUS_TEXT.__getitem__, values)), pa.string())
        except (KeyError, TypeError):
            i = next(i for i, v in enumerate(values) if not isinstance(v, TrajectoryStatus))
            self.refuse(i, "status", f"found {values[i]!r}, expected a TrajectoryStatus")

    def segments(self, entries: list[VersionSegment], counts: Int64s) -> pa.StructArray:
        try:
            ints = [
                np.frombuffer(array("q", [get(s) for s in entries]), np.int64)
                for get in (
                    lambda s: s.start,
                    lambda s: s.end,
                    lambda s: s.version.version_id,
                    lambda s: s.version.step,
                )
            ]
            times = np.frombuffer(array("d", [s.version.timestamp for s in entries]), np.float64)
        except (TypeError, OverflowError, AttributeError):
            rows = np.repeat(np.arange(len(counts)), counts)
            i = next(int(r) for r, s in zip(rows, entries, strict=True) if not _sound_segment(s))
            found = next(s for s in entries if not _sound_segment(s))
            self.refuse(i, "version_segments", f"found {found!r}, expected VersionSegment(start, end, version)")
        start, end, version, step = ints
        bound = np.iinfo(np.int32)
        clipped = [np.clip(a, bound.min, bound.max).astype(np.int32) for a in (start, end)]
        return pa.StructArray.from_arrays([*clipped, version, times, step], fields=list(SEGMENT))

    def json(self, column: str, values: Sequence[Any]) -> pa.Array:
        texts: list[str | None] = []
        wanted = dict if column == "metadata" else list
        for i, value in enumerate(values):
            if value is None:
                texts.append(None)
            elif not isinstance(value, wanted):
                self.refuse(i, column, f"found {type(value).__name__}, expected a {wanted.__name__} or None")
            else:
                try:
                    texts.append(json_text(value) if value else "{}" if wanted is dict else "[]")
                except (TypeError, ValueError) as error:
                    hint = "store numbers, text, lists and dicts with text keys"
                    self.refuse(i, column, f"cannot be written as JSON: {error}", hint)
        return self.strings(column, texts)

    def _fault(
        self, column: str, values: Sequence[Any], expected: str, convert: Callable[[Any], object]
    ) -> NoReturn:
        for i, value in enumerate(values):
            try:
                convert(value)
            except (TypeError, ValueError, OverflowError, AttributeError, pa.ArrowException):
                self.refuse(i, column, f"found {value!r}, expected {expected}")
        raise ValidationError(f"its values do not join, expected {expected}", column=column)


def _sound_segment(segment: Any) -> bool:
    try:
        array("q", [segment.start, segment.end, segment.version.version_id, segment.version.step])
        array("d", [segment.version.timestamp])
    except (TypeError, OverflowError, AttributeError):
        return False
    return True


def json_text(value: Any) -> str:
    """JSON of a value; NaN and infinities in Python's form, so that nothing is lost.

    Raises:
        TypeError: a key is not text, or a value has no JSON form.
    """
    _refuse_lossy_keys(value)
    text = json.dumps(value, ensure_ascii=False, default=_json_default)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON can escape it, UTF-8 cannot hold it
        text = json.dumps(value, default=_json_default)
    return text


def _json_default(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _refuse_lossy_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not text")
            _refuse_lossy_keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_lossy_keys(inner)
