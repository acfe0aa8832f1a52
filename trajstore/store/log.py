"""Owns reading the log's own JSON entries: which file came and went when, and torn ones; commits nothing."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from trajstore.store.place import LOG, Place, entry

S3_THREADS = 16
TORN = "_trajstore/torn"
"""Where a torn entry is put; Delta and vacuum look at neither."""

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
                self._note(number, lines)
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

    Such an entry was never acknowledged, for that takes an fsync of the whole of it. One that a checkpoint
    covers was whole once, and one that is broken in its middle is damaged, not torn: neither counts. Nor
    does an empty one, which Delta reads as a commit of nothing. Buckets put an object whole or not at all.
    """
    if place.folder is None:
        return None
    found = [m for e in place.entries(LOG) if (m := _NUMBER.fullmatch(e.name))]
    newest = max((int(m[1]) for m in found if m[2] == "json"), default=0)
    if newest == 0 or any(int(m[1]) >= newest for m in found if m[2] != "json"):
        return None
    whole, _, last = place.read(entry(newest)).rstrip(b"\0\r\n").rpartition(b"\n")
    return newest if last and all(map(_parses, whole.splitlines())) and _is_cut(last) else None


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
