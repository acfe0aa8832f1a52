"""Owns trajstore's own JSON lines, one `Trajectory.to_dict()` a line, read and written; knows no store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from trajstore.errors import ImportFormatError, ValidationError
from trajstore.importers.messages import tokenize
from trajstore.importers.records import Imported, ImportOptions, read_records, require_object
from trajstore.importers.rows import pack
from trajstore.trajectory import PartialTrajectory, Trajectory

FIELDS = frozenset(field.name for field in fields(PartialTrajectory))
"""The keys a line may have."""

_ALWAYS = ("id", "tokens", "reward", "status", "continuation_count")  # mark a line as trajstore's own


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """The trajectories of a file, in order; a line with fields of PartialTrajectory gives one.

    With a tokenizer, rows that have text and no tokens get them: ChatML when they hold messages (see
    importers/messages.py), else prompt and response, each encoded on its own, under the default loss mask.

    Raises:
        ImportFormatError: a record is not a trajectory; names it. Lists are not looked into: what the
            store checks, it refuses with its own error.
    """
    for record in read_records(path, options):
        try:
            trajectory = Trajectory.from_dict(require_object(record))
            if options.tokenizer is not None:
                tokenize(trajectory, options.tokenizer, record.where)
        except ValidationError as error:
            wrong = ImportFormatError(f"{record.where}: {error.message}", hint=error.hint)
            options.fault(record.where, wrong, record.data)
            continue
        except ImportFormatError as error:
            options.fault(record.where, error, record.data)
            continue
        pack(trajectory)
        yield Imported(trajectory, record.where, record.bytes_read)


def write_line(trajectory: Trajectory) -> str:
    """One line of JSON, without the newline, that `read` turns into the same object.

    NaN and infinities are written bare, as Python's json does, so that null and NaN stay two things. Fields
    that hold their default are left out.

    Raises:
        ValidationError: a value has no JSON form that reads back as itself.
    """
    row = {
        name: value
        for name, value in trajectory.to_dict().items()
        if name in _ALWAYS or not _is_default(name, value)
    }
    try:
        _check_keys(row)
        text = json.dumps(row, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        _name_fault(trajectory.id, row)
        raise
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can escape it, UTF-8 cannot hold it
        text = json.dumps(row, default=_plain)
    return text


def _name_fault(id: str, row: dict[str, Any]) -> None:
    """Raises for the column that cannot be written."""
    for name, value in row.items():
        try:
            _check_keys(value)
            json.dumps(value, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValidationError(
                f"cannot be written as JSON: {error}",
                id=id,
                column=name,
                hint="use numbers, text, lists and dicts with text keys",
            ) from error


_PLAIN = frozenset({int, float, str, bool, type(None)})
_DEFAULTS = PartialTrajectory().to_dict()


def _is_default(name: str, value: Any) -> bool:
    default = _DEFAULTS[name]
    return type(value) is type(default) and bool(value == default) and repr(value) == repr(default)  # -0.0


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not text")
            _check_keys(inner)
    elif isinstance(value, list | tuple) and not _PLAIN.issuperset(map(type, value)):
        for inner in value:
            _check_keys(inner)
