"""Owns open-instruct's rollout shards: prompt and response ids, log-probs, one advantage a row; no text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trajstore.importers.head import Format, told_by
from trajstore.importers.records import Imported, ImportOptions, read_records
from trajstore.importers.rows import Origin, convert, finish_fields, rest, reward_fields, spread
from trajstore.trajectory import Trajectory

_TAKEN = ("prompt_tokens", "response_tokens", "reward", "advantage", "finish_reason", "logprobs")


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """`{run}_rollouts_{shard}.jsonl`; a group is a prompt within a step. The version is not in it."""
    origin = Origin.of("open-instruct", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        advantage = spread(data.get("advantage"), len(data["response_tokens"]))
        return [
            Trajectory(
                id=origin.id(f"{data['step']}/{data['sample_idx']}"),
                group_id=origin.group(f"{data['step']}/{data['prompt_idx']}"),
                prompt_tokens=data["prompt_tokens"],
                response_tokens=data["response_tokens"],
                behavior_log_probs=data.get("logprobs") or [],
                advantages=[] if advantage is None else advantage,
                metadata=rest(data, *_TAKEN),
                source=origin.source,
                **reward_fields(data.get("reward")),
                **finish_fields(data.get("finish_reason")),
            )
        ]

    yield from convert(read_records(path, options), origin, options, build)


FORMATS = (Format("open-instruct", told_by("json", "prompt_tokens", "response_tokens", "prompt_idx"), read),)
