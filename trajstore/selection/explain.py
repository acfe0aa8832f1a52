"""Owns the account of what gates drop: rows and tokens by task and by length; pure, knows no scan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from trajstore.selection.draw import stratum_codes
from trajstore.selection.gates import stratum_values

if TYPE_CHECKING:
    import polars as pl

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """What a gate did to the rows of one task, or of one length bucket.

    Attributes:
        value: the task, or the bucket as (shortest, longest) length in tokens.
        rows_in, rows_out: rows before and after the gate.
        tokens_in, tokens_out: their tokens.
    """

    value: Any
    rows_in: int
    rows_out: int
    tokens_in: int
    tokens_out: int

    @property
    def dropped(self) -> int:
        """Rows the gate left out."""
        return self.rows_in - self.rows_out


@dataclass(frozen=True)
class Gate:
    """What one step of a scan did.

    Attributes:
        label: the step.
        rows_in, rows_out: rows before and after it.
        by_task, by_length: the same by task and by length bucket; empty unless asked for by `explain`.
        unknown_version: rows a staleness gate dropped because their version is not known; `explain` says it.
    """

    label: str
    rows_in: int
    rows_out: int
    by_task: tuple[Share, ...] = field(default=(), repr=False)
    by_length: tuple[Share, ...] = field(default=(), repr=False)
    unknown_version: int = 0

    @property
    def dropped(self) -> int:
        """Rows the step left out."""
        return self.rows_in - self.rows_out

    @property
    def mean_length_kept(self) -> float:
        """Tokens of a kept row on average, NaN when none was kept; a gate that drops long rows lowers it."""
        return _mean(sum(s.tokens_out for s in self.by_length), self.rows_out)

    @property
    def mean_length_dropped(self) -> float:
        """Tokens of a dropped row on average, NaN when none was dropped."""
        return _mean(sum(s.tokens_in - s.tokens_out for s in self.by_length), self.dropped)


def _mean(tokens: int, rows: int) -> float:
    return tokens / rows if rows else float("nan")


@dataclass(frozen=True)
class Explanation(Sequence[Gate]):
    """The gates of a scan in order, with what each dropped by task and by length.

    Attributes:
        gates: one for each step.
        by: what a task is: the column, or the expression's text.
    """

    gates: tuple[Gate, ...]
    by: str

    @overload
    def __getitem__(self, index: int) -> Gate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Gate]: ...
    def __getitem__(self, index: int | slice) -> Gate | Sequence[Gate]:
        return self.gates[index]

    def __len__(self) -> int:
        return len(self.gates)

    def __iter__(self) -> Iterator[Gate]:
        return iter(self.gates)

    @property
    def warnings(self) -> list[str]:
        """A sentence for each task, and each length bucket, of which a gate left nothing."""
        return [
            f"{gate.label} dropped all {share.rows_in:,} rows of {what}"
            for gate in self.gates
            for share, what in (
                *((s, f"{self.by} {s.value!r}") for s in gate.by_task),
                *((s, f"{_text(s.value)} tokens") for s in gate.by_length),
            )
            if share.rows_in and not share.rows_out
        ]

    def to_polars(self) -> pl.DataFrame:
        """One row for each gate and share: gate, part, value, rows in and out, tokens in and out.

        A part is "all", "task", "length", or "version" with the value "unknown" where a gate met such rows.
        """
        import polars as pl

        rows: list[dict[str, Any]] = []
        for number, gate in enumerate(self.gates):
            head = {"step": number, "gate": gate.label}
            rows.append({**head, "part": "all", "rows_in": gate.rows_in, "rows_out": gate.rows_out})
            if unknown := gate.unknown_version:
                of_unknown = {"part": "version", "value": "unknown", "rows_in": unknown, "rows_out": 0}
                rows.append({**head, **of_unknown})
            for part, shares in (("task", gate.by_task), ("length", gate.by_length)):
                rows += [{**head, "part": part, **vars(s), "value": _text(s.value)} for s in shares]
        schema = {
            "step": pl.Int64,
            "gate": pl.String,
            "part": pl.String,
            "value": pl.String,
            "rows_in": pl.Int64,
            "rows_out": pl.Int64,
            "tokens_in": pl.Int64,
            "tokens_out": pl.Int64,
        }
        return pl.DataFrame(rows, schema=schema)

    def __str__(self) -> str:
        lines = [] if self.gates else ["no gate: every row stays"]
        for gate in self.gates:
            lines.append(f"{gate.label}: {gate.rows_in:,} rows in, {gate.rows_out:,} out")
            if gate.dropped and gate.by_length:
                kept = f"kept {gate.mean_length_kept:.1f}, " if gate.rows_out else ""
                lines.append(f"  mean length: {kept}dropped {gate.mean_length_dropped:.1f}")
            if gate.unknown_version:
                lines.append(f"  unknown version: 0 of {gate.unknown_version:,} kept")
            for title, shares in ((self.by, gate.by_task), ("tokens", gate.by_length)):
                lines += [
                    f"  {title} {_text(s.value)}: {s.rows_out:,} of {s.rows_in:,} kept"
                    for s in shares
                    if s.dropped
                ]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def _text(value: Any) -> str | None:
    if isinstance(value, tuple):
        return bucket(value)
    return None if value is None else str(value)


def bucket(lengths: tuple[int, int]) -> str:
    """A length bucket as a person writes it: "4 to 7", or "1" where both ends are one."""
    shortest, longest = lengths
    return f"{shortest} to {longest}" if shortest < longest else str(shortest)


class Account:
    """Counts rows of a frame by task and length, gate by gate.

    Args:
        tasks: [N] the task of each row of the frame, None to leave tasks out.
        lengths: [N] tokens of each row.
    """

    def __init__(self, tasks: pl.Series | None, lengths: Int64s) -> None:
        self._lengths = lengths
        # Buckets double: 0, 1, 2 to 3, 4 to 7, ...
        buckets = np.where(lengths > 0, np.frexp(lengths.astype(np.float64))[1], 0).astype(np.int64)
        self._buckets = buckets
        self._bucket_names = {
            int(code): (0, 0) if code == 0 else (2 ** (int(code) - 1), 2 ** int(code) - 1)
            for code in np.unique(buckets)
        }
        self._codes = None if tasks is None else stratum_codes(tasks)
        self._names = {} if tasks is None or self._codes is None else stratum_values(self._codes, tasks)

    def gate(self, label: str, before: Int64s, after: Int64s, versions: pl.DataFrame | None = None) -> Gate:
        """A gate that left `after` of the frame's rows `before`, both as positions.

        Args:
            label: the gate.
            before, after: positions in the frame.
            versions: one column, what a staleness gate took for the versions of the rows `before`.
        """
        tasks = () if self._codes is None else self._shares(self._codes, self._names, before, after)
        lengths = self._shares(self._buckets, self._bucket_names, before, after)
        unknown = 0 if versions is None else versions.to_series().null_count()
        return Gate(label, len(before), len(after), tasks, lengths, unknown)

    def _shares(
        self, codes: Int64s, names: dict[int, Any], before: Int64s, after: Int64s
    ) -> tuple[Share, ...]:
        count = max(names, default=-1) + 1
        rows_in, rows_out = (np.bincount(codes[at], minlength=count) for at in (before, after))
        tokens_in, tokens_out = (
            np.bincount(codes[at], self._lengths[at], minlength=count).astype(np.int64)
            for at in (before, after)
        )
        return tuple(
            Share(value, int(rows_in[c]), int(rows_out[c]), int(tokens_in[c]), int(tokens_out[c]))
            for c, value in sorted(names.items())
            if rows_in[c]
        )
