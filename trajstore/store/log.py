"""Owns reading the log's own JSON entries: which file came and went when, and torn ones; commits nothing."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from trajstore.errors import CorruptFileError
from trajstore.store.place import LOG, Place, entry

S3_THREADS = 16
TORN = "_trajstore/torn"
"""Where a torn entry is put; Delta and vacuum look at neither."""

# Names of application transactions in the log, beside those of writers.
EPOCH, RESTORED, MAINTENANCE = "trajstore-epoch", "trajstore-restored-to", "trajstore-maintenance"

_SWAPS = frozenset({"compact", "delete", "remove_stale", "update", "restore", "buffer"})
_NUMBER = re.compile(LOG + r"/(\d{20})\.(json|checkpoint.*\.parquet)")


class LogReader:
    """What the entries up to some snapshot say; each is read once. Safe to share between threads.

    Attributes:
        arrivals: the snapshot that first brought a file, by the file's name.
        departures: when a file last left the table, in seconds.
        commits: what each commit says of itself, by snapshot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._up_to = -1
        self.arrivals: dict[str, int] = {}
        self.departures: dict[str, float] = {}
        self.commits: dict[int, dict[str, Any]] = {}

    def up_to(self, place: Place, snapshot: int) -> LogReader:
        """Reads what is new up to a snapshot; what it knows may reach further already."""
        with self._lock:
            new = range(self._up_to + 1, snapshot + 1)
            if len(new) > 1 and place.folder is None:
                with ThreadPoolExecutor(S3_THREADS) as pool:
                    found = list(pool.map(partial(_lines, place), new))
            else:
                found = [_lines(place, number) for number in new]
            for number, lines in zip(new, found, strict=True):
                try:
                    self._note(number, lines)
                except (ValueError, KeyError) as error:  # an old one, which Delta need not read any more
                    what = f"{place.path(entry(number))} is damaged: {error}"
                    raise CorruptFileError(what, hint="restore it from a backup") from error
            self._up_to = max(self._up_to, snapshot)
        return self

    def _note(self, number: int, lines: list[bytes]) -> None:
        for line in lines:
            if line.startswith(b'{"commitInfo"'):
                self.commits[number] = json.loads(line)["commitInfo"]
            elif line.startswith(b'{"add"'):
                self.arrivals.setdefault(json.loads(line)["add"]["path"], number)
            elif line.startswith(b'{"remove"'):
                gone = json.loads(line)["remove"]
                self.departures[gone["path"]] = gone["deletionTimestamp"] / 1000


def _lines(place: Place, number: int) -> list[bytes]:
    try:
        return place.read(entry(number)).splitlines()
    except FileNotFoundError:  # another program cleaned the log up; a checkpoint has it
        return []


def log_reader(place: Place) -> LogReader:
    """The reader that all handles of one opened store share: on a bucket, each entry is a request."""
    with _READERS_LOCK:
        return _READERS.setdefault(place, LogReader())


_READERS: WeakKeyDictionary[Place, LogReader] = WeakKeyDictionary()
_READERS_LOCK = threading.Lock()


def torn_entry(place: Place) -> int | None:
    """Number of the newest entry when its end is missing, as a power cut leaves it; else None.

    Such an entry was never acknowledged, for that takes an fsync of the whole of it. It ends within a line,
    or between two, see `is_short`. One that a checkpoint covers was whole once, and one that is broken in
    its middle is damaged, not torn: neither counts. Nor does an empty one, which Delta reads as a commit of
    nothing. Buckets put an object whole or not at all.
    """
    if place.folder is None:
        return None
    found = [m for e in place.entries(LOG) if (m := _NUMBER.fullmatch(e.name))]
    newest = max((int(m[1]) for m in found if m[2] == "json"), default=0)
    if newest == 0 or any(int(m[1]) >= newest for m in found if m[2] != "json"):
        return None
    *whole, last = place.read(entry(newest)).rstrip(b"\0\r\n").split(b"\n")
    if not last or not all(map(_parses, whole)):
        return None
    return newest if _is_cut(last) or _lacks_its_end([*whole, last]) else None


def is_short(place: Place, number: int) -> bool:
    """Whether an entry of ours ends with a whole line before its last one.

    Delta takes it for a commit: of an append it has the files and not that the batch is in, of a rewrite it
    may have what goes and not what comes. Buckets put an object whole or not at all.
    """
    return place.folder is not None and _lacks_its_end(_lines(place, number))


def has_mark(place: Place, number: int, mark: str) -> bool | None:
    """Whether a snapshot's entry holds a text; None when it is not there."""
    try:
        return mark.encode() in place.read(entry(number))
    except FileNotFoundError:
        return None


def _lacks_its_end(lines: list[bytes]) -> bool:
    """Whether what a commit of ours ends with is missing; commits of others and unknown ones lack nothing."""
    if not all(map(_parses, lines)):
        return False  # broken in another way, and Delta says so unless a checkpoint covers it
    found = [json.loads(line) for line in lines if line.startswith((b'{"commitInfo"', b'{"txn"'))]
    notes = [line["commitInfo"]["trajstore"] for line in found if "trajstore" in line.get("commitInfo", {})]
    if not notes:
        return False
    note = json.loads(notes[0])
    there = {line["txn"]["appId"] for line in found if "txn" in line}
    if "writer_id" in note:
        return not there
    if note["operation"] == "add_column":
        return not any(line.startswith(b'{"metaData"') for line in lines)
    return note["operation"] in _SWAPS and not there >= (
        {MAINTENANCE, EPOCH, RESTORED} if note["operation"] == "restore" else {MAINTENANCE}
    )


def _parses(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _is_cut(line: bytes) -> bool:
    """Whether a line is the beginning of a JSON object and no more."""
    if not line.startswith(b"{"):
        return False
    bare = re.sub(rb'"(?:[^"\\]|\\.)*(?:"|\Z)', b"", line)  # strings hold brackets of their own
    depth = 0
    for mark in re.findall(rb"[{}\[\]]", bare):
        depth += 1 if mark in b"{[" else -1
        if depth == 0:
            return False
    return True
