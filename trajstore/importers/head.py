"""Owns what detection looks at: a file's container and the names at its beginning; decodes nothing.

Of a pickle the opcodes of its first bytes are listed, none is carried out; of Parquet the schema is read; of
JSON the first record.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajstore.errors import ImportFormatError
from trajstore.importers import files
from trajstore.importers.records import Importer, read_records

HEAD_BYTES = 1 << 16
_LISTS = (*range(0x90, 0xA0), 0xDC, 0xDD)  # as msgpack begins them


class NotRecognisedError(ImportFormatError):
    """A file is none that can be imported: it begins like nothing that is known, or like what is not read."""


@dataclass(frozen=True)
class Head:
    """The beginning of a file.

    Attributes:
        path: the file.
        container: json, torch, pickle, parquet, arrow, msgpack, sqlite.
        where: how a message calls what was looked at.
        record: the first JSON value, else None.
        names: keys of that record, or column names, or all text and all globals (`module.name`) at the
            beginning of a pickle.
    """

    path: Path
    container: str
    where: str
    record: Any
    names: frozenset[str]

    def has(self, *names: str) -> bool:
        """Whether all the names are there."""
        return self.names.issuperset(names)

    def lists(self, *names: str) -> bool:
        """Whether the first record is an object that holds a list under each name."""
        return isinstance(self.record, dict) and all(isinstance(self.record.get(n), list) for n in names)


@dataclass(frozen=True)
class Format:
    """One format of files.

    Attributes:
        name: what `--format` calls it.
        fits: what at a file's beginning shows that it is this format, or None.
        read: reads a file of it; None for one that is recognised and not imported yet.
    """

    name: str
    fits: Callable[[Head], str | None]
    read: Importer | None


def told_by(container: str, *names: str, but: tuple[str, ...] = ()) -> Callable[[Head], str | None]:
    """A `fits` that asks for a container and names in it, and for the absence of others."""

    def fits(head: Head) -> str | None:
        if head.container != container or not head.has(*names) or not head.names.isdisjoint(but):
            return None
        return f"has {', '.join(map(repr, names))}"

    return fits


def look(path: Path) -> Head:
    """The beginning of a file.

    Raises:
        NotRecognisedError: nothing of what is known begins like this.
        ImportFormatError: it cannot be read, or is damaged.
    """
    start = files.head(path, HEAD_BYTES)
    if start.startswith(b"PK\x03\x04"):
        return Head(path, "torch", f"{path}", None, _names(_first_pickle(path)))
    if start.startswith(b"PAR1"):
        return Head(path, "parquet", f"{path}", None, frozenset(_columns(path)))
    if start.startswith(b"SQLite format 3\0"):
        return Head(path, "sqlite", f"{path}", None, frozenset())
    if start.startswith(b"ARROW1"):
        return Head(path, "arrow", f"{path}", None, frozenset())
    if len(start) > 1 and start[0] == 0x80 and start[1] in range(2, 6):
        return Head(path, "pickle", f"{path}", None, _names(start))
    if _is_msgpack(start):
        return Head(path, "msgpack", f"{path}", None, frozenset())
    try:
        with closing(read_records(path)) as records:
            first = next(records)
    except ImportFormatError as error:
        if not start.strip() or _should_be_json(path, start):
            raise
        raise NotRecognisedError(error.message, hint=error.hint) from error
    names = frozenset(first.data) if isinstance(first.data, dict) else frozenset[str]()
    return Head(path, "json", first.where, first.data, names)


def _is_msgpack(start: bytes) -> bool:
    """Whether it begins with a list of lists of lists, as far as it goes: one byte tells little."""
    at = 0
    for _ in range(3):
        if at >= len(start):
            break
        if start[at] not in _LISTS:
            return False
        at += {0xDC: 3, 0xDD: 5}.get(start[at], 1)
    return at > 0


def _should_be_json(path: Path, start: bytes) -> bool:
    """Whether what cannot be read as JSON is a damaged file, not another kind of file."""
    return ".json" in path.name.lower() or start.lstrip().startswith(b"{")


def _first_pickle(path: Path) -> bytes:
    """The first bytes of a torch archive's pickle."""
    try:
        if files.is_packed(path):
            source: Any = io.BytesIO(files.read_whole(path))
        else:
            source = path
        with zipfile.ZipFile(source) as archive:
            for info in archive.infolist():
                if info.filename.endswith("data.pkl"):
                    with archive.open(info) as member:
                        return member.read(HEAD_BYTES)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OSError) as error:
        raise ImportFormatError(
            f"{path}: its archive is damaged ({error})", hint="copy the file again"
        ) from error
    raise NotRecognisedError(
        f"{path}: a zip archive without a pickle: not a torch.save file", hint="unpack it"
    )


def _names(start: bytes) -> frozenset[str]:
    """Text and globals among the first opcodes of a pickle."""
    found: set[str] = set()
    recent: list[str] = []
    try:
        for op, argument, _ in pickletools.genops(start):
            if op.name == "GLOBAL" and isinstance(argument, str):
                found.add(argument.replace(" ", "."))
            elif op.name == "STACK_GLOBAL":
                found.add(".".join(recent[-2:]))
            elif isinstance(argument, str):
                recent.append(argument)
    except (ValueError, IndexError, AttributeError, OverflowError, UnicodeDecodeError):
        pass  # where the first bytes end, or what is wrong with it: decoding will tell
    return frozenset(found | set(recent))


def _columns(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with files.opened(path) as file:
            names: list[str] = pq.read_schema(
                pa.BufferReader(files.read_whole(path)) if files.is_packed(path) else file
            ).names
            return names
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ImportFormatError(
            f"{path}: not a whole Parquet file: {error}", hint="copy the file again"
        ) from error
