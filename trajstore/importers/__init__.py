"""Owns the table of file formats and how one is told from another; importers know no Arrow and no store.

To add one: a file beside this one with a `read` function, a line in FORMATS, a test with a small dump.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from trajstore.errors import ImportFormatError
from trajstore.importers import messages, trajstore_jsonl
from trajstore.importers.records import Imported, Importer, ImportOptions, Record, kind_of, read_records
from trajstore.importers.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "FORMATS",
    "ImportOptions",
    "Imported",
    "Importer",
    "Tokenizer",
    "detect",
    "load_tokenizer",
    "open_importer",
]

FORMATS: dict[str, Importer] = {
    "messages": messages.read,
    "trajstore-jsonl": trajstore_jsonl.read,
}


def open_importer(format: str) -> Importer:
    """The importer of a format; "auto" looks at each file's first record.

    Raises:
        ImportFormatError: there is no such format.
    """
    if format == "auto":
        return _read_detected
    if format not in FORMATS:
        raise ImportFormatError(
            f"unknown format {format!r}; known: {', '.join(['auto', *sorted(FORMATS)])}",
            hint="leave the format out to have it detected",
        )
    return FORMATS[format]


def detect(path: Path) -> tuple[str, str]:
    """Name of the format of a file and the reason for it, from its first record.

    Raises:
        ImportFormatError: no format fits, or there is no readable first record.
    """
    with closing(read_records(path)) as records:
        first = next(records)
    if isinstance(first.data, dict):
        listed = [key for key in messages.MESSAGE_KEYS if isinstance(first.data.get(key), list)]
        foreign = [key for key in first.data if key not in trajstore_jsonl.FIELDS]
        own = [key for key in ("tokens", "version_segments") if isinstance(first.data.get(key), list)]
        if listed and not own:
            return "messages", f"{first.where} has a list of messages under {listed[0]!r} and no tokens"
        if first.data and not foreign:
            return "trajstore-jsonl", f"{first.where} has only fields of Trajectory"
    raise _unrecognised(first)


def _read_detected(path: Path, options: ImportOptions) -> Iterator[Imported]:
    yield from FORMATS[detect(path)[0]](path, options)


def _unrecognised(first: Record) -> ImportFormatError:
    if isinstance(first.data, dict):
        keys = list(first.data)
        more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
        found = f"keys {', '.join(map(repr, keys[:8]))}{more}" if keys else "an object without keys"
        strange = sorted(set(keys) - trajstore_jsonl.FIELDS)
        if strange and len(strange) < len(keys):
            found += f" (of which {strange[0]!r} is no field of Trajectory)"
    else:
        found = kind_of(first.data)
    return ImportFormatError(
        f"{first.where}: format not recognised: found {found}; known formats: {', '.join(sorted(FORMATS))}",
        hint="name the format if it is one of these, or convert the file to one of them",
    )
