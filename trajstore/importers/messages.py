"""Owns files of chat messages with a reward: record → Trajectory, and ChatML tokens; knows no store.

One record is `{"messages": [...], "reward": ...}` or tau-bench's `{task_id, reward, info, traj, trial}`. The
messages are kept verbatim; what the record holds besides messages, reward, id and group goes to `metadata`.

ChatML, with a tokenizer: `<|im_start|>role\\n`, body, `<|im_end|>`, `\\n`, each encoded on its own so that
the ends of the masks are exact. The loss mask is 1 on the body and the terminator of assistant messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajstore.errors import ImportFormatError
from trajstore.importers.records import Imported, ImportOptions, Record, kind_of, read_records, require_object
from trajstore.importers.tokenizer import Tokenizer, utf8_safe
from trajstore.trajectory import Trajectory, TrajectoryStatus

MESSAGE_KEYS = ("messages", "traj", "conversation")
"""Where a record may keep its list of messages."""

_PER_TOKEN = (
    "attention_mask", "loss_mask", "action_mask", "log_probs", "behavior_log_probs", "token_rewards",
    "values", "advantages", "returns", "version_segments",
)  # fmt: skip
_GROUP_KEYS = ("group_id", "task_id", "task")
_START, _END = "<|im_start|>", "<|im_end|>"
_HINT = 'one record is {"messages": [{"role": "user", "content": "..."}, ...], "reward": 1.0}'


def read(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """The trajectories of a chat-message file, in order.

    A record without a reward, or with null for it, gets NaN: 0.0 would be invented. The status is COMPLETED,
    the policy version is not known, an absent id is left to the store.

    Raises:
        ImportFormatError: a record is not of this shape; names it, and the message's index.
    """
    for record in read_records(path, options):
        try:
            trajectory = _trajectory(record, path.name, options.tokenizer)
        except ImportFormatError as error:
            options.fault(record.where, error, record.data)
            continue
        yield Imported(trajectory, record.where, record.bytes_read)


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens; both lists are T long.

    Attributes:
        tokens: ids of the whole ChatML text.
        loss_mask: 1 on bodies and terminators of assistant messages.
        prompt_length: tokens before the first assistant body, its header included; T when there is none.
    """

    tokens: list[int]
    loss_mask: list[int]
    prompt_length: int


def render(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Rendered:
    """Checked messages as ChatML tokens."""
    start, end, newline = tokenizer.special(_START), tokenizer.special(_END), tokenizer.encode("\n")
    tokens: list[int] = []
    mask: list[int] = []
    prompt_length = None
    for message in messages:
        sampled = message["role"] == "assistant"
        tokens += start + tokenizer.encode(message["role"] + "\n")
        mask += [0] * (len(tokens) - len(mask))
        if sampled and prompt_length is None:
            prompt_length = len(tokens)
        tokens += tokenizer.encode(message_body(message)) + end
        mask += [int(sampled)] * (len(tokens) - len(mask))
        tokens += newline
        mask += [0] * len(newline)
    return Rendered(tokens, mask, len(tokens) if prompt_length is None else prompt_length)


def message_body(message: Mapping[str, Any]) -> str:
    """A checked message as ChatML shows it: its text, then one line of JSON a tool call.

    Of a call `{"id", "type", "function": {"name", "arguments"}}` the function is shown: the id is the
    engine's, no policy sampled it.
    """
    calls = list(message.get("tool_calls") or ())
    if message.get("function_call") is not None:  # the older form of one call
        calls.append(message["function_call"])
    shown = [call["function"] if isinstance(call, dict) and "function" in call else call for call in calls]
    text = message_text(message)
    return "\n".join(([text] if text else []) + [json.dumps(call, ensure_ascii=False) for call in shown])


def message_text(message: Mapping[str, Any]) -> str:
    """A checked message's text; a part that is not text is shown as its type in brackets."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)
    return content or ""


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """The list of messages, each with a role, content and tool calls that can be shown as text.

    Raises:
        ImportFormatError: one is of another form; names the record and the message's index.
    """
    if not isinstance(messages, list):
        raise ImportFormatError(
            f"{where}: the messages must be a list, found {kind_of(messages)}", hint=_HINT
        )
    for index, message in enumerate(messages):
        fault = _message_fault(message)
        if fault:
            raise ImportFormatError(f"{where}: message {index}: {fault}", hint=_HINT)
    return messages


def _message_fault(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"expected an object, found {kind_of(message)}"
    if not isinstance(message.get("role"), str):
        found = kind_of(message["role"]) if "role" in message else "no such key"
        return f"'role' must be text, found {found}"
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        return f"'tool_calls' must be a list, found {kind_of(calls)}"
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                return f"part {number} of 'content' must be an object with a text 'type'"
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                return f"part {number} of 'content' is of type text and has no text"
    elif content is not None and not isinstance(content, str):
        return f"'content' must be text, null or a list of parts, found {kind_of(content)}"
    return None


def _trajectory(record: Record, file: str, tokenizer: Tokenizer | None) -> Trajectory:
    data, where = dict(require_object(record)), record.where
    messages = check_messages(_take_messages(data, where), where)
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    texts = [message_text(message) for message in messages]
    said = [text for text, m in zip(texts, messages, strict=True) if m["role"] == "assistant" and text]
    trajectory = Trajectory(
        id=_take_label(data, ("id",), where) or "",
        group_id=_take_label(data, _GROUP_KEYS, where),
        prompt=utf8_safe("\n".join(filter(None, texts[:first]))),
        response=utf8_safe(said[-1] if said else ""),
        reward=_take_reward(data, where),
        status=TrajectoryStatus.COMPLETED,
        metadata=data,  # what was not taken
        messages=messages,
        source=f"messages:{file}",
    )
    if tokenizer is not None:
        set_tokens(trajectory, render(messages, tokenizer))
    return trajectory


def set_tokens(trajectory: Trajectory, rendered: Rendered) -> None:
    """Gives a trajectory the tokens of its rendered messages."""
    trajectory.tokens = rendered.tokens
    trajectory.loss_mask = rendered.loss_mask
    trajectory.prompt_length = rendered.prompt_length
    trajectory.response_length = len(rendered.tokens) - rendered.prompt_length
    trajectory.tokens_retokenized = True


def tokenize(trajectory: Trajectory, tokenizer: Tokenizer, where: str) -> None:
    """Gives a trajectory that has text and no tokens the ids of its messages, or of its prompt and response.

    Raises:
        ImportFormatError: it has per-token values, which new tokens would not match.
    """
    if trajectory.total_length or not (trajectory.prompt or trajectory.response or trajectory.messages):
        return
    aligned = [name for name in _PER_TOKEN if len(getattr(trajectory, name))]
    if aligned:
        raise ImportFormatError(
            f"{where}: {aligned[0]!r} belongs to tokens that the row lacks; new ones would not match it",
            hint="give the row's tokens, or import it without a tokenizer",
        )
    if trajectory.messages:
        set_tokens(trajectory, render(check_messages(trajectory.messages, where), tokenizer))
        return
    prompt, response = tokenizer.encode(trajectory.prompt), tokenizer.encode(trajectory.response)
    trajectory.tokens = prompt + response
    trajectory.prompt_length, trajectory.response_length = len(prompt), len(response)
    trajectory.tokens_retokenized = True


def _take_messages(data: dict[str, Any], where: str) -> Any:
    present = [key for key in MESSAGE_KEYS if key in data]
    lists = [key for key in present if isinstance(data[key], list)]
    if len(lists) > 1:
        raise ImportFormatError(
            f"{where}: {lists[0]!r} and {lists[1]!r} are both lists of messages", hint="keep one of them"
        )
    if not present:
        found = ", ".join(map(repr, list(data)[:8])) or "none"
        raise ImportFormatError(
            f"{where}: no messages: expected one of {', '.join(MESSAGE_KEYS)}, found keys {found}", hint=_HINT
        )
    return data.pop((lists or present)[0])


def _take_reward(data: dict[str, Any], where: str) -> float:
    reward = data.pop("reward", None)
    if reward is None:
        return math.nan
    try:
        if not isinstance(reward, bool | str):
            return float(reward)
    except (TypeError, OverflowError):
        pass
    raise ImportFormatError(
        f"{where}: 'reward' must be a number, found {kind_of(reward)}",
        hint="give a number that a float can hold, or leave the key out when the reward is not known",
    )


def _take_label(data: dict[str, Any], keys: Sequence[str], where: str) -> str | None:
    """The first of the keys that holds text or an integer, as text; others stay where they are."""
    for key in keys:
        value = data.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool):
            label = str(data.pop(key))
            if label != utf8_safe(label):
                raise ImportFormatError(
                    f"{where}: {key!r} holds half of a surrogate pair, which UTF-8 cannot store",
                    hint="write the text again; it was cut inside a character",
                )
            return label
    return None
