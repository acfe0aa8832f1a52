"""Owns where values go: which part of each row a batch keeps, and its place in an output; lengths only.

Axis letter: B rows of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajstore.layouts.fields import Options, Side
from trajstore.layouts.ragged import Int64s


@dataclass(frozen=True)
class Span:
    """The part of each row that is taken: its values `skip` to `skip + count`, [B] int64 each."""

    skip: Int64s
    count: Int64s


@dataclass(frozen=True)
class Place:
    """Where a span goes in an output.

    Attributes:
        span: the part of each row.
        at: [B] int64, flat position of the first value of each row.
        width: elements of a row of a padded output, what is not values there is padding; 0 when packed.
        shape: of the output.
    """

    span: Span
    at: Int64s
    width: int
    shape: tuple[int, ...]

    @cached_property
    def triples(self) -> list[tuple[int, int, int]]:
        """(at, skip, count) of each row, as Python numbers."""
        return list(zip(self.at.tolist(), self.span.skip.tolist(), self.span.count.tolist(), strict=True))


@dataclass(frozen=True)
class Left:
    """What the batch before left in memory that otherwise holds padding: values at `at`, `count` of each row.

    `memory` is all of it: the next batch may be smaller.
    """

    memory: NDArray[Any]
    at: Int64s
    count: Int64s


def kept(lengths: Int64s, options: Options) -> Span:
    """What `max_length` leaves of each row."""
    nothing = np.zeros(len(lengths), np.int64)
    if options.max_length is None:
        return Span(nothing, lengths)
    count = np.minimum(lengths, options.max_length)
    return Span(lengths - count if options.truncation_side == "left" else nothing, count)


def in_prompt(span: Span, prompt_lengths: Int64s) -> tuple[Span, Span]:
    """A span in two: what lies in the prompt, and what in the response."""
    prompt = np.clip(prompt_lengths - span.skip, 0, span.count)
    return Span(span.skip, prompt), Span(span.skip + prompt, span.count - prompt)


def rounded(width: int, multiple: int) -> int:
    """The next multiple, the width itself when it is one."""
    return -(-width // multiple) * multiple


def padded_place(span: Span, side: Side, multiple: int = 1) -> Place:
    """Rows of one width, [B, T]; padding on one side."""
    rows, width = len(span.count), rounded(int(span.count.max(initial=0)), multiple)
    at = np.arange(rows) * width
    if side == "left":
        at += width - span.count
    return Place(span, at, width, (rows, width))


def packed_place(span: Span) -> tuple[Place, Int64s]:
    """Rows one after the other, and their bounds, [B + 1] int64."""
    bounds = np.zeros(len(span.count) + 1, np.int64)
    np.cumsum(span.count, out=bounds[1:])
    return Place(span, bounds[:-1], 0, (int(bounds[-1]),)), bounds
