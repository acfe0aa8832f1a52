"""Owns the rows of one export on their way out, and the account of what a format has no place for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trajstore.batch import TrajectoryBatch
from trajstore.errors import ValidationError
from trajstore.schema import BY_NAME
from trajstore.store import Scan

ROWS, TOKENS = 1024, 1 << 22
"""Rows in memory at a time: so many, or as many as hold so many tokens."""

_FOLLOWS = frozenset(  # from other columns, or says how to read them
    {
        *("id_hash", "length", "prompt_length", "response_length", "prompt_tokens", "response_tokens"),
        *("oldest_version_id", "newest_version_id", "version_known", "attention_mask"),
        *("version_step", "version_timestamp"),
        *(name for name, column in BY_NAME.items() if column.stamp),
    }
)


@dataclass(frozen=True)
class SetOptions:
    """What the sets for trainers are made by; see `trajstore.offline`.

    Attributes:
        min_reward: sft keeps rows from this reward on, kto calls them good.
        top: sft keeps this part of each group, the best of it.
        margin: rewards of a dpo pair differ by more.
        pairing: "best_worst", or "all" pairs of a group.
        log_probs: of ppo: "trainer", or "behavior" where a row has no others.
    """

    min_reward: float | None = None
    top: float | None = None
    margin: float = 0.0
    pairing: Literal["best_worst", "all"] = "best_worst"
    log_probs: Literal["trainer", "behavior"] = "trainer"


DEFAULTS = SetOptions()


@dataclass
class Selection:
    """The rows to export.

    Attributes:
        scan: the rows.
        holds: columns that the format has a place for; None = do not count.
        options: for sets.
        report: called with rows done and all rows.
        rows: written so far.
        left_behind: by column, rows whose value was left behind.
        dropped: by reason, rows that were left out.
    """

    scan: Scan
    holds: frozenset[str] | None
    options: SetOptions
    report: Callable[[int, int], None]
    rows: int = 0
    left_behind: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def batches(self) -> Iterator[TrajectoryBatch]:
        """The rows, some at a time; what the format has no place for is counted on the way."""
        ends = np.cumsum(self.scan.columns(["length"]).to_arrow()["length"].to_numpy(), dtype=np.int64)
        total = len(ends)
        self.report(0, total)
        for batch in self.scan.iter_parts(_edges(ends)):
            self._count(batch.to_arrow())
            yield batch
            self.rows += len(batch)
            self.report(self.rows, total)

    def _count(self, table: pa.Table) -> None:
        if self.holds is None:
            return
        for name in table.schema.names:
            if name not in self.holds and name not in _FOLLOWS:
                self.left_behind += Counter({name: _given(table, name)})

    def lose(self, column: str) -> None:
        """Counts a row whose value in a column the format cannot say."""
        self.left_behind[column] += 1


def _edges(ends: NDArray[np.int64]) -> list[int]:
    """Where each batch begins, and the end, of rows whose tokens end at `ends`; a row is never cut."""
    edges = [0]
    while (at := edges[-1]) < len(ends):
        before = int(ends[at - 1]) if at else 0
        full = int(np.searchsorted(ends, before + TOKENS, side="right"))
        edges.append(min(at + ROWS, max(full, at + 1), len(ends)))
    return edges


def _given(table: pa.Table, name: str) -> int:
    """Rows that hold something in a column which is not what a row holds when nothing was said."""
    column = table.column(name)
    match name:
        case "prompt" | "response":
            said = pc.not_equal(column, "")
        case "tokens":
            said = pc.greater(table.column("length"), 0)
        case "status":
            said = pc.not_equal(column, "completed")
        case "generation_time_ms":
            said = pc.not_equal(column, 0.0)
        case "tokens_retokenized":
            said = column
        case _:
            return len(column) - int(column.null_count)
    return int(pc.sum(said).as_py() or 0)


def need_text(batch: TrajectoryBatch, format: str) -> None:
    """Refuses rows of tokens without text, of which a format of texts would hold nothing.

    Raises:
        ValidationError: there is such a row.
    """
    table = batch.to_arrow()
    empty = [pc.equal(table.column(name), "") for name in ("prompt", "response")]
    mute = pc.and_(pc.and_(*empty), pc.greater(table.column("length"), 0)).to_numpy()
    if mute.any():
        id = table.column("id")[int(np.argmax(mute))].as_py()
        raise ValidationError(
            f"it has tokens and no text, and {format} holds text only",
            id=id,
            column="response",
            hint="decode its tokens into prompt and response first, or export as jsonl, hf or slime",
        )
