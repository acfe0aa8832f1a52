"""Owns numpy arrays that grow at their ends; knows not what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Column:
    """An array to which values are added; `values` is what it holds and may be written to."""

    def __init__(self, dtype: Any, room: int = 64) -> None:
        self._room = np.empty(room, dtype)
        self.values = self._room[:0]

    def append(self, values: NDArray[Any] | Sequence[Any]) -> None:
        """Adds values, cast to the column's type."""
        size, end = len(self.values), len(self.values) + len(values)
        if end > len(self._room):
            self._room = np.empty(max(end, 3 * size // 2 + 64), self._room.dtype)
            self._room[:size] = self.values
        self._room[size:end] = values
        self.values = self._room[:end]
