"""Owns ATIF, Harbor's agent trajectories: steps of one session, with ids where the agent recorded them.

The prompt of an agent step is the whole history, so steps that continue each other merge into one row (see
importers/turns.py). Reward and weight version are not part of the format: the reward is that of `result.json`
beside the agent's folder, or of `extra`, else not known. Copied context is masked out of the loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trajstore.importers.head import Format, Head
from trajstore.importers.records import Imported, ImportOptions, read_records
from trajstore.importers.rows import Origin, convert, rest, reward_fields, text
from trajstore.importers.turns import Call, merge
from trajstore.trajectory import Trajectory, TrajectoryStatus

_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """The rows of one session: one, unless its ids fall into several sequences."""
    origin = Origin.of("atif", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        steps = data["steps"]
        sampled = [s for s in steps if s["source"] == "agent" and (s.get("metrics") or {}).get(_IDS)]
        sequences = merge(_call(step) for step in sampled)
        messages = [message for step in steps for message in _messages(step)]
        said = [text(s.get("message")) for s in steps if s["source"] == "agent"]
        first = next((i for i, s in enumerate(steps) if s["source"] == "agent"), len(steps))
        session = data.get("session_id") or data.get("trajectory_id") or number
        reward = reward_fields(_reward(path, data))
        named = reward.pop("named", None)
        common: dict[str, Any] = {
            "prompt": text([s.get("message") for s in steps[:first]]),
            "response": said[-1] if said else "",
            "messages": messages,
            "status": TrajectoryStatus.COMPLETED,
            "metadata": rest(data, "steps", rewards=named, steps=[_kept(step) for step in steps]),
            "source": origin.source,
            **reward,
        }
        if not sequences:
            return [Trajectory(id=origin.id(session), **common)]
        return [
            Trajectory(id=origin.id(session if i == 0 else f"{session}/{i}"), **common, **merged.fields())
            for i, merged in enumerate(sequences)
        ]

    yield from convert(read_records(path, options), origin, options, build)


_IDS = "completion_token_ids"


def _call(step: Mapping[str, Any]) -> Call:
    metrics = step["metrics"]
    if "prompt_token_ids" not in metrics:
        raise ValueError(f"step {step.get('step_id')} has {_IDS} and no prompt_token_ids (ATIF before 1.4)")
    return Call(
        metrics["prompt_token_ids"],
        metrics[_IDS],
        metrics.get("logprobs"),
        loss=not step.get("is_copied_context"),
    )


def _messages(step: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    message: dict[str, Any] = {"role": _ROLES.get(step["source"], step["source"])}
    message["content"] = step.get("message") or ""
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call.get("tool_call_id"),
                "type": "function",
                "function": {"name": call["function_name"], "arguments": call.get("arguments")},
            }
            for call in step["tool_calls"]
        ]
    yield message
    for result in (step.get("observation") or {}).get("results") or ():
        seen: dict[str, Any] = {"role": "tool", "content": result.get("content") or ""}
        if result.get("source_call_id"):
            seen["tool_call_id"] = result["source_call_id"]
        yield seen


def _kept(step: Mapping[str, Any]) -> dict[str, Any]:
    """What a step holds besides its messages and ids."""
    metrics = rest(step.get("metrics") or {}, "prompt_token_ids", _IDS, "logprobs")
    used = ("message", "reasoning_content", "tool_calls", "observation", "metrics")
    return rest(step, *used, metrics=metrics or None)


def _reward(path: Path, data: Mapping[str, Any]) -> Any:
    extra = data.get("extra") or {}
    if "reward" in extra:
        return extra["reward"]
    result = path.parent.parent / "result.json"
    if path.parent.name != "agent" or not result.is_file():
        return None
    try:
        found = json.loads(result.read_text())
        verdict = found.get("verifier_result") or {}
        return verdict.get("rewards", verdict.get("reward"))
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{result}, which holds its reward, cannot be read: {error}") from error


def _is_atif(head: Head) -> str | None:
    version = head.record.get("schema_version") if isinstance(head.record, dict) else None
    if isinstance(version, str) and version.startswith("ATIF-") and head.lists("steps"):
        return f"has schema_version {version!r} and a list of 'steps'"
    return None


FORMATS = (Format("atif", _is_atif, read),)
