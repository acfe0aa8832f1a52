"""Owns NeMo-RL's dumps: train_data and val_data JSON lines, replay_buffer.pt; steps are in the file's name.

In train_data every value is a list of one element but `idx`; lists are full-length and padded right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.errors import ImportFormatError
from trajstore.importers.files import read_whole
from trajstore.importers.head import Format, Head, told_by
from trajstore.importers.pickles import load_torch
from trajstore.importers.records import Imported, ImportOptions, read_records
from trajstore.importers.rows import (
    NOT_KNOWN,
    Origin,
    conversation,
    convert,
    elements,
    grouped,
    rest,
    reward_fields,
    text,
    version_fields,
)  # fmt: skip
from trajstore.trajectory import Trajectory, TrajectoryStatus

_LISTS = {
    "advantages": "advantages",
    "generation_logprobs": "behavior_log_probs",
    "prev_logprobs": "log_probs",
}


def read_train(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """`train_data_step{N}.jsonl`. Its `filtered_rewards` come first: `rewards` are of other rows then."""
    origin = Origin.of("nemo-rl", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        one = {k: v[0] if isinstance(v, list) and len(v) == 1 else v for k, v in data.items()}
        length = int(one["input_lengths"])
        tokens = one["token_ids"][:length]
        mask = np.asarray(one["token_loss_mask"][:length], np.int8)
        if len(tokens) != length:
            raise ValueError(f"input_lengths is {length}, and there are {len(tokens)} tokens")
        first = int(mask.argmax()) if mask.any() else length
        dropped = one.get("sample_loss_mask") == 0
        content = one.get("content") or []
        group, how = grouped(origin, tokens[:first], options)
        used = ("input_lengths", "token_ids", "token_loss_mask", "content", "rewards", "filtered_rewards")
        return [
            Trajectory(
                id=origin.id(data.get("idx", number)),
                group_id=group,
                prompt=text(content[0]) if content else "",
                response=text(list(content[1:])),
                tokens=tokens,
                prompt_length=first,
                response_length=length - first,
                loss_mask=np.zeros_like(mask) if dropped else mask,
                action_mask=mask if dropped else [],
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(one, *used, *_LISTS, group_by=how, step=_step(path)),
                source=origin.source,
                **reward_fields(one.get("filtered_rewards", one.get("rewards"))),
                **{ours: one[theirs][:length] for theirs, ours in _LISTS.items() if theirs in one},
            )
        ]

    yield from convert(read_records(path, options), origin, options, build)


def read_val(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """`val_data_step{N}.jsonl`: messages and a reward."""
    origin = Origin.of("nemo-rl-val", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        talk = conversation(data["content"][0])
        group, how = grouped(origin, talk["prompt"], options)
        return [
            Trajectory(
                id=origin.id(data.get("idx", number)),
                group_id=group,
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(data, "content", "rewards", group_by=how, step=_step(path)),
                source=origin.source,
                **talk,
                **reward_fields(data["rewards"][0]),
            )
        ]

    yield from convert(read_records(path, options), origin, options, build)


def _step(path: Path) -> int | None:
    found = re.search(r"step_?(\d+)", path.name)
    return int(found[1]) if found else None


def read_buffer(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """`replay_buffer.pt` of a checkpoint: batches of message logs with ids, and the version of each batch."""
    value = load_torch(path, read_whole(path))
    if not isinstance(value, dict) or not isinstance(value.get("trajectories"), list):
        reason = "it holds groups of a TransferQueue" if isinstance(value, dict) and "groups" in value else ""
        raise ImportFormatError(f"{path}: no list of trajectories in it; {reason}", hint="not read yet")
    origin = Origin.of("nemo-rl-buffer", path, options)
    batches = value["trajectories"]
    versions = value.get("trajectory_versions") or [None] * len(batches)
    targets = value.get("target_weight_versions") or [None] * len(batches)

    def build(entry: Any, number: int) -> list[Trajectory]:
        batch = getattr(entry["batch"], "state", None) or entry["batch"]
        batch = batch.get("data", batch)  # a BatchedDataDict keeps its columns there
        return [
            _sample(batch, i, origin, number, versions[number], targets[number])
            for i in range(len(batch["message_log"]))
        ]

    yield from convert(elements(path, batches, path.stat().st_size, "trajectories"), origin, options, build)


def _sample(batch: Any, i: int, origin: Origin, number: int, version: Any, target: Any) -> Trajectory:
    log = batch["message_log"][i]
    tokens = [np.asarray(m["token_ids"]) for m in log]
    sampled = [m["role"] == "assistant" for m in log]
    mask = np.concatenate([np.full(len(t), s, np.int8) for t, s in zip(tokens, sampled, strict=True)])
    given = [m.get("generation_logprobs") for m in log]
    floats: Any = []
    if all(g is not None for g, s in zip(given, sampled, strict=True) if s):
        pairs = zip(given, tokens, strict=True)
        floats = np.concatenate([np.zeros(len(t), np.float32) if g is None else g for g, t in pairs])
    first = int(mask.argmax()) if mask.any() else len(mask)
    cut, multiplier = batch.get("truncated"), batch.get("loss_multiplier")
    dropped = multiplier is not None and float(multiplier[i]) == 0
    reward = batch.get("total_reward")
    own = {"message_log", "total_reward", "truncated"}
    extras = {k: v[i] for k, v in batch.items() if k not in own and hasattr(v, "__len__") and len(v) > i}
    index = batch["idx"][i] if "idx" in batch else None
    messages = [{k: v for k, v in m.items() if k in ("role", "content")} for m in log]
    return Trajectory(
        id=origin.id(f"{number}/{i}"),
        group_id=origin.group(None if index is None else f"{number}/{index}"),
        tokens=np.concatenate(tokens),
        prompt_length=first,
        response_length=len(mask) - first,
        loss_mask=np.zeros_like(mask) if dropped else mask,
        action_mask=mask if dropped else [],
        behavior_log_probs=floats,
        reward=NOT_KNOWN if reward is None else float(reward[i]),
        status=TrajectoryStatus.COMPLETED,
        terminated=None if cut is None else not bool(cut[i]),
        metadata=rest(extras, target_weight_version=target),
        source=origin.source,
        **conversation(messages),
        **version_fields(version),
    )


def _is_buffer(head: Head) -> str | None:
    if head.container == "torch" and head.has("trajectories", "batch", "message_log"):
        return "is a torch archive with 'trajectories' of 'message_log'"
    return None


FORMATS = (
    Format("nemo-rl", told_by("json", "token_ids", "token_loss_mask", "input_lengths"), read_train),
    Format("nemo-rl-val", told_by("json", "content", "rewards", "idx", but=("token_ids",)), read_val),
    Format("nemo-rl-buffer", _is_buffer, read_buffer),
)
