"""Owns the conventions of staleness in use elsewhere, and the mask of stale tokens; knows no store's files.

Frameworks count from different versions and from different ends, and are off by one against each other. The
store keeps the raw versions; a convention turns a framework's own number into a gate here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trajstore.batch import TrajectoryBatch
from trajstore.errors import QueryError, ValidationError
from trajstore.selection import Fresh, GapOf, Trainable, fresh_tokens
from trajstore.selection import fresh as _fresh
from trajstore.store import Scan
from trajstore.trajectory import PolicyVersion, version_number


@dataclass(frozen=True)
class Convention:
    """How a framework counts staleness: `current + offset - version`, kept while it is at most the limit.

    Attributes:
        gap_of: which version of a trajectory counts.
        offset: what is added; 1 makes on-policy data 1 stale, -1 makes data of the step before 0 stale.
        limit: the framework's name of the limit.
        whole_groups: whether a group goes when one member is stale.
        off: a limit that switches the gate off, when there is one.
        source: where the formula was read.
    """

    gap_of: GapOf
    offset: int
    limit: str
    source: str
    whole_groups: bool = False
    off: int | None = None

    def gap(self, current_version: PolicyVersion | int, version: PolicyVersion | int) -> int:
        """Staleness of a version as the framework reports it."""
        return version_number(current_version) + self.offset - version_number(version)


CONVENTIONS: Mapping[str, Convention] = {
    "trajstore": Convention("oldest", 0, "max_staleness", "DESIGN"),
    "torchrl": Convention(
        "oldest", 0, "max_staleness", "torchrl/data/replay_buffers/samplers/staleness.py", off=-1
    ),
    "trl": Convention("start", 0, "max_staleness", "trl, async GRPO: model_version"),
    "miles": Convention(
        "oldest",
        0,
        "max_weight_staleness",
        "miles/rollout/fully_async_data_buffer.py",
        whole_groups=True,
    ),
    "torchforge": Convention("start", 0, "max_policy_age", "src/forge/actors/replay_buffer.py"),
    "verl": Convention("start", 1, "max_off_policy_threshold", "verl/trainer/ppo/v1/replay_buffer.py"),
    "verl-metric": Convention("newest", -1, "(a metric)", "verl/trainer/ppo/v1/trainer_base.py"),
    "verl-metric-worst": Convention("oldest", -1, "(a metric)", "verl/trainer/ppo/v1/trainer_base.py"),
    "prime-rl": Convention("start", -1, "max_off_policy_steps", "prime-rl orchestrator: policy.start"),
    "nemo-rl": Convention("start", 0, "max_age_steps", "nemo_rl replay buffer: start_weight"),
}
"""By name. `current` is the framework's own counter: verl's global_steps, prime-rl's step, ..."""


def fresh(
    at: PolicyVersion | int,
    max_staleness: int | Mapping[Any, int],
    *,
    gap_of: GapOf | None = None,
    by: Any = None,
    otherwise: int | None = None,
    whole_groups: bool | None = None,
    convention: str = "trajstore",
) -> Fresh:
    """The gate `version gap <= max_staleness`, in a framework's own numbers.

    Args:
        at: the trainer's policy version, or what the convention counts as the current step.
        max_staleness: largest gap that stays. A mapping gives one for each value of `by` (None for null).
        gap_of: which version of a trajectory counts: of its oldest token (the safe one, and our own
            convention), the one it was started under, of its newest token, or the mean over the tokens of
            its segments (rows of which only a span is known have none, and are dropped).
        by: with a mapping, what it goes by: a scalar column, `metadata.key`, or a polars expression.
        otherwise: with a mapping, the tolerance of values it does not name; without it they are an error.
        whole_groups: drop every row of a group when one of them is stale.
        convention: one of `CONVENTIONS`; it says gap_of and whole_groups where they are not given.

    Raises:
        QueryError: an argument is not what it can be, or the limit switches the framework's gate off.
    """
    if convention not in CONVENTIONS:
        raise QueryError(f"convention is {convention!r}, expected one of {', '.join(CONVENTIONS)}")
    rule = CONVENTIONS[convention]
    limits = [*max_staleness.values()] if isinstance(max_staleness, Mapping) else [max_staleness]
    if rule.off is not None and rule.off in limits:
        raise QueryError(
            f"{rule.limit}={rule.off} switches the gate of {convention} off", hint="leave the gate out"
        )
    return _fresh(
        version_number(at) + rule.offset,
        max_staleness,
        gap_of=gap_of or rule.gap_of,
        by=by,
        otherwise=otherwise,
        whole_groups=rule.whole_groups if whole_groups is None else whole_groups,
    )


def trainable() -> Trainable:
    """The gate for training: status completed, not superseded by a continuation, with a loss mask.

    A row has one when it was given, or when its split into prompt and response is known.
    """
    return Trainable()


def mask_stale_tokens(
    source: Scan | TrajectoryBatch, *, at: PolicyVersion | int, max_staleness: int
) -> TrajectoryBatch:
    """The rows with the loss mask set to 0 on stale tokens, so that a mixed row can still be used.

    A row whose versions have no boundaries goes by its oldest version, whole; one of unknown version is
    masked whole. A loss mask that was not given becomes explicit; nothing else changes. The result is what
    loaders and `to_tensors` take.

    Args:
        source: rows with `version_segments`, `oldest_version_id` and `loss_mask`.
        at: the trainer's policy version.
        max_staleness: largest version gap of a token that is trained on.

    Raises:
        ValidationError: a row has neither loss mask nor a known split into prompt and response.
    """
    table = source.to_arrow()
    lengths = table["length"].to_numpy().astype(np.int64)
    oldest = table["oldest_version_id"]
    fresh_ = fresh_tokens(lengths, table["version_segments"], oldest, version_number(at), max_staleness)
    mask = _loss_mask(table, lengths) * fresh_
    field = table.schema.field("loss_mask")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    column = _lists(offsets, mask, field.type)
    place = table.schema.get_field_index("loss_mask")
    return TrajectoryBatch.from_arrow(table.set_column(place, field, column))


def _loss_mask(table: pa.Table, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """[K] int8 loss mask of all tokens: the given one, else 1 after the prompt."""
    column = table["loss_mask"]
    given = np.asarray(column.is_valid())
    prompt = table["prompt_length"].fill_null(-1).to_numpy().astype(np.int64)
    unknown = ~given & (prompt < 0)
    if unknown.any():
        row = int(unknown.argmax())
        raise ValidationError(
            "has neither loss_mask nor a known split into prompt and response",
            row=row,
            id=table["id"][row].as_py(),
            column="loss_mask",
            hint="give loss_mask or prompt_length, or choose rows by trajstore.query.trainable()",
        )
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    position = np.arange(len(starts)) - starts
    mask = (position >= np.repeat(prompt, lengths)).astype(np.int8)
    mask[np.repeat(given, lengths)] = np.concatenate(
        [np.empty(0, np.int8), *(chunk.flatten().to_numpy() for chunk in column.chunks)]
    )
    return mask


def _lists(offsets: Any, values: Any, kind: pa.DataType) -> pa.ChunkedArray:
    """Lists of these values, in chunks whose int32 offsets do not overflow."""
    chunks, first = [], 0
    while first < len(offsets) - 1:
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + 2**31 - 1, side="right")) - 1)
        part = (offsets[first : last + 1] - offsets[first]).astype(np.int32)
        chunks.append(pa.ListArray.from_arrays(part, values[offsets[first] : offsets[last]], type=kind))
        first = last
    return pa.chunked_array(chunks, kind)
