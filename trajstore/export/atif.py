"""Owns ATIF, Harbor's agent trajectories: `{n}/agent/trajectory.json` a row, token ids in the agent's steps.

A run of sampled tokens is one call of the agent: its prompt is all that was before it. Messages become steps
when there are as many of the assistant's as there are runs (or no tokens at all); else they are kept,
verbatim, in `extra`. Reward and status have no place in ATIF and are in `extra`, too, where the importer
looks for the reward.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.errors import ValidationError
from trajstore.export.jsonl import text_of
from trajstore.export.selection import Selection
from trajstore.trajectory import Trajectory

HOLDS = frozenset(
    {
        *("id", "group_id", "prompt", "response", "messages", "tokens", "loss_mask", "action_mask"),
        *("behavior_log_probs", "reward", "status", "metadata"),
    }
)

_SOURCES = {"system": "system", "user": "user", "assistant": "agent", "developer": "system"}


def write(selection: Selection, path: Path) -> None:
    """A folder with one folder a row.

    Raises:
        ValidationError: a row's split is not known and it has no mask: no call can be told.
    """
    path.mkdir()
    number = 0
    for batch in selection.batches():
        for trajectory in batch:
            folder = path / f"{number:06d}" / "agent"
            folder.mkdir(parents=True)
            document = _document(trajectory, selection)
            (folder / "trajectory.json").write_text(text_of(document, indent=1) + "\n", encoding="utf-8")
            number += 1


def _document(t: Trajectory, selection: Selection) -> dict[str, Any]:
    calls = _calls(t, selection)
    said = [m for m in t.messages or [] if isinstance(m, dict)]
    spoken = sum(m.get("role") == "assistant" for m in said)
    extra: dict[str, Any] = {"reward": t.reward, "status": t.status.value}
    if t.group_id is not None:
        extra["group_id"] = t.group_id
    if t.metadata is not None:
        extra["metadata"] = t.metadata
    if said and len(said) == len(t.messages or ()) and (not calls or spoken == len(calls)):
        steps = _from_messages(said, calls)
    else:
        steps = _plain(t, calls)
        if t.messages is not None:
            extra["messages"] = t.messages
    return {
        "schema_version": "ATIF-v1.4",
        "session_id": t.id,
        "agent": {"name": "trajstore", "version": "unknown"},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, start=1)],
        "extra": extra,
    }


def _calls(t: Trajectory, selection: Selection) -> list[dict[str, Any]]:
    """What the agent's steps say beside their text, one for each run of sampled tokens."""
    total = len(t.tokens)
    if not total:
        return []
    actions = t.action_mask or t.loss_mask
    if not actions:
        if not t.prompt_length and not t.response_length:
            raise ValidationError(
                "it has neither a mask nor a known split, so the agent's calls cannot be told",
                id=t.id,
                column="loss_mask",
                hint="leave such rows out: --where 'response_length is not null'",
            )
        actions = [0] * t.prompt_length + [1] * (total - t.prompt_length)
    loss = t.loss_mask or actions
    edges = np.flatnonzero(np.diff(np.array([0, *actions, 0], np.int8))).tolist()
    sampled = np.zeros(total, np.bool_)
    calls = []
    for start, stop in list(pairwise(edges))[::2]:
        sampled[start:stop] = True
        metrics: dict[str, Any] = {
            "prompt_tokens": start,
            "completion_tokens": stop - start,
            "prompt_token_ids": t.tokens[:start],
            "completion_token_ids": t.tokens[start:stop],
        }
        if len(t.behavior_log_probs):
            metrics["logprobs"] = t.behavior_log_probs[start:stop]
        call: dict[str, Any] = {"metrics": metrics}
        trained = sum(loss[start:stop])
        if not trained:
            call["is_copied_context"] = True  # out of the loss
        elif trained < stop - start:
            selection.lose("loss_mask")
        calls.append(call)
    if len(t.behavior_log_probs) and np.array(t.behavior_log_probs)[~sampled].any():
        selection.lose("behavior_log_probs")
    if (edges[-1] if edges else 0) < total:  # no call comes after it, whose prompt it would be in
        selection.lose("tokens")
    return calls


def _from_messages(messages: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    left = iter(calls)
    for message in messages:
        content = message.get("content") or ""
        role = message.get("role")
        if role == "tool" and steps and steps[-1]["source"] == "agent":
            result = {"content": content}
            if message.get("tool_call_id"):
                result["source_call_id"] = message["tool_call_id"]
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        step: dict[str, Any] = {"source": _SOURCES.get(str(role), "user"), "message": content}
        if message.get("reasoning_content"):
            step["reasoning_content"] = message["reasoning_content"]
        if message.get("tool_calls"):
            step["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        if role == "assistant":
            step |= next(left, {})
        steps.append(step)
    return steps


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "tool_call_id": call.get("id"),
        "function_name": function.get("name"),
        "arguments": function.get("arguments"),
    }


def _plain(t: Trajectory, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A prompt and the agent's calls; the response's text is that of the last one."""
    steps: list[dict[str, Any]] = [{"source": "user", "message": t.prompt}]
    if not calls and t.response:
        calls = [{}]
    for number, call in enumerate(calls, start=1):
        steps.append({"source": "agent", "message": t.response if number == len(calls) else "", **call})
    return steps
