"""Owns Buffers, output memory used again batch after batch; knows no rows and no layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajstore.layouts.place import Left, Place

_SPARE = 1.25  # a buffer that grows takes this much more than asked, so that it seldom grows again


def _memory(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


@dataclass
class _Buffer:
    memory: NDArray[np.uint8]
    padding: bytes | None = None
    left: Place | None = None


class Buffers:
    """Memory that the arrays of the next batch take; the arrays of the batch before are overwritten.

    Fresh memory costs page faults: at 60 MB a batch, up to 15 times the copy itself.

    Args:
        untouched: promises that nobody writes to the arrays between batches, so that only the values which
            the batch before left are cleared, not all padding. With the promise broken (a `masked_fill_`
            on padding), later batches hold what was written there.
        allocate: gives so many bytes of memory, for pinned memory and the like.
    """

    def __init__(
        self, *, untouched: bool = False, allocate: Callable[[int], NDArray[np.uint8]] = _memory
    ) -> None:
        self._untouched = untouched
        self._allocate = allocate
        self._buffers: dict[str, _Buffer] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(len(buffer.memory) for buffer in self._buffers.values())

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Memory of that name as an array; its values are whatever lay there."""
        out, buffer = self._grown(name, shape, dtype)
        buffer.left = None
        return out

    def padded(
        self, name: str, place: Place, dtype: np.dtype[Any], fill: float
    ) -> tuple[NDArray[Any], Left | None]:
        """Memory for a padded output, and what is to be cleared in it; None: all padding is to be written."""
        out, buffer = self._grown(name, place.shape, dtype)
        if not self._untouched:
            return out, None
        memory = buffer.memory[: len(buffer.memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        padding = np.array(fill, dtype).tobytes()
        if buffer.left is None or buffer.padding != padding:
            memory.fill(fill)
            left = Left(memory, place.at[:0], place.at[:0])
        else:
            left = Left(memory, buffer.left.at, buffer.left.span.count)
        buffer.left, buffer.padding = place, padding
        return out, left

    def _grown(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[NDArray[Any], _Buffer]:
        size = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer.memory) < size:
            self._buffers.pop(name, None)  # given back before more is asked for
            grown = size if buffer is None else int(size * _SPARE)
            buffer = self._buffers[name] = _Buffer(self._allocate(max(grown, 1)))
        return np.ndarray(shape, dtype, buffer.memory), buffer
