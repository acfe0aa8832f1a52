"""Owns rewarded rows as answers to prompts: text or chat messages, and groups; pairs and labels nothing.

Rows of a group answer one prompt. What cannot be used is counted by reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trajstore.errors import InputError
from trajstore.offline import flat
from trajstore.offline.flat import ArrowSource, Int64s

Form = Literal["text", "messages"]

NEEDED = ("id", "length", "prompt_length", "tokens", "reward", "prompt", "response")
OPTIONAL = ("group_id", "messages", "status")

NO_GROUP = "no group_id"
NO_SPLIT = "the split into prompt and response is not known"
NO_RESPONSE = "no response"
NO_MESSAGES = "no messages, or none of an assistant"
NOT_FINITE = "reward is not finite"
OTHER_PROMPT = "prompt differs from its group's"
DUPLICATE = "duplicate"

_PLAIN = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


@dataclass(frozen=True, eq=False)
class Answer:
    """One row.

    Attributes:
        id, group: of the row.
        prompt, response: text, None when only tokens are known; or lists of chat messages.
        reward: a finite number.
        prompt_ids, response_ids: int32 views of the row's tokens, both empty when only the text is known.
    """

    id: str
    group: str | None
    prompt: Any
    response: Any
    reward: float
    prompt_ids: NDArray[Any]
    response_ids: NDArray[Any]

    def key(self, part: Literal["prompt", "response"]) -> bytes:
        """What makes a prompt or a response the same as another one: its tokens, else its text."""
        if len(self.response_ids):
            ids = self.prompt_ids if part == "prompt" else self.response_ids
            return ids.tobytes()
        return json.dumps(self.prompt if part == "prompt" else self.response).encode()

    def upto(self, length: int) -> bytes:
        """The part of the response that a trainer keeps of so many tokens; without tokens all of it."""
        if not len(self.response_ids):
            return self.key("response")
        return self.response_ids[: max(length - len(self.prompt_ids), 0)].tobytes()

    @property
    def length(self) -> int:
        """Tokens of the response, else its characters."""
        return len(self.response_ids) or len(self.key("response"))


@dataclass(frozen=True)
class Answers:
    """Rows that can be used, in order, how they say it, and why the others cannot be used."""

    rows: list[Answer]
    form: Form
    dropped: Counter[str]


def answers(source: ArrowSource | pa.Table, *, form: Form | None, grouped: bool) -> Answers:
    """Rows as answers.

    Args:
        form: None = "messages" when every row has chat messages, else "text".
        grouped: rows without a group_id cannot be used.

    Raises:
        InputError: form is unknown.
    """
    if form is not None and form not in get_args(Form):
        raise InputError(f"form is {form!r}, expected one of {', '.join(get_args(Form))}")
    table = flat.read(source, NEEDED, OPTIONAL)
    if form is None:
        has = "messages" in table.schema.names and len(table) and not table.column("messages").null_count
        form = "messages" if has else "text"
    rows: list[Answer] = []
    dropped: Counter[str] = Counter()
    for batch in flat.blocks(table):
        tokens, offsets = flat.offsets_of(batch)
        splits = offsets[:-1] + flat.integers(batch, "prompt_length", -1)
        rewards = batch.column("reward").to_numpy()
        said = _said(batch, form)
        groups = _texts(batch, "group_id")
        unfinished = flat.unfinished(batch)
        for i, id in enumerate(batch.column("id").to_pylist()):
            reason = flat.UNFINISHED if unfinished[i] else _unusable(i, offsets, splits, said[i])
            if reason is None and not np.isfinite(rewards[i]):
                reason = NOT_FINITE
            if reason is None and grouped and groups[i] is None:
                reason = NO_GROUP
            if reason is not None:
                dropped[reason] += 1
                continue
            prompt, response = said[i] or (None, None)
            ids = tokens[offsets[i] : splits[i]], tokens[splits[i] : offsets[i + 1]]
            if offsets[i] == offsets[i + 1]:
                ids = tokens[:0], tokens[:0]
            rows.append(Answer(id, groups[i], prompt, response, float(rewards[i]), *ids))
    return Answers(rows, form, dropped)


def _unusable(i: int, offsets: Int64s, splits: Int64s, said: tuple[Any, Any] | None) -> str | None:
    if said is None:
        return NO_MESSAGES
    if offsets[i] == offsets[i + 1]:  # no tokens: the text has to say it
        return None if said[1] else NO_RESPONSE
    if splits[i] < offsets[i]:
        return NO_SPLIT
    return NO_RESPONSE if splits[i] == offsets[i + 1] else None


def _said(batch: pa.RecordBatch, form: Form) -> list[tuple[Any, Any] | None]:
    """Prompt and response of each row; None where its messages do not give them."""
    if form == "text":
        # "" beside tokens is text that is not known: a trainer that wants text must not take it for one.
        prompts, responses = (_texts(batch, name) for name in ("prompt", "response"))
        return [(a or None, b or None) for a, b in zip(prompts, responses, strict=True)]
    said: list[tuple[Any, Any] | None] = []
    columns = (_texts(batch, name) for name in ("messages", "prompt", "response"))
    for text, prompt, response in zip(*columns, strict=True):
        said.append(_parted(json.loads(text) if text else [], prompt or "", response or ""))
    return said


def _parted(messages: list[Any], prompt: str, response: str) -> tuple[list[Any], list[Any]] | None:
    """Messages of the prompt and of the response; None when nothing says what the policy said.

    The response begins with the assistant's message before which all text is the row's prompt: the turns of
    an earlier conversation are the prompt's. Messages that end before the response are the prompt, too.
    Where neither is told, the response begins where the assistant first speaks.
    """
    spoken = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    contents = [message.get("content") for message in messages]
    texts = [content if isinstance(content, str) else "" for content in contents]
    for i in spoken:
        if "\n".join(filter(None, texts[:i])) == prompt:
            return messages[:i], messages[i:]
    unsaid = response and response not in [texts[i] for i in spoken]
    if unsaid and messages and messages[-1].get("role") != "assistant":
        return messages, [{"role": "assistant", "content": response}]
    return (messages[: spoken[0]], messages[spoken[0] :]) if spoken else None


def _texts(batch: pa.RecordBatch, name: str) -> list[str | None]:
    found: list[str | None] = [None] * len(batch)
    return batch.column(name).to_pylist() if name in batch.schema.names else found


def groups(found: Answers) -> Iterator[list[Answer]]:
    """Members of each group that answer its first one's prompt, each response once; counts the others."""
    members_of: dict[str | None, list[Answer]] = {}
    for row in found.rows:
        members_of.setdefault(row.group, []).append(row)
    for members in members_of.values():
        prompt = members[0].key("prompt")
        seen: dict[bytes, Answer] = {}
        for row in members:
            if row.key("prompt") != prompt:
                found.dropped[OTHER_PROMPT] += 1
            elif row.key("response") in seen:
                found.dropped[DUPLICATE] += 1
            else:
                seen[row.key("response")] = row
        yield list(seen.values())


def column(values: Sequence[Any], form: Form) -> pa.Array:
    """Texts as strings; messages as lists of `{role, content}` with whatever further keys they have.

    Raises:
        InputError: messages are of forms that no column can hold together.
    """
    if form == "text":
        return pa.array(values, pa.string())
    messages = [message for chat in values for message in chat]
    if all(m.keys() <= {"role", "content"} and isinstance(m.get("content", ""), str) for m in messages):
        return pa.array(values, _PLAIN)
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(
            f"the chat messages differ too much to be one column: {error}",
            hint='select rows of one kind, or pass form="text"',
        ) from error
