"""Owns the way from ragged rows to arrays and tensors: the one definition of padding; no store.

Row sources (`Rows`, `Lists`) say which fields a batch has; `padded`, `packed`, `nested` and
`prompt_response` say where their values go; the kernel moves them. torch is imported when called.
"""

from trajstore.layouts.buffers import Buffers
from trajstore.layouts.fields import BatchArrays, Dtypes, Field, Missing, Options, RowSource, Side
from trajstore.layouts.kernels import kernel
from trajstore.layouts.packed import nested, packed
from trajstore.layouts.padded import Outline, padded, padded_outline, padding_ratio
from trajstore.layouts.prompt_response import prompt_response, prompt_response_outline
from trajstore.layouts.ragged import Ragged
from trajstore.layouts.rows import (
    ON_REQUEST,
    READ,
    SCALARS,
    TENSORS,
    UNKNOWN_VERSION,
    Lists,
    Rows,
    group_codes,
)
from trajstore.layouts.tensors import to_nested, to_torch

LAYOUTS = {"padded": padded, "packed": packed, "nested": nested, "prompt_response": prompt_response}
"""The layouts by name; each takes (rows, options, out) and gives BatchArrays."""

OUTLINES = {"padded": padded_outline, "prompt_response": prompt_response_outline}
"""The padded layouts before they write anything; each takes (rows, options)."""

__all__ = [
    "LAYOUTS",
    "ON_REQUEST",
    "OUTLINES",
    "READ",
    "SCALARS",
    "TENSORS",
    "UNKNOWN_VERSION",
    "BatchArrays",
    "Buffers",
    "Dtypes",
    "Field",
    "Lists",
    "Missing",
    "Options",
    "Outline",
    "Ragged",
    "RowSource",
    "Rows",
    "Side",
    "group_codes",
    "kernel",
    "nested",
    "packed",
    "padded",
    "padding_ratio",
    "prompt_response",
    "to_nested",
    "to_torch",
]
