"""Owns rllm's episodes: the training log, which is text, and evaluation runs, whose steps hold ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trajstore.importers.head import Format, Head
from trajstore.importers.records import Imported, ImportOptions, read_records
from trajstore.importers.rows import (
    Origin,
    conversation,
    convert,
    listed_versions,
    rest,
    reward_fields,
    version_fields,
)  # fmt: skip
from trajstore.importers.turns import Call, Merged, merge
from trajstore.trajectory import Trajectory, TrajectoryStatus


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """One episode a file (or a line): a row for each trajectory, or each sequence that its ids fall into."""
    origin = Origin.of("rllm", path, options)

    def build(episode: Any, number: int) -> list[Trajectory]:
        return [
            row
            for index, trajectory in enumerate(episode["trajectories"])
            for row in _rows(episode, trajectory, number, index, origin)
        ]

    yield from convert(read_records(path, options), origin, options, build)


def _rows(
    episode: Mapping[str, Any], trajectory: Mapping[str, Any], number: int, index: int, origin: Origin
) -> Iterator[Trajectory]:
    steps = trajectory["steps"]
    name = episode.get("episode_id") or episode.get("id") or number
    own = f"{name}/{trajectory.get('name', index)}"
    with_ids = [step for step in steps if step.get("response_ids")]
    sequences: list[Merged | None] = [
        *merge(
            Call(step["prompt_ids"], step["response_ids"], step.get("logprobs") or None, _number(step))
            for step in with_ids
        )
    ] or [None]
    talk = (steps[-1].get("chat_completions") if steps else None) or []
    common: dict[str, Any] = {
        "group_id": origin.group(episode.get("task_hash") or episode.get("task_id")),
        "status": _status(episode),
        "finish_reason": episode.get("termination_reason"),
        "metadata": rest(
            episode,
            "trajectories",
            trajectory=rest(trajectory, "steps", "reward"),
            steps=[rest(s, *_STEP) for s in steps],
        ),
        "source": origin.source,
        **(conversation(talk) if talk else {}),
        **reward_fields(trajectory.get("reward")),
    }
    for part, merged in enumerate(sequences):
        id = origin.id(own if part == 0 else f"{own}/{part}")
        if merged is None:
            versions = listed_versions(v for s in steps if (v := s.get("weight_version")) is not None)
            yield Trajectory(id=id, **common, **versions)
        else:
            yield Trajectory(id=id, **common, **merged.fields())


_STEP = ("chat_completions", "prompt_ids", "response_ids", "logprobs", "model_response", "weight_version")


def _number(step: Mapping[str, Any]) -> int | None:
    version = version_fields(step.get("weight_version")).get("version")
    return None if version is None else version.version_id


def _status(episode: Mapping[str, Any]) -> TrajectoryStatus:
    reason = str(episode.get("termination_reason") or "").lower()
    if "error" in reason or "timeout" in reason:
        return TrajectoryStatus.FAILED
    return TrajectoryStatus.COMPLETED


def _is_episode(head: Head) -> str | None:
    if head.lists("trajectories") and (head.has("is_correct") or head.has("episode_id")):
        return "has 'is_correct' and a list of 'trajectories'"
    return None


FORMATS = (Format("rllm", _is_episode, read),)
