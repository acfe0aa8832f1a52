"""Owns which rows are generations to go on with; pure, knows no store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from trajstore.selection.derived import superseded
from trajstore.selection.steps import Bounds

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Resumable:
    """Keeps partial trajectories that were cut off and that no other row continues; of one id the last row.

    It looks at all rows, so it is the first step of a scan.
    """

    label: ClassVar[str] = "resumable()"
    bounds: ClassVar[Bounds] = {}

    def columns(self, types: Mapping[str, bool]) -> set[str]:
        return set(SOURCES)

    def keep(self, frame: pl.DataFrame) -> NDArray[np.int64]:
        return resumable(frame).to_numpy().nonzero()[0]


SOURCES = ("id", "parent_id", "status", "continuation_count")


def resumable(frame: pl.DataFrame) -> pl.Series:
    """Whether each row can be continued, given all rows of a snapshot in order of arrival."""
    cut_off = frame["status"].is_in(["aborted", "generating"]) & frame["continuation_count"].is_not_null()
    return cut_off & frame["id"].is_last_distinct() & ~superseded(frame)
