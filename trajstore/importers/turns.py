"""Owns merging an agent's calls into sequences: (prompt ids, completion ids) a call → tokens with a mask.

A call continues the sequence that its prompt begins with; of several, the longest, else after a rollback its
tokens would land in the wrong branch. What the prompt has beyond that sequence is the environment's (mask 0).
A prompt that no sequence begins starts a new one. Ids decide, text never does: text that was decoded and
encoded again has other ids, and then is another sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.errors import ImportFormatError
from trajstore.importers.head import Format, told_by
from trajstore.importers.records import Imported, ImportOptions, Record, read_records, require_object
from trajstore.importers.rows import NOT_KNOWN, Origin, convert, rest, segments, text
from trajstore.trajectory import Trajectory, TrajectoryStatus


@dataclass(frozen=True)
class Call:
    """One call of the engine; `logprobs`, when given, and `mask` are as long as `completion`."""

    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float] | None = None
    version: int | None = None
    mask: Sequence[int] | None = None
    loss: bool = True


@dataclass
class Merged:
    """Calls that continue each other, as one sequence of T tokens; the first call's prompt is the prompt."""

    prompt_length: int
    tokens: list[int]
    action_mask: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None
    versions: list[int]
    calls: list[int] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """As fields of a Trajectory."""
        known = any(version >= 0 for version in self.versions)
        same = self.action_mask == self.loss_mask
        return {
            "tokens": self.tokens,
            "prompt_length": self.prompt_length,
            "response_length": len(self.tokens) - self.prompt_length,
            "loss_mask": self.loss_mask,
            "action_mask": [] if same else self.action_mask,
            "behavior_log_probs": [] if self.logprobs is None else self.logprobs,
            "version_segments": segments(np.asarray(self.versions)) if known else [],
        }


def merge(calls: Iterable[Call]) -> list[Merged]:
    """Sequences of calls in order; log-probs are kept where every call of a sequence has them.

    Raises:
        ValueError: a call's log-probs or mask are not as long as its completion.
    """
    sequences: list[Merged] = []
    for number, call in enumerate(calls):
        prompt, completion = list(call.prompt), list(call.completion)
        for name, given in (("log-probs", call.logprobs), ("mask", call.mask)):
            if given is not None and len(given) != len(completion):
                raise ValueError(f"call {number} has {len(given)} {name} for {len(completion)} tokens")
        fitting = [
            s for s in sequences if len(s.tokens) <= len(prompt) and s.tokens == prompt[: len(s.tokens)]
        ]
        if fitting:
            into = max(fitting, key=lambda sequence: len(sequence.tokens))
        else:
            into = Merged(len(prompt), [], [], [], [], [])
            sequences.append(into)
        gap = len(prompt) - len(into.tokens)
        sampled = [1] * len(completion) if call.mask is None else [int(one) for one in call.mask]
        version = -1 if call.version is None else call.version
        into.tokens += prompt[len(into.tokens) :] + completion
        into.action_mask += [0] * gap + sampled
        into.loss_mask += [0] * gap + (sampled if call.loss else [0] * len(completion))
        into.versions += [-1] * gap + [version if one else -1 for one in sampled]
        if call.logprobs is None or into.logprobs is None:
            into.logprobs = None
        else:
            into.logprobs += [0.0] * gap + list(call.logprobs)
        into.calls.append(number)
    return sequences


def read_steps(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """Engine calls a line, `{traj_id, step, prompt_ids, completion_ids, completion_logprobs, version}`.

    The lines of one trajectory follow each other. A step that is missing starts a new sequence only when the
    ids say so.
    """
    origin = Origin.of("agent-steps", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        lines: list[dict[str, Any]] = data
        calls = [
            Call(d["prompt_ids"], d["completion_ids"], d.get("completion_logprobs"), d.get("version"))
            for d in lines
        ]
        made = []
        name = lines[0]["traj_id"]
        for index, merged in enumerate(merge(calls)):
            own = [lines[call] for call in merged.calls]
            made.append(
                Trajectory(
                    id=origin.id(name if index == 0 else f"{name}/{index}"),
                    response=text(own[-1].get("text")),
                    reward=NOT_KNOWN,
                    status=TrajectoryStatus.COMPLETED,
                    metadata=rest({}, traj_id=name, steps=[line.get("step") for line in own]),
                    source=origin.source,
                    **merged.fields(),
                )
            )
        return made

    yield from convert(_by_trajectory(path, options), origin, options, build)


def _by_trajectory(path: Path, options: ImportOptions) -> Iterator[Record]:
    gathered: list[Any] = []
    where, end = "", 0
    for record in read_records(path, options):
        try:
            data = require_object(record)
            if "traj_id" not in data:
                raise ImportFormatError(f"{record.where}: it has no 'traj_id'", hint="name its trajectory")
        except ImportFormatError as error:
            options.fault(record.where, error, record.data)
            continue
        if gathered and data["traj_id"] != gathered[-1]["traj_id"]:
            yield Record(gathered, where, end)
            gathered = []
        where = where if gathered else record.where
        gathered.append(data)
        end = record.bytes_read
    if gathered:
        yield Record(gathered, where, end)


FORMATS = (Format("agent-steps", told_by("json", "traj_id", "prompt_ids", "completion_ids"), read_steps),)
