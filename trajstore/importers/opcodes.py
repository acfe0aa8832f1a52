"""Owns walking over a pickle's opcodes before it is decoded; carries none out, makes no value of any.

Python's decoder believes what a pickle claims: it makes room for the memo entry 4,000,000,000, or for a text
of 2^40 characters, before it looks for more. Here every size must lie within the pickle, and every memo index
below its length, as each entry takes at least one opcode. So memory stays in proportion to the file.
"""

from __future__ import annotations

import pickletools
import re
import struct
from pickle import UnpicklingError

_COUNTED = {
    pickletools.TAKEN_FROM_ARGUMENT1: "<B",
    pickletools.TAKEN_FROM_ARGUMENT4: "<i",
    pickletools.TAKEN_FROM_ARGUMENT4U: "<I",
    pickletools.TAKEN_FROM_ARGUMENT8U: "<Q",
}
_STOP, _PUT, _LONG_PUT, _FRAME = b".", b"p", b"r", b"\x95"
_TWO_LINES = (b"c", b"i")
_OPCODES = {op.code.encode("latin1"): 0 if op.arg is None else op.arg.n for op in pickletools.opcodes}


def _runs() -> re.Pattern[bytes]:
    """Opcodes of a fixed length, as many as there are: a pickle of numbers is mostly those."""
    by_size: dict[int, bytes] = {}
    for code, size in _OPCODES.items():
        if size >= 0 and code not in (_STOP, _LONG_PUT, _FRAME):
            by_size[size] = by_size.get(size, b"") + re.escape(code)
    one = b"|".join(b"[%b]%b" % (codes, b"." * size) for size, codes in sorted(by_size.items(), reverse=True))
    return re.compile(b"(?s:%b)*+" % one)  # possessive: a run of millions needs no stack


_RUN = _runs()
_LINE = re.compile(rb"[^\n]*\n")


def check_claims(data: memoryview | bytes) -> None:
    """Walks from the first opcode of a pickle to the one that stops it.

    Raises:
        UnpicklingError: it claims more than it holds, has an opcode that there is not, or does not stop.
    """
    at, end = 0, len(data)
    while True:
        run = _RUN.match(data, at)
        at = run.end() if run else at
        code = bytes(data[at : at + 1])
        at += 1
        if code == _STOP:
            return
        if code == _LONG_PUT:
            entry, at = _number(data, at, "<I")
            _bounded(entry, end, "the memo entry")
        elif code == _FRAME:
            size, at = _number(data, at, "<Q")
            _bounded(size, end - at + 1, "a frame of")
        elif _OPCODES.get(code, 0) == pickletools.UP_TO_NEWLINE:
            line = _line(data, at)
            if code == _PUT:
                _bounded(int(bytes(data[at : min(line, at + 20)])), end, "the memo entry")
            at = _line(data, line) if code in _TWO_LINES else line
        elif _OPCODES.get(code, 0) in _COUNTED:
            size, at = _number(data, at, _COUNTED[_OPCODES[code]])
            _bounded(size, end - at + 1, "a value of")
            at += size
        else:
            raise UnpicklingError(f"it ends or is damaged at byte {at - 1:,}")


def _number(data: memoryview | bytes, at: int, form: str) -> tuple[int, int]:
    """A number and where it ends."""
    end = at + struct.calcsize(form)
    if end > len(data):
        raise UnpicklingError(f"it ends in the number that begins at byte {at:,}")
    return struct.unpack_from(form, data, at)[0], end


def _line(data: memoryview | bytes, at: int) -> int:
    line = _LINE.match(data, at)
    if line is None:
        raise UnpicklingError(f"it ends in the line that begins at byte {at:,}")
    return line.end()


def _bounded(claimed: int, bound: int, what: str) -> None:
    if not 0 <= claimed < bound:
        raise UnpicklingError(f"it claims {what} {claimed:,} where less than {bound:,} is possible")
