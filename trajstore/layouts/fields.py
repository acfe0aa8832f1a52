"""Owns what a batch is asked to hold: Options, and Field, one output of it; knows no rows and no layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import InputError
from trajstore.layouts.ragged import Int64s, Ragged

Missing = Literal["nan", "zero", "error"]
Side = Literal["left", "right"]
Dtypes = Literal["torch", "compact"]


@dataclass(frozen=True)
class Options:
    """How rows become a batch; every layout and every row source takes the same.

    Attributes:
        pad_token_id: what token ids hold on padding.
        missing: what a float column holds on the valid positions of a row that does not have it: NaN
            (a log-prob of 0.0 would mean probability 1), zero, or an error. Padding is padding all the same.
        extra: more per-token columns than a batch always has.
        padding_side: where the `padded` layout puts padding; the other layouts have their own rule.
        pad_to_multiple_of: padded lengths are rounded up to a multiple of this.
        max_length: longer rows are cut to so many tokens; None cuts nothing.
        truncation_side: the end of the row that is cut off.
        dtypes: "torch" gives int64 ids and masks of the dtypes in `padded`; "compact" gives int32 ids
            and positions, int8 masks: half the bytes.
        full_sequence: in `prompt_response`, per-token columns cover prompt and response, not the response.

    Raises:
        InputError: a choice is unknown, or a number is below 1.
    """

    pad_token_id: int = 0
    missing: Missing = "nan"
    extra: tuple[str, ...] = ()
    padding_side: Side = "right"
    pad_to_multiple_of: int = 1
    max_length: int | None = None
    truncation_side: Side = "right"
    dtypes: Dtypes = "torch"
    full_sequence: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", tuple(self.extra))
        for name, kind in (
            ("missing", Missing),
            ("padding_side", Side),
            ("truncation_side", Side),
            ("dtypes", Dtypes),
        ):
            if getattr(self, name) not in get_args(kind):
                expected = ", ".join(get_args(kind))
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {expected}")
        for name in ("pad_to_multiple_of", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}, expected at least 1")


class Field(NamedTuple):
    """One output of a batch: where its values come from, its dtype, and what stands where there are none.

    Attributes:
        column: B rows.
        dtype: of the output.
        fill: value on padding.
        null: value of a null row on its valid positions.
        split: [B] or None; a null row holds 0 before its token `split[i]`, and `null` from there on.
        positions: a null row counts its kept tokens 0, 1, 2, … instead of holding `null`.
        aligned: each row has one value a token, as long as the row. Otherwise the field has lengths of its
            own (null rows: 0), is padded to its own width and never cut.
    """

    column: Ragged
    dtype: np.dtype[Any]
    fill: float = 0
    null: float = 0
    split: Int64s | None = None
    positions: bool = False
    aligned: bool = True


class RowSource(Protocol):
    """Rows that any layout can lay out: trajectories, ILQL sets, Arrow tables.

    Attributes:
        ids: [N] names, for messages and for the batch itself.
        lengths: [N] int64, tokens of each row.
        prompt_lengths: [N] int64, -1 where the split into prompt and response is not known.
        keys: [N] int64 hashes of the ids; seeded orders come from them.
    """

    @property
    def ids(self) -> Any: ...
    @property
    def lengths(self) -> Int64s: ...
    @property
    def prompt_lengths(self) -> Int64s: ...
    @property
    def keys(self) -> Int64s: ...

    def take(self, rows: Int64s) -> RowSource:
        """The rows at these positions, in this order."""
        ...

    def outputs(self, options: Options) -> dict[str, Field | NDArray[Any]]:
        """What a batch of these rows holds, in order: fields, and arrays [N] with one value a row."""
        ...


@dataclass(frozen=True)
class BatchArrays:
    """A batch in one layout.

    Attributes:
        arrays: outputs by name; `max_seqlen` of a packed batch is an int.
        columns: names of those with a value a token; what else there is, is one a row, or tells the shape.
        num_tokens: tokens in it, those cut off not counted.
        size: token positions it takes, padding counted.
        cut_tokens, cut_rows: tokens that max_length cut off, and rows that lost any.
    """

    arrays: dict[str, Any]
    columns: tuple[str, ...]
    num_tokens: int
    size: int
    cut_tokens: int
    cut_rows: int

    @property
    def padding_ratio(self) -> float:
        """Padding / token positions; 0.0 when the batch is empty."""
        return 1 - self.num_tokens / self.size if self.size else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values() if isinstance(a, np.ndarray))


def dtypes_of(options: Options) -> Mapping[str, np.dtype[Any]]:
    """Dtypes by kind of column: `ids` and `positions`, `attention` masks, `mask`s of weights, `float`s."""
    return _COMPACT if options.dtypes == "compact" else _TORCH


_TORCH: Mapping[str, np.dtype[Any]] = {
    "ids": np.dtype(np.int64),
    "attention": np.dtype(np.int64),
    "mask": np.dtype(np.float32),
    "float": np.dtype(np.float32),
}
_COMPACT: Mapping[str, np.dtype[Any]] = {
    "ids": np.dtype(np.int32),
    "attention": np.dtype(np.int8),
    "mask": np.dtype(np.int8),
    "float": np.dtype(np.float32),
}
