"""Owns finding the files of an import and opening them, compressed or not; knows no format's content."""

from __future__ import annotations

import gzip
import hashlib
import io
import mmap
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn

from trajstore.errors import ImportFormatError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
MAX_BYTES = 16 << 30
"""How much of one file is ever held in memory: a dump that must be read whole, an array, or one line."""

_BLOCK = 1 << 20


@dataclass(frozen=True)
class SourceFile:
    """One file of an import.

    Attributes:
        path: where to read it.
        name: how messages and ids call it: relative to the folder that was given.
    """

    path: Path
    name: str


@contextmanager
def sources(given: str | Path) -> Iterator[list[SourceFile]]:
    """The files behind what a user gave: a file, a folder (all below it), a glob, or "-" for stdin.

    Stdin is copied to a temporary file first: a format is told by looking twice. Names that begin with a dot
    are left out of folders, and links that lead out of the folder are not followed.

    Raises:
        ImportFormatError: there is nothing of that name, or no file in it.
    """
    if str(given) == "-":
        with tempfile.TemporaryDirectory(prefix="trajstore-") as folder:
            copy = Path(folder) / "stdin"
            with copy.open("wb") as out:
                shutil.copyfileobj(sys.stdin.buffer, out, _BLOCK)
            yield [SourceFile(copy, "stdin")]
        return
    yield _found(Path(given))


def _found(path: Path) -> list[SourceFile]:
    try:
        if path.is_file() or path.is_fifo():
            return [SourceFile(path, path.name)]
        if path.is_dir():
            root, files = path, sorted(path.rglob("*"))
        elif any(mark in str(path) for mark in "*?["):
            root, files = _globbed(path)
        else:
            raise ImportFormatError(f"{path}: no such file", hint="check the path; it is taken as given")
        real = root.resolve()
        chosen = [
            SourceFile(file, file.relative_to(root).as_posix())
            for file in files
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(root).parts)
            and file.resolve().is_relative_to(real)
        ]
        full = any(file.path.stat().st_size for file in chosen)
    except OSError as error:
        unreadable(path, error)
    if not full:
        raise ImportFormatError(
            f"{path}: no file to import in it", hint="empty and hidden files are left out"
        )
    return chosen


def _globbed(path: Path) -> tuple[Path, list[Path]]:
    """The folder before the first wildcard, and the files that match, folders among them opened up."""
    parts = path.parts
    at = next(i for i, part in enumerate(parts) if any(mark in part for mark in "*?["))
    root = Path(*parts[:at]) if at else Path()
    matches = sorted(root.glob(str(Path(*parts[at:]))))
    files = {file for match in matches for file in (match.rglob("*") if match.is_dir() else [match])}
    return root, sorted(files)


def digest(path: Path) -> str:
    """Hex digest of a file's bytes, as they are on disk; SHA-256, which processors have built in."""
    state = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                state.update(block)
    except OSError as error:
        unreadable(path, error)
    return state.hexdigest()[:32]


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read, unpacked on the way when it is gzip or zstd data.

    Raises:
        ImportFormatError: it is missing, a folder, unreadable, or its compression is damaged.
    """
    try:
        if path.is_dir():
            raise ImportFormatError(
                f"{path}: is a folder, expected a file", hint="give the files inside it, or import the folder"
            )
        if not path.exists():
            raise ImportFormatError(f"{path}: no such file", hint="check the path; it is taken as given")
        with io.BufferedReader(io.FileIO(path), _BLOCK) as file:  # a line of tokens outgrows the usual buffer
            magic = file.peek(4)[:4]
            if magic.startswith(GZIP):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield unpacked  # type: ignore[misc]  # a GzipFile reads like any binary file
            elif magic == ZSTD:
                with _zstd(file) as stream:
                    yield stream
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ImportFormatError(
            f"{path}: its compressed data is damaged: {error}",
            hint="the file was cut or changed: copy it again",
        ) from error
    except OSError as error:
        unreadable(path, error)


def _zstd(file: BinaryIO) -> Any:
    import pyarrow as pa  # only here: its codec saves a dependency

    stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    return io.BufferedReader(stream, _BLOCK)


def is_packed(path: Path) -> bool:
    """Whether a file is gzip or zstd data."""
    with path.open("rb") as file:
        magic = file.read(4)
    return magic.startswith(GZIP) or magic == ZSTD


def read_whole(path: Path) -> memoryview:
    """All bytes of a file; mapped when it is not compressed, so that nothing is copied.

    Raises:
        ImportFormatError: it unpacks to more than MAX_BYTES, or cannot be read.
    """
    with opened(path) as file:
        if not is_packed(path):
            if not path.stat().st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return memoryview(read_bounded(path, file))


def read_bounded(path: Path, file: IO[bytes]) -> bytes:
    """The rest of an open file, of which at most MAX_BYTES are taken into memory."""
    parts, size = [], 0
    while block := file.read(min(_BLOCK, MAX_BYTES + 1 - size)):
        parts.append(block)
        size += len(block)
        if size > MAX_BYTES:
            too_large(path)
    return b"".join(parts)


def head(path: Path, size: int) -> bytes:
    """The first bytes of a file, unpacked."""
    parts: list[bytes] = []
    with opened(path) as file:
        while size > 0 and (block := file.read(size)):
            parts.append(block)
            size -= len(block)
    return b"".join(parts)


def too_large(path: Path) -> NoReturn:
    """Refuses a file that would not fit in memory."""
    raise ImportFormatError(
        f"{path}: more than {MAX_BYTES:,} bytes would have to be in memory at once",
        hint="split it; JSON lines are read one by one, whatever their number",
    )


def unreadable(path: Path, error: OSError) -> NoReturn:
    """Refuses a file that the operating system does not give."""
    raise ImportFormatError(
        f"{path}: cannot be read: {error.strerror or error}", hint="check the file's permissions and its disk"
    ) from error
