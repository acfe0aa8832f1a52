"""Owns the shapes of Hugging Face and TRL datasets that hold responses: preferences, ShareGPT, HH, labels.

They are text (or ids) without log-probs, and without a reward: a preference is no number, so `metadata` says
`chosen` or `rejected` and the reward is NaN unless the file gives one. The two of a pair are one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trajstore.importers.head import Format, Head, told_by
from trajstore.importers.records import Imported, ImportOptions
from trajstore.importers.rows import (
    NOT_KNOWN,
    Origin,
    chat,
    conversation,
    convert,
    grouped,
    rest,
    reward_fields,
    text,
)  # fmt: skip
from trajstore.importers.tables import read_rows
from trajstore.trajectory import Trajectory, TrajectoryStatus

_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_call": "assistant", "function_response": "tool",
}  # fmt: skip
_TURN = "\n\nAssistant:"


def read_preference(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """Pairs, `{prompt?, chosen, rejected}` as text, messages or ids: two rows each, in one group."""
    origin = Origin.of("preference", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        return [_side(data, side, number, origin) for side in ("chosen", "rejected")]

    yield from convert(read_rows(path, options), origin, options, build)


def _side(data: Mapping[str, Any], side: str, number: int, origin: Origin) -> Trajectory:
    prompt, answer, ids = data.get("prompt"), data.get(side), data.get(f"{side}_ids")
    if answer is None and ids is None:
        raise ValueError(f"it has no {side!r}")
    row = Trajectory(
        id=origin.id(f"{number}/{side}"),
        group_id=origin.id(number),
        group_size=2,
        status=TrajectoryStatus.COMPLETED,
        metadata=rest(data, *_PAIR, preference=side),
        source=origin.source,
        **reward_fields(data.get(f"{side}_reward", data.get(f"score_{side}"))),
    )
    if ids is not None:
        row.prompt_tokens, row.response_tokens = data["prompt_ids"], ids
    if isinstance(answer, str) and prompt is None:  # HH: the dialogue is in the answer, up to its last turn
        head, mark, tail = answer.rpartition(_TURN)
        row.prompt, row.response = text(head + mark), text(tail if mark else answer)
        row.response = row.response.removeprefix(" ")
    elif isinstance(answer, list) and prompt is None:
        row.messages = conversation(answer)["messages"]
        row.prompt, row.response = text(answer[:-1]), text(answer[-1:])
    else:
        row.prompt, row.response = text(prompt), text(answer)
        row.messages = chat(prompt, answer)
    return row


_PAIR = (
    "prompt", "chosen", "rejected", "prompt_ids", "chosen_ids", "rejected_ids", "chosen_reward",
    "rejected_reward", "score_chosen", "score_rejected",
)  # fmt: skip


def read_sharegpt(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """ShareGPT, `{conversations: [{from, value}]}`."""
    origin = Origin.of("sharegpt", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        messages = []
        for index, turn in enumerate(data["conversations"]):
            speaker = str(turn["from"])
            if speaker not in _SPEAKERS:
                raise ValueError(f"turn {index} is from {speaker!r}, which is no speaker of ShareGPT")
            messages.append({"role": _SPEAKERS[speaker], "content": turn["value"]})
        if data.get("system"):
            messages.insert(0, {"role": "system", "content": data["system"]})
        return [
            Trajectory(
                id=origin.id(data.get("id", number)),
                reward=NOT_KNOWN,
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(data, "conversations", "system", "id"),
                source=origin.source,
                **conversation(messages),
            )
        ]

    yield from convert(read_rows(path, options), origin, options, build)


def read_completion(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """`{prompt, completion, label?}`, and steps `{prompt, completions, labels}` joined to one response.

    Labels (of a completion, or one a step) are judgements, not rewards: they are in metadata.
    """
    origin = Origin.of("completion", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        steps = data.get("completions")
        answer = data["completion"] if steps is None else "\n".join(map(text, steps))
        prompt = text(data["prompt"])
        group, how = grouped(origin, prompt, options)
        return [
            Trajectory(
                id=origin.id(number),
                group_id=group,
                prompt=prompt,
                response=text(answer),
                messages=chat(data["prompt"], answer),
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(data, "prompt", "completion", "reward", group_by=how),
                source=origin.source,
                **reward_fields(data.get("reward")),
            )
        ]

    yield from convert(read_rows(path, options), origin, options, build)


def _is_preference(head: Head) -> str | None:
    for pair in (("chosen", "rejected"), ("chosen_ids", "rejected_ids")):
        if head.container in ("json", "parquet") and head.has(*pair):
            return f"has {pair[0]!r} and {pair[1]!r}"
    return None


def _is_completion(head: Head) -> str | None:
    for names in (("prompt", "completions", "labels"), ("prompt", "completion")):
        if head.container in ("json", "parquet") and head.has(*names):
            return f"has {', '.join(map(repr, names))}"
    return None


FORMATS = (
    Format("preference", _is_preference, read_preference),
    Format("sharegpt", told_by("json", "conversations"), read_sharegpt),
    Format("completion", _is_completion, read_completion),
)
