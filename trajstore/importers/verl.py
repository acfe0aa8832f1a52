"""Owns verl's dumps: rollout JSON lines, gen_batch.dp in both encodings, tq_batch.pt; loads no verl or torch.

Text lines hold no ids: their policy version is not known (`step` is the trainer's). A batch has prompts
padded left, responses padded right, everything else [B, R] over the response, tool tokens inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import ImportFormatError
from trajstore.importers.files import read_whole
from trajstore.importers.head import Format, Head, told_by
from trajstore.importers.pickles import Opaque, load_pickle, load_torch
from trajstore.importers.rebuilt import Nested, widened
from trajstore.importers.records import Imported, ImportOptions, read_records
from trajstore.importers.rows import (
    NOT_KNOWN,
    Origin,
    convert,
    elements,
    grouped,
    plain,
    rest,
    reward_fields,
    text,
    version_fields,
)  # fmt: skip
from trajstore.trajectory import Trajectory, TrajectoryStatus

Array = NDArray[Any]

_FLOATS = {
    "rollout_log_probs": "behavior_log_probs",
    "old_log_probs": "log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
_SCORES = ("token_level_scores", "rm_scores")
_LAYOUT = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
    "loss_mask",
)


def read_jsonl(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """Text rollouts, `{input, output, score, step, ...}`; reward extras go to metadata.

    Newer files carry `uid` (`{uid}_{session}_{index}`); without one, rows of equal input are a group.
    """
    origin = Origin.of("verl-jsonl", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        prompt, uid = text(data["input"]), data.get("uid")
        group, how = (origin.group(_group_of(uid)), None) if uid else grouped(origin, prompt, options)
        return [
            Trajectory(
                id=origin.id(data.get("request_id") or uid or number),
                group_id=group,
                prompt=prompt,
                response=text(data["output"]),
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(data, "input", "output", "score", group_by=how),
                source=origin.source,
                **reward_fields(data["score"]),
            )
        ]

    yield from convert(read_records(path, options), origin, options, build)


def _group_of(key: str) -> str:
    """`{uid}_{session}_{index}` without its last two parts."""
    parts = key.rsplit("_", 2)
    return parts[0] if len(parts) == 3 else key


def read_dataproto(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """A pickled DataProto: `(tensors, non-tensors, meta_info)`."""
    value = load_pickle(path, read_whole(path))
    state = value.state if isinstance(value, Opaque) else None
    if not isinstance(state, tuple) or len(state) != 3:
        raise ImportFormatError(
            f"{path}: not a DataProto with tensors, non-tensors and meta_info", hint=_HINT
        )
    payload, others, meta = state
    try:
        batch = _decoded(path, payload)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ImportFormatError(
            f"{path}: its tensors are not laid out as verl does: {error}", hint=_HINT
        ) from error
    yield from _rows(path, options, "verl-dataproto", batch, others or {}, meta or {})


def read_tq(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """A TransferQueue batch: `{tensordict, tags, keys, global_steps}`, its tensors jagged."""
    value = load_torch(path, read_whole(path))
    if not isinstance(value, dict) or not isinstance(value.get("tensordict"), dict):
        raise ImportFormatError(f"{path}: it has no 'tensordict' of columns", hint=_HINT)
    keys, tags = list(value.get("keys") or ()), list(value.get("tags") or ())
    others: dict[str, Any] = {"uid": [_group_of(key) for key in keys]} if keys else {}
    if tags:
        others |= {"tag": tags}
        for name in ("min_global_steps", "max_global_steps"):
            others[name] = [tag.get(name) for tag in tags]
    meta = {"global_steps": value.get("global_steps")}
    yield from _rows(path, options, "verl-tq", value["tensordict"], others, meta, keys)


_HINT = "give the file as verl wrote it"


def _decoded(path: Path, payload: Any) -> dict[str, Any]:
    if payload is None:
        return {}
    if isinstance(payload, bytes):
        return dict(load_torch(path, payload))
    return {name: _from_bytes(*encoded) for name, encoded in (payload[2] or {}).items()}


def _from_bytes(dtype: Any, shape: Any, data: Any = None) -> Any:
    if data is None:  # nested: (layout, [(dtype, shape, data), ...])
        return Nested(_from_bytes(*one) for one in shape)
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    name = str(dtype).removeprefix("torch.")
    values: Array = widened(raw.view(np.uint16)) if name == "bfloat16" else raw.view(np.dtype(name))
    return values.reshape(shape)


def _rows(
    path: Path,
    options: ImportOptions,
    format: str,
    batch: Mapping[str, Any],
    others: Mapping[str, Any],
    meta: Mapping[str, Any],
    keys: Sequence[str] = (),
) -> Iterator[Imported]:
    if "prompts" not in batch or "responses" not in batch:
        raise ImportFormatError(f"{path}: the batch has no 'prompts' and 'responses'", hint=_HINT)
    origin = Origin.of(format, path, options)
    count = len(batch["responses"])
    for name, column in [*batch.items(), *others.items()]:
        if len(column) != count:
            raise ImportFormatError(f"{path}: {name!r} has {len(column)} rows, expected {count}", hint=_HINT)
    prompts, responses = _valid(batch)
    step = meta.get("global_steps")

    def build(_: Any, i: int) -> list[Trajectory]:
        response = responses(batch["responses"][i], i)
        given: dict[str, Any] = {
            ours: responses(batch[theirs][i], i) for theirs, ours in _FLOATS.items() if theirs in batch
        }
        mask = next((batch[name][i] for name in ("loss_mask", "response_mask") if name in batch), None)
        used = {*_LAYOUT, *_FLOATS, *_SCORES, "token_level_rewards"}
        extra = {name: _extra(column[i], responses, i) for name, column in batch.items() if name not in used}
        told = {name: column[i] for name, column in others.items()}
        uid = told.get("uid")
        return [
            Trajectory(
                id=origin.id(keys[i] if keys else i),
                group_id=origin.group(None if uid is None else str(uid)),
                prompt_tokens=prompts(batch["prompts"][i], i),
                response_tokens=response,
                loss_mask=[] if mask is None else responses(mask, i),
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(told, "uid", "min_global_steps", "max_global_steps", step=step, **plain(extra)),
                source=origin.source,
                **given,
                **_reward(batch, i, responses),
                **version_fields(told.get("min_global_steps"), told.get("max_global_steps")),
            )
        ]

    yield from convert(elements(path, range(count), path.stat().st_size), origin, options, build)


Cut = Callable[[Any, int], Array]


def _valid(batch: Mapping[str, Any]) -> tuple[Cut, Cut]:
    """Functions that cut the padding off row i of [B, P] and [B, R] columns; jagged ones have none."""
    if isinstance(batch["responses"], list):
        return (lambda row, i: np.asarray(row)), (lambda row, i: np.asarray(row))
    width, mask = batch["prompts"].shape[1], np.asarray(batch["attention_mask"]) != 0
    left, right = mask[:, :width], mask[:, width:]
    sides = []
    for side, at_end in ((left, True), (right, False)):
        lengths = side.sum(1).tolist()
        steps = np.diff(side.astype(np.int8), axis=1)
        holes = ((steps < 0) if at_end else (steps > 0)).any(1).tolist()
        sides.append(_cut(side, lengths, holes, at_end))
    return sides[0], sides[1]


def _cut(side: Array, lengths: list[int], holes: list[bool], at_end: bool) -> Cut:
    size = side.shape[1]

    def cut(row: Any, i: int) -> Array:
        if len(row) != size:
            raise ValueError(f"a column has {len(row)} values a row, expected {size}")
        if holes[i]:
            row = row[side[i]]
        elif at_end:
            row = row[size - lengths[i] :]
        else:
            row = row[: lengths[i]]
        return np.asarray(row)

    return cut


def _extra(row: Any, responses: Cut, i: int) -> Any:
    try:
        return responses(row, i)
    except (ValueError, TypeError, IndexError):  # not one value a response token
        return row


def _reward(batch: Mapping[str, Any], i: int, responses: Cut) -> dict[str, Any]:
    """The sum of the scores; they are kept a token each where they are more than one number at the end."""
    name = next((name for name in _SCORES if name in batch), None)
    tokens = None if name is None else responses(batch[name][i], i)
    reward = NOT_KNOWN if tokens is None else float(np.sum(tokens, dtype=np.float64))
    if "token_level_rewards" in batch:  # scores less the penalty: what was trained on
        tokens = responses(batch["token_level_rewards"][i], i)
    if tokens is None or not np.any(tokens[:-1]):
        return {"reward": reward}
    return {"reward": reward, "token_rewards": tokens}


def _is_dataproto(head: Head) -> str | None:
    if head.container == "pickle" and "verl.protocol.DataProto" in head.names:
        return "is a pickle of verl.protocol.DataProto"
    return None


FORMATS = (
    Format("verl-jsonl", told_by("json", "input", "output", "score", "step"), read_jsonl),
    Format("verl-dataproto", _is_dataproto, read_dataproto),
    Format("verl-tq", told_by("torch", "tensordict", "prompts", "responses"), read_tq),
)
