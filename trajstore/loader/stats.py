"""Owns the accounting of batches: tokens, padding, bytes, waiting; knows not how they are made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """What some batches were, one or all of a loader's.

    Attributes:
        batches, rows: how many.
        tokens: tokens in them, those cut off not counted.
        size: token positions they took, padding counted.
        cut_tokens, cut_rows: tokens that max_length cut off, and rows that lost any.
        bytes_moved: bytes written into batches, or copied to the device.
        wait_seconds: time in which the consumer waited for a batch.
        cache_hits, cache_decoded: columns of data files that the column cache had, and had not.
    """

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    size: int = 0
    cut_tokens: int = 0
    cut_rows: int = 0
    bytes_moved: int = 0
    wait_seconds: float = 0.0
    cache_hits: int = 0
    cache_decoded: int = 0

    @property
    def padding_ratio(self) -> float:
        """Padding / token positions; 0.0 when there are none."""
        return 1 - self.tokens / self.size if self.size else 0.0

    def __add__(self, other: Stats) -> Stats:
        return Stats(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __str__(self) -> str:
        cut = f", {self.cut_tokens:,} tokens of {self.cut_rows:,} rows cut off" if self.cut_rows else ""
        return (
            f"{self.batches:,} batches, {self.rows:,} rows, {self.tokens:,} tokens, "
            f"padding {self.padding_ratio:.1%}{cut}, {self.bytes_moved / 1e6:,.1f} MB moved, "
            f"cache {self.cache_hits} hits {self.cache_decoded} decoded, waited {self.wait_seconds:.2f} s"
        )
