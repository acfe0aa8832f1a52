"""Owns the packed layout: rows one after the other with cu_seqlens; knows no columns but the loss mask.

Axis letters: B rows of a batch, S the tokens of all of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trajstore.errors import InputError
from trajstore.layouts.buffers import Buffers
from trajstore.layouts.fields import BatchArrays, Field, Options, RowSource, dtypes_of
from trajstore.layouts.padded import DEFAULTS, fields_of, finished, whole
from trajstore.layouts.place import kept, packed_place, rounded
from trajstore.layouts.ragged import Int64s, Ragged

_MOST = np.iinfo(np.int32).max


def packed(rows: RowSource, options: Options = DEFAULTS, out: Buffers | None = None) -> BatchArrays:
    """One packed batch, as flash_attn_varlen and flex_attention take it.

    Args, Raises: see `padded`.

    Returns:
        The per-token columns of `padded`, flat, [S]; `position_ids` [S], which count from 0 in each row;
        `cu_seqlens` [B + 1] int32, the bounds of the rows; `max_seqlen`, an int; the scalars [B]. The
        loss mask is zero at each row's first token: nothing in the row predicts it, and the row before
        must not. With `pad_to_multiple_of`, S is rounded up and the padding is one row more in cu_seqlens,
        [B + 2], be it empty. A column with lengths of its own has `<name>_cu_seqlens` and
        `<name>_max_seqlen`.
    """
    outputs = rows.outputs(options) | {"position_ids": _positions(rows, options)}
    fields = fields_of(outputs)
    span = kept(rows.lengths, options)
    place, bounds = packed_place(span)
    size = rounded(place.shape[0], options.pad_to_multiple_of)
    place = replace(place, shape=(size,))
    places, own = {}, {}
    for name, field in fields.items():
        places[name] = place
        if not field.aligned:
            places[name], own[f"{name}_"] = packed_place(whole(field))
    own[""] = np.append(bounds, size) if options.pad_to_multiple_of > 1 else bounds
    shape = {f"{prefix}cu_seqlens": _int32(ends) for prefix, ends in own.items()}
    batch = finished(rows, outputs, places, span, size, out)
    if size > bounds[-1]:
        for name, field in fields.items():
            if field.aligned:
                batch.arrays[name][bounds[-1] :] = field.fill
    batch.arrays.update(shape)
    for prefix, ends in own.items():
        batch.arrays[f"{prefix}max_seqlen"] = int((ends[1:] - ends[:-1]).max(initial=0))
    if "loss_mask" in fields:
        batch.arrays["loss_mask"][bounds[:-1][span.count > 0]] = 0
    return batch


def nested(rows: RowSource, options: Options = DEFAULTS, out: Buffers | None = None) -> BatchArrays:
    """The arrays of `packed`, which `to_torch` hands out as jagged NestedTensors over the same memory.

    Raises:
        InputError: pad_to_multiple_of is set; a nested tensor has no padding. As `padded` otherwise.
    """
    if options.pad_to_multiple_of > 1:
        raise InputError("pad_to_multiple_of has no meaning in the nested layout", hint="leave it at 1")
    return packed(rows, options, out)


def _positions(rows: RowSource, options: Options) -> Field:
    return Field(Ragged.absent(len(rows.lengths)), dtypes_of(options)["ids"], positions=True)


def _int32(bounds: Int64s) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if bounds[-1] > _MOST:
        raise InputError(
            f"a packed batch of {bounds[-1]} tokens is beyond cu_seqlens, which is int32",
            hint="make smaller batches, or bound them with max_tokens=",
        )
    return bounds.astype(np.int32)
