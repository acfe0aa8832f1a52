"""Owns the bad records of an import: named and counted, set aside when that is asked for; knows no format.

What is to be set aside is held until there are some of them, so that memory does not grow with a file whose
records are all bad. Each lot has a number of its own: a resent one adds nothing.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from trajstore.errors import ImportFormatError
from trajstore.importers import Fault
from trajstore.importers.rows import plain
from trajstore.ingest.target import Target
from trajstore.store.side import Refused, quarantine

OnBadRecord = Literal["stop", "skip", "quarantine"]

AT_ONCE = 4096
AT_ONCE_BYTES = 64 << 20


class Refusals:
    """The bad records of one import.

    Attributes:
        named: where each stands, and what is wrong with it.
    """

    def __init__(self, target: Target, on_error: OnBadRecord) -> None:
        self.named: list[tuple[str, str]] = []
        self._target = target
        self._kept = on_error == "quarantine"
        self._lot: list[Refused] = []
        self._bytes = self._number = 0
        self._writer = ""

    def begin(self, writer: str) -> None:
        """Those that follow are of the file whose rows this writer adds."""
        self._writer, self._number = writer, 0

    def add(self, fault: Fault) -> None:
        """One record that could not be read."""
        self.named.append((fault.where, fault.reason))
        if not self._kept:
            return
        text = _as_json(fault.data)
        refused = Refused(
            row=len(self._lot),
            id=fault.where,
            error=ImportFormatError.__name__,
            column=None,
            reason=fault.reason,
            trajectory=text,
        )
        self._lot.append(refused)
        self._bytes += len(text)
        if len(self._lot) >= AT_ONCE or self._bytes >= AT_ONCE_BYTES:
            self.set_aside()

    def set_aside(self) -> None:
        """Puts those that wait into the quarantine of the store, which is made if there is none."""
        if not self._lot:
            return
        lot, key = self._lot, f"{self._writer}/unread"
        self._target.fill(lambda _: quarantine(self._target.at, lot, key, self._number))
        self._number += 1
        self._lot, self._bytes = [], 0


def _as_json(data: Any) -> str:
    try:
        return json.dumps(plain(data))
    except ValueError as error:  # it holds itself, or unfolds without end
        return json.dumps({"left_out": str(error)})
