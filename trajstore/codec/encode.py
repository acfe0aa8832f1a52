"""Owns objects → record batch: filling, aligning and laying out; must not judge values (check.py does).

Each column is built from all rows at once. T_i is the number of tokens of row i; flat arrays hold the rows
one after another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.codec.check import check
from trajstore.codec.flat import FLOATS, IDS, MASK, Flat, Nulls, flatten, shorten
from trajstore.codec.scalars import Scalars
from trajstore.codec.versions import version_columns
from trajstore.errors import LengthMismatchError, ValidationError
from trajstore.schema import BY_NAME, ROW_SCHEMA, TOKEN_FLOATS, TOKEN_MASKS
from trajstore.trajectory import PartialTrajectory, Trajectory

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Fields = dict[str, Sequence[Any]]

INT32_OFFSETS = 2**31 - 1


def encode(trajectories: Sequence[Trajectory], *, nulls: Nulls = "error") -> pa.RecordBatch:
    """Trajectories as one record batch of `schema.ROW_SCHEMA`, checked.

    Args:
        trajectories: N objects; per-token fields are lists, numpy arrays or torch tensors.
        nulls: "nan" turns None inside a list of floats into NaN; otherwise it is an error.

    Raises:
        LengthMismatchError: a per-token list is as long as neither `tokens` nor the response.
        ValidationError: a value breaks the contract of the row.
    """
    rows = list(trajectories)
    fields = _fields(rows)
    ids = [i if isinstance(i, str) else repr(i) for i in fields["id"]]
    scalars = Scalars(ids)
    split, arrays = _split_and_tokens(fields, ids, scalars)
    shifted: dict[str, Bools] = {}
    for name in (*TOKEN_MASKS, *TOKEN_FLOATS):
        kind = MASK if name in TOKEN_MASKS else FLOATS
        flat = flatten(fields[name], kind, name, ids, nulls)
        arrays[name], shifted[name] = _align(flat, split, name, ids)
    for name in ("log_probs", "behavior_log_probs"):
        _refuse_loss_on_prompt(name, shifted[name], arrays["loss_mask"], split, ids)
    arrays |= version_columns(fields, scalars)
    arrays |= _plain_columns(fields, ids, scalars)
    arrays |= _partial_columns(rows, scalars)
    batch = pa.record_batch([arrays[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)
    check(batch)
    return batch


def id_hashes(ids: Sequence[str]) -> pa.Array:
    """First 8 bytes of blake2b of each id as little-endian int64."""
    blake2b = hashlib.blake2b
    digests = b"".join([blake2b(i.encode(), digest_size=8).digest() for i in ids])
    return pa.array(np.frombuffer(digests, np.dtype("<i8")))


def cache_refs_left_out(trajectories: Sequence[Trajectory]) -> int:
    """How many of them hold an object in `kv_cache_ref` that is not a string, so that no row can keep it."""
    kinds = set(map(type, trajectories))
    if not any(issubclass(kind, PartialTrajectory) for kind in kinds):
        return 0
    refs = (t.kv_cache_ref for t in trajectories if isinstance(t, PartialTrajectory))
    return sum(not isinstance(ref, str | None) for ref in refs)


def warn_cache_refs(count: int, stacklevel: int = 3) -> None:
    """Warns that so many were left out, once for all of them."""
    if count:
        warnings.warn(
            f"kv_cache_ref of {count} partial trajectories is not a string and is left out: "
            "it means nothing after a restart",
            stacklevel=stacklevel,
        )


def _fields(rows: Sequence[Trajectory]) -> Fields:
    """Field by field, in blocks of rows that stay in the processor's cache while they are turned over."""
    columns: list[list[Any]] = [[] for _ in _NAMES]
    read = attrgetter(*_NAMES)
    try:
        for start in range(0, len(rows), _BLOCK):
            turned = zip(*map(read, rows[start : start + _BLOCK]), strict=True)
            for column, values in zip(columns, turned, strict=True):
                column.extend(values)
    except AttributeError:
        for i, row in enumerate(rows):
            if not isinstance(row, Trajectory):
                reason = f"found {shorten(row)}, expected a Trajectory"
                raise ValidationError(reason, row=i, hint="Trajectory.from_dict(...) reads dicts") from None
        raise
    return dict(zip(_NAMES, columns, strict=True))


_NAMES = tuple(field.name for field in dataclasses.fields(Trajectory))
_BLOCK = 256


class _Split:
    """Tokens of the prompt, the response and the whole of each row, [N] int64, and whether they are known."""

    def __init__(self, total: Int64s, prompt: Int64s, response: Int64s, known: Bools) -> None:
        self.total = total
        self.prompt = prompt
        self.response = response
        self.known = known
        self.offsets = _offsets(total)
        self.no_empty_row = bool(total.all())


def _split_and_tokens(f: Fields, ids: Sequence[str], scalars: Scalars) -> tuple[_Split, dict[str, pa.Array]]:
    tokens = flatten(f["tokens"], IDS, "tokens", ids)
    prompts = flatten(f["prompt_tokens"], IDS, "prompt_tokens", ids)
    responses = flatten(f["response_tokens"], IDS, "response_tokens", ids)
    joined = (tokens.lengths == 0) & (prompts.lengths + responses.lengths > 0)
    total = np.where(joined, prompts.lengths + responses.lengths, tokens.lengths)
    prompt = scalars.integers("prompt_length", f["prompt_length"])
    response = scalars.integers("response_length", f["response_length"])
    negative = (prompt < 0) | (response < 0)
    if negative.any():
        i = int(negative.argmax())
        name = "prompt_length" if prompt[i] < 0 else "response_length"
        scalars.refuse(i, name, f"found {f[name][i]}, expected a number of tokens", "0 means not known")
    prompt = np.where(prompt == 0, prompts.lengths, prompt)
    response = np.where(response == 0, responses.lengths, response)
    known = (prompt + response > 0) | (total == 0)
    prompt = np.where(known & (prompt == 0), total - response, prompt)
    response = np.where(known & (response == 0), total - prompt, response)
    wrong = known & ((prompt + response != total) | (prompt < 0) | (response < 0))
    if wrong.any():
        i = int(wrong.argmax())
        raise LengthMismatchError(
            f"prompt_length {prompt[i]} + response_length {response[i]} is not the {total[i]} of tokens",
            row=i,
            id=ids[i],
            column="tokens",
            hint="give both lengths so that they add up, or neither when the split is not known",
        )
    if int(total.sum()) > INT32_OFFSETS:
        raise ValidationError(
            f"{total.sum()} tokens do not fit one record batch", hint="encode fewer trajectories at a time"
        )
    flat = _fill(tokens, prompts, responses, joined, total)
    split = _Split(total, prompt, response, known)
    starts = np.cumsum(total) - total
    unknown = None if known.all() else ~known
    return split, {
        "tokens": _list_array(flat, split.offsets, None, "tokens"),
        "length": pa.array(total.astype(np.int32)),
        "prompt_length": pa.array(prompt.astype(np.int32), mask=unknown),
        "response_length": pa.array(response.astype(np.int32), mask=unknown),
        "prompt_tokens": _verbatim(prompts, flat, starts, prompt, "prompt_tokens"),
        "response_tokens": _verbatim(responses, flat, starts + prompt, response, "response_tokens"),
    }


def _fill(tokens: Flat, prompts: Flat, responses: Flat, joined: Bools, total: Int64s) -> NDArray[np.int32]:
    """Flat tokens, where rows that came without take their prompt's and then their response's."""
    if not joined.any():
        return tokens.values
    out = np.empty(int(total.sum()), np.int32)
    starts = np.cumsum(total) - total
    _scatter(out, starts, tokens, ~joined)
    _scatter(out, starts, prompts, joined)
    _scatter(out, starts + prompts.lengths, responses, joined)
    return out


def _scatter(out: NDArray[Any], targets: Int64s, rows: Flat, chosen: Bools) -> None:
    """Copies the chosen rows to `out[targets[i] : targets[i] + lengths[i]]`."""
    if chosen.all() and len(rows.values) == len(out):
        out[:] = rows.values
        return
    taken = rows.values if chosen.all() else rows.values[np.repeat(chosen, rows.lengths)]
    lengths = rows.lengths[chosen]
    starts = np.cumsum(lengths) - lengths
    out[np.repeat(targets[chosen] - starts, lengths) + np.arange(len(taken))] = taken


def _verbatim(given: Flat, tokens: NDArray[np.int32], starts: Int64s, lengths: Int64s, name: str) -> pa.Array:
    """Null where the given ids are the slice `tokens[starts : starts + lengths]`, else the ids themselves."""
    same = given.lengths == lengths
    if not len(given.values):
        return _list_array(given.values, np.zeros(len(lengths) + 1, np.int32), same, name)
    compared = np.repeat(same, given.lengths)
    if compared.any():
        shift = np.repeat((starts - given.starts), given.lengths)
        position = np.arange(len(given.values))
        equal = np.ones(len(given.values), bool)
        equal[compared] = given.values[compared] == tokens[(shift + position)[compared]]
        if not equal.all():
            same &= ~_any_per_row(~equal, given.lengths)
    kept = given.values if not same.any() else given.values[np.repeat(~same, given.lengths)]
    return _list_array(kept, _offsets(np.where(same, 0, given.lengths)), same, name)


def _align(flat: Flat, split: _Split, name: str, ids: Sequence[str]) -> tuple[pa.Array, Bools]:
    """A per-token column as long as `tokens`, and which rows were given response-aligned."""
    given = flat.lengths > 0
    if not len(flat.values):
        return pa.nulls(len(given), BY_NAME[name].type), given
    if split.no_empty_row and np.array_equal(flat.lengths, split.total):
        return _list_array(flat.values, split.offsets, None, name), ~given
    full = given & (flat.lengths == split.total)
    shifted = given & ~full & split.known & (flat.lengths == split.response)
    if name == "attention_mask":
        shifted = np.zeros_like(shifted)
    wrong = given & ~full & ~shifted
    if wrong.any():
        i = int(wrong.argmax())
        response = (
            f" or {split.response[i]} (response)" if split.known[i] and name != "attention_mask" else ""
        )
        raise LengthMismatchError(
            f"has {flat.lengths[i]} values, expected {split.total[i]} (tokens){response}",
            row=i,
            id=ids[i],
            column=name,
            hint="index t belongs to token t: align the list with tokens, or give response values only",
        )
    lengths = np.where(given, split.total, 0)
    values = flat.values
    if shifted.any():
        values = np.zeros(int(lengths.sum()), flat.values.dtype)
        targets = np.cumsum(lengths) - lengths + np.where(shifted, split.prompt, 0)
        _scatter(values, targets, flat, np.ones_like(given))
    return _list_array(values, _offsets(lengths), ~given, name), shifted


def _refuse_loss_on_prompt(
    name: str, shifted: Bools, loss_mask: pa.Array, split: _Split, ids: Sequence[str]
) -> None:
    if not shifted.any() or loss_mask.null_count == len(shifted):
        return
    masked = shifted & np.asarray(loss_mask.is_valid())
    ones = np.concatenate([[0], np.cumsum(loss_mask.values.to_numpy(), dtype=np.int64)])
    starts = loss_mask.offsets.to_numpy()[:-1].astype(np.int64)
    on_prompt = masked & (ones[starts + np.where(masked, split.prompt, 0)] > ones[starts])
    if on_prompt.any():
        i = int(on_prompt.argmax())
        raise ValidationError(
            "is given for the response only, but loss_mask has ones on the prompt",
            row=i,
            id=ids[i],
            column=name,
            hint="give log-probs for every token of tokens, or mask the prompt out of the loss",
        )


def _plain_columns(f: Fields, ids: Sequence[str], s: Scalars) -> dict[str, pa.Array]:
    arrays = {name: s.strings(name, f[name]) for name in _TEXT}
    arrays |= {name: s.nullable_ints(name, f[name]) for name in ("group_size", "log_probs_version")}
    arrays |= {name: s.floats(name, f[name]) for name in ("bootstrap_value", "reward", "generation_time_ms")}
    arrays |= {name: s.bools(name, f[name]) for name in ("terminated", "tokens_retokenized")}
    arrays |= {name: s.json(name, f[name]) for name in ("messages", "metadata")}
    return arrays | {"id_hash": id_hashes(ids), "status": s.statuses(f["status"])}


_TEXT = ("id", "group_id", "prompt", "response", "finish_reason", "parent_id", "source")


def _partial_columns(ts: Sequence[Trajectory], s: Scalars) -> dict[str, pa.Array]:
    if not any(issubclass(kind, PartialTrajectory) for kind in set(map(type, ts))):
        return {name: pa.nulls(len(ts), BY_NAME[name].type) for name in _PARTIAL}
    partial = [t if isinstance(t, PartialTrajectory) else None for t in ts]
    for i, p in enumerate(partial):
        if p is not None and p.continuation_count is None:
            s.refuse(i, "continuation_count", "found None, expected a number", "0 = not yet continued")
    warn_cache_refs(cache_refs_left_out(ts), stacklevel=4)
    caches = [p and p.kv_cache_ref for p in partial]
    return {
        "continuation_prompt": s.strings(
            "continuation_prompt", [p and p.continuation_prompt for p in partial]
        ),
        "start_rollout_id": s.strings("start_rollout_id", [p and p.start_rollout_id for p in partial]),
        "kv_cache_ref": s.strings("kv_cache_ref", [c if isinstance(c, str) else None for c in caches]),
        "continuation_count": s.nullable_ints(
            "continuation_count", [p and p.continuation_count for p in partial]
        ),
    }


_PARTIAL = ("continuation_prompt", "start_rollout_id", "kv_cache_ref", "continuation_count")


def _offsets(lengths: Int64s) -> NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _list_array(values: Any, offsets: NDArray[np.int32], null: Bools | None, name: str) -> pa.ListArray:
    mask = None if null is None or not null.any() else pa.array(null)
    return pa.ListArray.from_arrays(offsets, values, type=BY_NAME[name].type, mask=mask)


def _any_per_row(flags: Bools, lengths: Int64s) -> Bools:
    ends = np.cumsum(lengths)
    total = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    return total[ends] > total[ends - lengths]  # type: ignore[no-any-return]  # numpy comparison
