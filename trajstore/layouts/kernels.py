"""Owns the one loop that moves values: gather, widen, pad and pack, in numpy or in C; knows no column names.

The numpy form is the reference; the C form (`_kernel.c`, built at install time when there is a compiler)
gives the same bits, 1.5 to 3 times as fast, and lets go of the GIL. `TRAJSTORE_KERNEL=numpy` turns it off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import InputError
from trajstore.layouts.fields import Field
from trajstore.layouts.place import Left, Place
from trajstore.layouts.ragged import Int64s

SOURCE = Path(__file__).with_name("_kernel.c")
LIBRARY = SOURCE.with_name(f"_kernel-{hashlib.blake2b(SOURCE.read_bytes(), digest_size=4).hexdigest()}.so")
"""Where the build leaves the C form of this source; that of an older one would read other jobs."""


class Job(NamedTuple):
    """One output to write.

    Attributes:
        field: B rows, and what stands where they have no value.
        place: where their values go.
        out: contiguous, `place.shape` of `field.dtype`.
        left: all of it holds `field.fill` already, but for these values of the batch before. None: padding
            is to be written.
    """

    field: Field
    place: Place
    out: NDArray[Any]
    left: Left | None = None


def kernel() -> Literal["c", "numpy"]:
    """Which form `write` takes: "c" when it was built and the environment does not say otherwise.

    Raises:
        InputError: TRAJSTORE_KERNEL is neither "c" nor "numpy", or "c" and there is none.
    """
    asked = os.environ.get("TRAJSTORE_KERNEL")
    if asked == "numpy":
        return "numpy"
    if asked not in (None, "", "c"):
        raise InputError(f"TRAJSTORE_KERNEL is {asked!r}, expected numpy or c")
    if _library() is not None:
        return "c"
    if asked == "c":
        raise InputError("the C kernel was not built", hint="install a C compiler, then trajstore once more")
    return "numpy"


def write(jobs: Sequence[Job]) -> None:
    """Writes every value and all padding of the outputs."""
    if kernel() == "numpy":
        for job in jobs:
            _write(job)
        return
    ready = []
    for job in jobs:
        codes = _codes(job.field.column.dtype, job.field.dtype)
        if codes is not None:
            ready.append((job, codes))
        else:  # a dtype of the user's own that C has no name for, such as float16
            _write(job)
    _write_in_c(ready)


# The reference


def _write(job: Job) -> None:
    field, place = job.field, job.place
    out = job.out.reshape(-1)
    if job.left is not None:
        for at, count in zip(job.left.at.tolist(), job.left.count.tolist(), strict=True):
            job.left.memory[at : at + count] = field.fill
    elif place.width:
        out.fill(field.fill)
    column = field.column
    chunks = column.chunks
    sources = zip(column.chunk.tolist(), column.start.tolist(), column.length.tolist(), strict=True)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, as in C
        for i, ((at, skip, count), (chunk, start, length)) in enumerate(
            zip(place.triples, sources, strict=True)
        ):
            if length >= 0:
                first = start + skip
                out[at : at + count] = chunks[chunk][first : first + count]
            elif field.positions:
                out[at : at + count] = np.arange(count)
            else:
                out[at : at + count] = field.null
                if field.split is not None:
                    out[at : at + min(max(int(field.split[i]) - skip, 0), count)] = 0


# C


_NAMES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8")
_CODES = {np.dtype(name): code for code, name in enumerate(_NAMES)}
_TARGETS = (0, 4, 6, 8, 9)  # what C widens and narrows to; it copies any dtype as it is
_FLOATS = (8, 9)


@cache
def _library() -> Any:
    if not LIBRARY.exists():
        return None
    library = ctypes.CDLL(str(LIBRARY))
    library.trajstore_write.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    library.trajstore_write.restype = None
    return library.trajstore_write


@lru_cache(maxsize=256)
def _codes(source: np.dtype[Any] | None, target: np.dtype[Any]) -> tuple[int, int] | None:
    """The two dtypes as C knows them; None when it does not, or not the one as the other."""
    given, asked = _CODES.get(source or target), _CODES.get(target)
    if given is None or asked is None:
        return None
    widened = asked in _TARGETS and not (given in _FLOATS and asked not in _FLOATS)
    return (given, asked) if given == asked or widened else None


@lru_cache(maxsize=256)
def _bits(value: float, dtype: np.dtype[Any]) -> int:
    return int.from_bytes(np.array(value, dtype).tobytes().ljust(8, b"\0"), sys.byteorder, signed=True)


def _write_in_c(jobs: Sequence[tuple[Job, tuple[int, int]]]) -> None:
    # What C reads of the rows lies in one block: asking numpy where an array lies takes longer than
    # copying the few numbers of a batch. Most columns share their places, which go there once.
    block: list[Int64s] = []
    size = 0

    def begin(array: Int64s) -> int:
        nonlocal size
        block.append(array)
        size += len(array)
        return size - len(array)

    places: dict[int, tuple[int, int, int]] = {}
    lefts: dict[int, tuple[int, int, int]] = {}
    lines: list[int] = []
    for ((column, dtype, fill, null, split, positions, _), place, out, left), codes in jobs:
        where = places.get(id(place))
        if where is None:
            span = place.span
            where = places[id(place)] = begin(span.skip), begin(span.count), begin(place.at)
        before = _NOTHING
        if left is not None:
            known = lefts.get(id(left.at))
            before = known or (len(left.at), begin(left.at), begin(left.count))
            lefts[id(left.at)] = before
        lines += (
            *codes,
            ctypes.addressof(ctypes.c_char.from_buffer(out.data)) if out.size else 0,
            len(place.at),
            begin(column.address) if column.chunks else -1,
            *where,
            place.width if left is None else 0,
            _bits(fill, dtype),
            _bits(null, dtype),
            positions,
            -1 if split is None else begin(split),
            *before,
        )
    if lines:
        numbers, table = np.concatenate(block), array("q", lines)
        _library()(table.buffer_info()[0], len(jobs), numbers.__array_interface__["data"][0])


_NOTHING = (0, -1, -1)
"""What is left of no batch before: no rows, and where they would begin."""
