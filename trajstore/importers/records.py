"""Owns JSON records with their place in a file, and what an importer is; knows no format's fields, no store.

Three layouts are told apart by their first line: JSON lines (streamed, one line in memory), one array of
records, and one object over several lines. Python's json cannot stream, so the text of the latter two is
in memory as a whole; an array's records are still made one at a time. gzip and zstd files are unpacked on
the way.

The dialect is Python's: NaN and Infinity are numbers, integers are exact (beyond 64 bits, not inside a list
of numbers), 1e400 is inf. Two equal keys in one object are refused, because "the last one wins" loses data
silently. orjson reads the lines for which it gives the same, three times as fast; all others go to Python's
json.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import chain, count
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import orjson

from trajstore.errors import ImportFormatError
from trajstore.importers import files
from trajstore.importers.tokenizer import Tokenizer
from trajstore.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON value of a file.

    Attributes:
        data: the value.
        where: `path:12` (a line, from 1), `path[3]` (an element of an array, from 0) or `path`.
        bytes_read: how far into the file the record ends; for an array in proportion to its text.
    """

    data: Any
    where: str
    bytes_read: int


@dataclass(frozen=True, slots=True)
class Imported:
    """One trajectory out of a file, and the record it came from (see Record)."""

    trajectory: Trajectory
    where: str
    bytes_read: int


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that could not be read.

    Attributes:
        where: as in Record.
        reason: what is wrong with it.
        hint: what to do.
        data: the record's value, None when there is none.
    """

    where: str
    reason: str
    hint: str | None
    data: Any


@dataclass(frozen=True)
class ImportOptions:
    """What a caller may ask of any importer.

    Attributes:
        tokenizer: makes token ids for rows that have only text; they are flagged `tokens_retokenized`.
        namespace: what ids made of this file begin with, beside the format's name; the file's name if "".
        derive_groups: rows of one file with the same prompt are a group where the format names none.
        on_fault: called with a bad record instead of raising; the import goes on behind it.
    """

    tokenizer: Tokenizer | None = None
    namespace: str = ""
    derive_groups: bool = True
    on_fault: Callable[[Fault], None] | None = None

    def fault(self, where: str, error: ImportFormatError, data: Any = None) -> None:
        """Hands on a bad record, or raises `error` when nobody wants it."""
        if self.on_fault is None:
            raise error
        self.on_fault(Fault(*place_and_reason(where, error.message), error.hint, data))


def place_and_reason(where: str | Path, message: str) -> tuple[str, str]:
    """Where a complaint about `where` is (there, or at a line or element of it), and the rest of it."""
    found = re.match(rf"({re.escape(str(where))}(?::\d+|(?:\.\w+)*\[\d+\])?): ", message)
    return (found[1], message[found.end() :]) if found else (str(where), message)


Importer = Callable[[Path, ImportOptions], Iterator[Imported]]
"""Reads one file of one format; raises ImportFormatError, naming file and record, at the first bad one."""

MAX_LINE = 1 << 30
"""Bytes of one line; a longer one is no record, or a bomb."""

_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\n\r]*")
_NOT_JSON = {  # how a file begins: what it is, what to do
    b"PK\x03\x04": ("a zip archive (torch.save writes those, too)", "give JSON lines or a JSON array"),
    b"PAR1": ("a Parquet file", "give JSON lines or a JSON array"),
    b"\xff\xfe": ("UTF-16 text", "write it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE"),
    b"\xfe\xff": ("UTF-16 text", "write it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE"),
}
_CUT = "the text ends inside a record, as when its writer was stopped: remove the record or write it again"
_SHAPE = "a file is JSON lines (one whole object a line), one array of objects, or one object"


class _DuplicateKeyError(ValueError):
    pass


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _DuplicateKeyError(next(key for key, count in counts.items() if count > 1))
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)


def read_records(path: Path, options: ImportOptions = ImportOptions()) -> Generator[Record]:
    """The records of a file, in order, blank lines left out.

    Raises:
        ImportFormatError: the file is missing, a folder, unreadable, not UTF-8, not JSON, or has no record.
            A line that is not JSON goes to `options.on_fault` when that is given, and reading goes on.
    """
    path = Path(path)
    empty = True
    with files.opened(path) as file:
        for record in _records(path, file, options):
            empty = False
            yield record
    if empty:
        raise ImportFormatError(
            f"{path}: no records in it", hint="the file is empty, blank, or an empty array"
        )


def require_object(record: Record) -> dict[str, Any]:
    """The record's value, which must be a JSON object.

    Raises:
        ImportFormatError: it is something else.
    """
    if isinstance(record.data, dict):
        return record.data
    raise ImportFormatError(
        f"{record.where}: expected a JSON object, found {kind_of(record.data)}",
        hint="one record is one object with named fields",
    )


def kind_of(value: Any) -> str:
    """A JSON value's type in the words of an error message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value!r}" if isinstance(value, float) else "an integer"
        case str():
            return f"text {value[:40]!r}"
        case list():
            return "a list"
        case _:
            return "an object"


def _records(path: Path, file: BinaryIO, options: ImportOptions) -> Iterator[Record]:
    lines = _lines(path, file)
    first = next(lines, None)
    if first is None:
        return
    for magic, (found, hint) in _NOT_JSON.items():
        if first[0] == 1 and first[1].startswith(magic):
            raise ImportFormatError(f"{path}: expected JSON text, found {found}", hint=hint)
    if first[1].lstrip().startswith(b"["):
        number, head, _ = first
        yield from _array(path, *_whole(path, number, head + files.read_bounded(path, file)))
        return
    second = next(lines, None)
    if second is not None and _goes_on(first[1].rstrip(), second[1].lstrip()):
        between = b"\n" * (second[0] - first[0] - 1)
        whole = first[1] + between + second[1] + files.read_bounded(path, file)
        text, size = _whole(path, first[0], whole)
        yield Record(_decode(path, text, 1, str(path), last=True), str(path), size)
        return
    for number, raw, end in chain([first] if second is None else [first, second], lines):
        where = f"{path}:{number}"
        try:
            data = _fast(raw)
            if data is _SLOW:
                text = _text(path, number, raw.rstrip())
                data = _decode(path, text, number, where, last=not raw.endswith(b"\n"))
        except ImportFormatError as error:
            options.fault(where, error, raw.decode(errors="replace"))
            continue
        yield Record(data, where, end)


_SLOW = object()
_NUMBERS = b"0123456789.,- \t\r\n"
_HUGE = 2.0**63


def _fast(raw: bytes) -> Any:
    """A line's value by orjson, or _SLOW where it could differ from Python's json.

    It differs where it fails, in integers beyond 64 bits, which become floats, and in objects with two equal
    keys: then the text has more keys than the value. Of the text without numbers and space, which is short
    where tokens are long, every quote before a colon ends a key, but for escaped ones. (A key that ends in a
    backslash would look like one of those; `_keys` sends it to the slow road.)
    """
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _SLOW
    words = raw.translate(None, _NUMBERS)
    return data if words.count(b'":') - words.count(b'\\":') == _keys(data) else _SLOW


def _keys(data: Any) -> int:
    """Keys of all objects in a value; a wrong number where the value may not be what Python's json gives.

    A list that begins with a plain value is not looked into: keys behind it make the number wrong.
    """
    if type(data) is dict:
        count = len(data)
        if "\\" in "".join(data):
            return -1 << 60
        for value in data.values():
            kind = type(value)
            if kind is dict or kind is list:
                count += _keys(value)
            elif kind is float and not -_HUGE < value < _HUGE:
                return -1 << 60
        return count
    if type(data) is list and data and type(data[0]) in (dict, list):
        return sum(map(_keys, data))
    return 0


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    """Number, bytes without byte order mark, and end of each line that is not blank."""
    end = 0
    for number in count(1):
        raw = file.readline(MAX_LINE + 1)
        if not raw:
            return
        if len(raw) > MAX_LINE:
            raise ImportFormatError(
                f"{path}:{number}: a line of more than {MAX_LINE:,} bytes", hint="one line is one record"
            )
        end += len(raw)
        raw = raw.removeprefix(_BOM)  # on any line: joined files carry one inside
        if raw.strip():
            yield number, raw, end


def _goes_on(first: bytes, second: bytes) -> bool:
    """Whether two lines are the beginning of one object that is laid out over lines."""
    return first.endswith((b"{", b"[", b",", b":")) or second.startswith((b",", b"}", b"]", b":"))


def _whole(path: Path, number: int, raw: bytes) -> tuple[str, int]:
    """Text of a file of which `raw` is what begins at line `number`, with its lines in place; its size."""
    return "\n" * (number - 1) + _text(path, number, raw), len(raw)


def _array(path: Path, text: str, size: int) -> Iterator[Record]:
    at = _skip(text, _skip(text, 0) + 1)
    index = 0
    while index or text[at : at + 1] != "]":
        where = f"{path}[{index}]"
        try:
            data, at = _DECODER.raw_decode(text, at)
            at = _skip(text, at)
            if text[at : at + 1] not in (",", "]"):
                raise JSONDecodeError("Expecting ',' delimiter", text, at)
        except (ValueError, RecursionError) as error:
            _refuse(path, error, text, 1, where, last=True)
        yield Record(data, where, size * (at + 1) // len(text))
        if text[at] == "]":
            break
        at = _skip(text, at + 1)
        index += 1
    end = _skip(text, at + 1)
    if end != len(text):
        _refuse(path, JSONDecodeError("Extra data", text, end), text, 1, str(path), last=True)


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _text(path: Path, number: int, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = number + raw.count(b"\n", 0, error.start)
        raise ImportFormatError(
            f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x} ({error.reason})",
            hint="write the file as UTF-8, e.g. iconv -f WINDOWS-1252 -t UTF-8 FILE",
        ) from error


def _decode(path: Path, text: str, number: int, where: str, *, last: bool) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        _refuse(path, error, text, number, where, last=last)


def _refuse(path: Path, error: Exception, text: str, number: int, where: str, *, last: bool) -> NoReturn:
    """Raises for `text`, which begins at line `number` and, if `last`, ends where the file ends."""
    hint = _SHAPE
    match error:
        case _DuplicateKeyError():
            reason = f"key {error.args[0]!r} appears twice in one object"
            hint = "keep one of the two: a reader that takes either loses the other"
        case JSONDecodeError():
            where = f"{path}:{number + error.lineno - 1}"
            reason = f"not JSON: {error.msg} (column {error.colno})"
            if last and (error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")):
                hint = _CUT
        case RecursionError():
            reason, hint = "nested too deeply to be read", "a record should not nest a thousand levels"
        case _:  # an integer of more than 4300 digits
            reason = f"not JSON that Python can read: {error}"
    raise ImportFormatError(f"{where}: {reason}", hint=hint) from error
