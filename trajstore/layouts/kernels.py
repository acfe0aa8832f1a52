"""Owns the one loop that moves values: gather, widen, pad and pack, in numpy or in C; knows no column names.

The numpy form is the reference; the C form (`_kernel.c`, built at install time when there is a compiler)
gives the same bits, 1.5 to 3 times as fast, and lets go of the GIL. `TRAJSTORE_KERNEL=numpy` turns it off.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import InputError
from trajstore.layouts.fields import Field
from trajstore.layouts.place import Left, Place

LIBRARY = Path(__file__).with_name("_kernel.so")
"""Where the build leaves the C form."""


@dataclass(frozen=True)
class Job:
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
        if _in_c(job):
            ready.append(job)
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


_CODES = {"i1": 0, "u1": 1, "i2": 2, "u2": 3, "i4": 4, "u4": 5, "i8": 6, "u8": 7, "f4": 8, "f8": 9}
_TARGETS = (0, 4, 6, 8, 9)  # what C widens and narrows to; it copies any dtype as it is
_FLOATS = (8, 9)


@cache
def _library() -> Any:
    if not LIBRARY.exists():
        return None
    library = ctypes.CDLL(str(LIBRARY))
    library.trajstore_write.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.trajstore_write.restype = None
    return library.trajstore_write


@lru_cache(maxsize=256)
def _code(dtype: np.dtype[Any]) -> int | None:
    return _CODES.get(dtype.str[1:]) if dtype.isnative else None


def _in_c(job: Job) -> bool:
    target = _code(job.field.dtype)
    source = target if job.field.column.dtype is None else _code(job.field.column.dtype)
    if source is None or target is None:
        return False
    return source == target or (target in _TARGETS and not (source in _FLOATS and target not in _FLOATS))


@lru_cache(maxsize=256)
def _bits(value: float, dtype: np.dtype[Any]) -> int:
    return int.from_bytes(np.array(value, dtype).tobytes().ljust(8, b"\0"), sys.byteorder, signed=True)


def _write_in_c(jobs: Sequence[Job]) -> None:
    keep: list[NDArray[Any]] = []  # arrays made here must outlive the call

    def pointer(array: NDArray[Any]) -> int:
        flat = np.ascontiguousarray(array)
        keep.append(flat)
        return flat.__array_interface__["data"][0]  # type: ignore[no-any-return]  # an untyped dict

    lines = []
    for job in jobs:
        field, place, column = job.field, job.place, job.field.column
        own = column.dtype or field.dtype
        left = job.left
        lines.append(
            (
                _code(own),
                _code(field.dtype),
                pointer(job.out),
                len(column),
                pointer(column.address),
                pointer(place.span.skip),
                pointer(place.span.count),
                pointer(place.at),
                place.width if left is None else 0,
                _bits(field.fill, field.dtype),
                _bits(field.null, field.dtype),
                int(field.positions),
                0 if field.split is None else pointer(field.split),
                0 if left is None else len(left.at),
                0 if left is None else pointer(left.at),
                0 if left is None else pointer(left.count),
            )
        )
    table = np.array(lines, np.int64)
    _library()(table.__array_interface__["data"][0], len(lines))
