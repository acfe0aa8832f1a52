"""Owns the prompt_response layout: prompts padded on the left, responses on the right; knows only ids.

Axis letters: B rows of a batch, P the longest prompt of it, R the longest response.
"""

from __future__ import annotations

import numpy as np

from trajstore.errors import ValidationError
from trajstore.layouts.buffers import Buffers
from trajstore.layouts.fields import BatchArrays, Field, Options, RowSource, dtypes_of
from trajstore.layouts.padded import DEFAULTS, Outline, fields_of, finished, whole
from trajstore.layouts.place import Place, in_prompt, kept, padded_place
from trajstore.layouts.ragged import Ragged

WHOLE = ("input_ids", "attention_mask", "position_ids")
"""Columns that cover prompt and response whatever `full_sequence` says."""


def prompt_response(rows: RowSource, options: Options = DEFAULTS, out: Buffers | None = None) -> BatchArrays:
    """One batch in which every response starts in column P.

    Args: see `padded`; P and R are each rounded up to `pad_to_multiple_of`.

    Returns:
        `prompts` [B, P] and `responses` [B, R]; `input_ids`, `attention_mask` and `position_ids` [B, P + R],
        positions counting from 0 at the first token of the prompt, 0 on padding; the other per-token
        columns of `padded` [B, R], response-aligned, or [B, P + R] with `full_sequence`; the scalars [B].
        In verl's words `loss_mask` is response_mask, `log_probs` old_log_probs and
        `behavior_log_probs` rollout_log_probs; in TRL's, `prompts`, `responses` and `loss_mask` are
        prompt_ids, completion_ids and completion_mask.

    Raises:
        ValidationError: the split of a row into prompt and response is not known. As `padded` otherwise.
    """
    plan = prompt_response_outline(rows, options)
    return finished(rows, plan.outputs, plan.places, plan.span, plan.size, out)


def prompt_response_outline(rows: RowSource, options: Options = DEFAULTS) -> Outline:
    """What `prompt_response` writes, for those who write it elsewhere. Args, Raises: see there."""
    unknown = (rows.prompt_lengths < 0) & (rows.lengths > 0)
    if unknown.any():
        i = int(unknown.argmax())
        raise ValidationError(
            "the split into prompt and response is not known",
            row=i,
            id=rows.ids[i],
            column="prompt_length",
            hint="store the row with prompt_length and response_length, or take another layout",
        )
    span = kept(rows.lengths, options)
    prompt, response = in_prompt(span, rows.prompt_lengths)
    left = padded_place(prompt, "left", options.pad_to_multiple_of)
    right = padded_place(response, "right", options.pad_to_multiple_of)
    count, width = len(rows.lengths), left.width + right.width
    both = Place(span, np.arange(count) * width + left.width - prompt.count, width, (count, width))

    outputs = rows.outputs(options)
    fields = fields_of(outputs)
    places = {}
    for name, field in fields.items():
        if not field.aligned:
            places[name] = padded_place(whole(field), "right")
        else:
            places[name] = both if options.full_sequence or name in WHOLE else right
    if "input_ids" in fields:
        positions = Field(Ragged.absent(count), dtypes_of(options)["ids"], positions=True)
        outputs |= {
            "position_ids": positions,
            "prompts": fields["input_ids"],
            "responses": fields["input_ids"],
        }
        places |= {"position_ids": both, "prompts": left, "responses": right}
    return Outline(outputs, places, span, count * width)
