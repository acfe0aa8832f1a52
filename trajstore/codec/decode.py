"""Owns record batch → objects, and what a trajectory looks like once stored (`normalize`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajstore.codec.scalars import json_text
from trajstore.codec.versions import derived_known
from trajstore.errors import LengthMismatchError, SchemaError
from trajstore.schema import ROW_SCHEMA, TOKEN_FLOATS, TOKEN_MASKS
from trajstore.trajectory import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryStatus,
    VersionSegment,
)


def decode(batch: pa.RecordBatch) -> list[Trajectory]:
    """The trajectories of a record batch that has every column of the row; extra columns are left out.

    Raises:
        SchemaError: a column of the row is missing.
    """
    missing = [name for name in ROW_SCHEMA.names if name not in batch.schema.names]
    if missing:
        raise SchemaError(
            f"trajectories need every column of the row; {missing[0]!r} is missing",
            hint="drop columns=..., or use to_arrow() or to_polars() on a projection",
        )
    columns = {name: _python(batch.column(name)) for name in ROW_SCHEMA.names}
    return [_object(row) for row in _rows(columns, batch.num_rows)]


def _rows(columns: dict[str, list[Any]], count: int) -> Iterator[dict[str, Any]]:
    names = list(columns)
    if not count:
        return
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def _python(array: pa.Array) -> list[Any]:
    if not pa.types.is_list(array.type) or pa.types.is_struct(array.type.value_type):
        return array.to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped
    flat = array.flatten().to_numpy().tolist()
    lengths = pc.list_value_length(array).fill_null(0).to_numpy()
    ends = np.cumsum(lengths)
    valid = np.asarray(array.is_valid()).tolist()
    spans = zip((ends - lengths).tolist(), ends.tolist(), valid, strict=True)
    return [flat[start:end] if there else None for start, end, there in spans]


def _object(row: dict[str, Any]) -> Trajectory:
    tokens = row["tokens"]
    prompt, response = row["prompt_length"], row["response_length"]
    known = prompt is not None
    given: dict[str, Any] = {
        name: row[name] if row[name] is not None else [] for name in (*TOKEN_MASKS, *TOKEN_FLOATS)
    }
    given["prompt_tokens"] = _slice(row["prompt_tokens"], tokens[:prompt] if known else [])
    given["response_tokens"] = _slice(row["response_tokens"], tokens[prompt:] if known else [])
    if row["continuation_count"] is not None:
        given["continuation_prompt"] = row["continuation_prompt"] or ""
        for name in ("start_rollout_id", "continuation_count", "kv_cache_ref"):
            given[name] = row[name]
    segments = row["version_segments"] or []
    spanned = not segments and (row["version_known"] in ("span", "list"))
    return (Trajectory if row["continuation_count"] is None else PartialTrajectory)(
        tokens=tokens,
        prompt_length=prompt or 0,
        response_length=response or 0,
        version=_version(row["version_id"], row["version_timestamp"], row["version_step"]),
        version_segments=[
            VersionSegment(s["start"], s["end"], PolicyVersion(s["version_id"], s["timestamp"], s["step"]))
            for s in segments
        ],
        version_span=(row["oldest_version_id"], row["newest_version_id"]) if spanned else None,
        status=TrajectoryStatus(row["status"]),
        messages=_load(row["messages"]),
        metadata=_load(row["metadata"]),
        **{name: row[name] for name in _SAME},
        **given,
    )


_SAME = (
    *("id", "group_id", "group_size", "prompt", "response", "log_probs_version", "bootstrap_value", "reward"),
    *("version_known", "finish_reason", "terminated", "generation_time_ms", "parent_id", "source"),
    "tokens_retokenized",
)


def _slice(stored: list[int] | None, default: list[int]) -> list[int]:
    return default if stored is None else stored


def _load(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _version(number: int | None, timestamp: float | None, step: int | None) -> PolicyVersion | None:
    return None if number is None else PolicyVersion(number, timestamp or 0.0, step or 0)


def normalize(trajectory: Trajectory) -> Trajectory:
    """The trajectory as a store gives it back: plain lists, float32 values, filled and aligned.

    It fills `tokens` from the prompt's and the response's when empty, lengths left at 0 when the token
    lists make them certain, and `version_known`; it shifts response-aligned lists; values are those that
    the columns hold (float32, JSON). Idempotent.

    Raises:
        LengthMismatchError: lengths contradict the tokens, or a list fits neither tokens nor response.
    """
    t = trajectory
    prompt, response = _ints(t.prompt_tokens), _ints(t.response_tokens)
    tokens = _ints(t.tokens) or prompt + response
    n_prompt = int(t.prompt_length) or len(prompt)
    n_response = int(t.response_length) or len(response)
    known = n_prompt + n_response > 0
    if known:
        n_prompt = n_prompt or len(tokens) - n_response
        n_response = n_response or len(tokens) - n_prompt
        if n_prompt + n_response != len(tokens) or min(n_prompt, n_response) < 0:
            raise LengthMismatchError(
                f"{n_prompt} + {n_response} is not {len(tokens)}", id=t.id, column="tokens"
            )
    lists: dict[str, Any] = {}
    for name in (*TOKEN_MASKS, *TOKEN_FLOATS):
        values = _ints(getattr(t, name)) if name in TOKEN_MASKS else _floats(getattr(t, name))
        if values and len(values) != len(tokens):
            if not known or len(values) != n_response or name == "attention_mask":
                raise LengthMismatchError(
                    f"has {len(values)} values, expected {len(tokens)}", id=t.id, column=name
                )
            values = [0] * n_prompt + values if name in TOKEN_MASKS else [0.0] * n_prompt + values
        lists[name] = values
    partial: dict[str, Any] = {}
    if isinstance(t, PartialTrajectory):
        partial["continuation_prompt"] = t.continuation_prompt or ""
        partial["kv_cache_ref"] = t.kv_cache_ref if isinstance(t.kv_cache_ref, str) else None
    return replace(
        t,
        prompt_tokens=prompt,
        prompt_length=n_prompt,
        response_tokens=response,
        response_length=n_response,
        tokens=tokens,
        reward=float(t.reward),
        version=t.version and _version(t.version.version_id, t.version.timestamp, t.version.step),
        version_segments=list(t.version_segments or []),
        version_span=None if t.version_span is None else (t.version_span[0], t.version_span[1]),
        version_known=t.version_known or derived_known(t.version_segments, t.version_span, t.version),
        metadata=_canonical(t.metadata),
        messages=_canonical(t.messages),
        generation_time_ms=float(t.generation_time_ms),
        **lists,
        **partial,
    )


def _ints(values: Any) -> list[int]:
    plain = values.tolist() if hasattr(values, "tolist") else list(values or ())
    return [int(v) for v in plain]


def _floats(values: Any) -> list[float]:
    plain = values.tolist() if hasattr(values, "tolist") else list(values or ())
    return [float(np.float32(v)) for v in plain]


def _canonical(value: Any) -> Any:
    return None if value is None else json.loads(json_text(value))
