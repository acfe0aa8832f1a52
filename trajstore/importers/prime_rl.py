"""Owns the files of prime-rl: traces, packed micro-batches, token exports; the versions are a run's span.

A trace is a tree of nodes; a training sequence is a path from the root to a leaf. Log-probs and advantages of
a node are compact: one value for each token whose mask is true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.errors import ImportFormatError, InputError
from trajstore.importers.files import read_whole
from trajstore.importers.head import Format, Head, told_by
from trajstore.importers.records import Imported, ImportOptions, read_records
from trajstore.importers.rows import (
    NOT_KNOWN,
    Origin,
    convert,
    elements,
    rest,
    reward_fields,
    text,
    version_fields,
)  # fmt: skip
from trajstore.trajectory import Trajectory, TrajectoryStatus

_TRACE = ("id", "nodes", "rewards")
_EPISODE = ("id", "group", "traces", "ok")


def read_traces(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """Episodes, one a line: a row for every leaf of every trace."""
    origin = Origin.of("prime-rl", path, options)

    def build(episode: Any, number: int) -> list[Trajectory]:
        return [
            _row(episode, trace, leaf, count, origin)
            for trace in episode["traces"]
            for count, leaf in enumerate(_leaves(trace["nodes"]))
        ]

    yield from convert(read_records(path, options), origin, options, build)


def _leaves(nodes: list[Any]) -> list[int]:
    inner = {node.get("parent") for node in nodes}
    return [index for index in range(len(nodes)) if index not in inner]


def _path(nodes: list[Any], leaf: int) -> list[Any]:
    path: list[Any] = []
    at = leaf
    while at is not None:
        if len(path) > len(nodes):
            raise ValueError("its nodes refer to each other in a circle")
        path.append(nodes[at])
        at = nodes[at].get("parent")
    return path[::-1]


def _row(
    episode: Mapping[str, Any], trace: Mapping[str, Any], leaf: int, count: int, origin: Origin
) -> Trajectory:
    path = _path(trace["nodes"], leaf)
    mask = [bool(one) for node in path for one in node.get("mask") or ()]
    tokens = [token for node in path for token in node.get("token_ids") or ()]
    if len(mask) != len(tokens):
        raise ValueError(f"its nodes have {len(mask)} mask values for {len(tokens)} tokens")
    work = (episode.get("run") or {}).get("work") or {}
    policy = work.get("policy") or {}
    rewards = trace.get("rewards") or {}
    known = {name: float(r["score"]) * float(r.get("weight", 1.0)) for name, r in rewards.items()}
    first = mask.index(True) if True in mask else len(mask)
    messages = [node["message"] for node in path if node.get("message")]
    said = [text(m.get("content")) for m in messages if m.get("role") == "assistant"]
    before = next((i for i, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))
    return Trajectory(
        id=origin.id(trace["id"] if count == 0 else f"{trace['id']}/{count}"),
        group_id=origin.group((episode.get("group") or {}).get("id")),
        prompt=text(messages[:before]),
        response=said[-1] if said else "",
        messages=messages,
        tokens=tokens,
        prompt_length=first,
        response_length=len(tokens) - first,
        loss_mask=np.asarray(mask, np.int8),
        behavior_log_probs=_expanded(path, "logprobs", mask),
        advantages=_expanded(path, "advantages", mask),
        reward=sum(known.values()) if known else NOT_KNOWN,
        status=_status(trace),
        finish_reason=trace.get("stop_condition"),
        metadata=rest(trace, *_TRACE, episode=rest(episode, *_EPISODE), rewards=rewards or None, leaf=leaf),
        source=origin.source,
        **version_fields(policy.get("start"), policy.get("end")),
    )


def _expanded(path: list[Any], name: str, mask: list[bool]) -> Any:
    """Compact values of a path's nodes at the positions whose mask is true, else 0; [] when none has any."""
    compact = [value for node in path for value in node.get(name) or ()]
    if not compact:
        return []
    at = np.flatnonzero(mask)
    if len(at) != len(compact):
        raise ValueError(f"its nodes have {len(compact)} {name} for {len(at)} sampled tokens")
    out = np.zeros(len(mask), np.float32)
    out[at] = compact
    return out


def _status(trace: Mapping[str, Any]) -> TrajectoryStatus:
    if trace.get("errors") or trace.get("error"):
        return TrajectoryStatus.FAILED
    if trace.get("is_completed") is False or trace.get("stop_condition") == "aborted":
        return TrajectoryStatus.ABORTED
    return TrajectoryStatus.COMPLETED


_PACKED = (
    "input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids", "sequence_lengths",
    "temperatures", "env_names", "seq_lens", "ref_logprobs", "routed_experts", "mm_kwargs",
    "mm_token_type_ids", "rl_weights", "ce_weights", "ref_kl_weights",
)  # fmt: skip


def read_packed(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """`rank_N.bin`: msgpack of micro-batches, each several sequences packed into one; no text, no reward.

    Raises:
        InputError: msgspec, which decodes msgpack, is not installed.
    """
    try:
        import msgspec
    except ImportError as error:
        raise InputError(
            f"{path}: msgspec is needed to read it", hint="pip install 'trajstore[msgpack]'"
        ) from error
    try:
        batches = msgspec.msgpack.decode(read_whole(path))
    except (msgspec.MsgspecError, RecursionError, MemoryError) as error:
        raise ImportFormatError(f"{path}: not msgpack: {error}", hint="copy the file again") from error
    if not isinstance(batches, list) or not all(isinstance(b, list) and len(b) > 5 for b in batches):
        raise ImportFormatError(
            f"{path}: not prime-rl's packed batches", hint="expected lists of at least six fields"
        )
    origin = Origin.of("prime-rl-packed", path, options)

    def build(batch: Any, number: int) -> list[Trajectory]:
        named = dict(zip(_PACKED, batch, strict=False))
        total, lengths = len(named["input_ids"]), named["sequence_lengths"]
        if sum(lengths) > total:
            raise ValueError(f"its sequence_lengths add up to {sum(lengths)}, and there are {total} tokens")
        columns = {k: np.asarray(v) for k, v in named.items() if isinstance(v, list) and len(v) == total}
        names = named.get("env_names")
        made, start = [], 0
        for index, length in enumerate(lengths):
            cut = {k: v[start : start + length] for k, v in columns.items()}
            env = names[index] if isinstance(names, list) and len(names) == len(lengths) else names
            used = {"env_names", "position_ids"}
            extras = {k: v for k, v in cut.items() if k not in used}
            made.append(_aligned(extras, origin, f"{number}/{index}", {"env_name": env, **_step(path)}))
            start += length
        return made

    yield from convert(elements(path, batches, path.stat().st_size), origin, options, build)


def _step(path: Path) -> dict[str, Any]:
    name = path.parent.name
    return {"step": int(name[5:])} if name.startswith("step_") and name[5:].isdigit() else {}


def _aligned(columns: Mapping[str, Any], origin: Origin, own: str, more: Mapping[str, Any]) -> Trajectory:
    """A row from full-length columns; what has no column of ours stays in metadata."""
    tokens = columns.get("token_ids", columns.get("input_ids"))
    if tokens is None:
        raise KeyError("token_ids")
    mask = np.asarray(columns["loss_mask"], np.int8)
    first = int(mask.argmax()) if mask.any() else len(tokens)
    ours = {
        "inference_logprobs": "behavior_log_probs",
        "trainer_logprobs": "log_probs",
        "advantages": "advantages",
    }
    used = ("token_ids", "input_ids", "position_ids", "loss_mask", *ours)
    return Trajectory(
        id=origin.id(own),
        tokens=tokens,
        prompt_length=first,
        response_length=len(tokens) - first,
        loss_mask=mask,
        reward=NOT_KNOWN,
        status=TrajectoryStatus.COMPLETED,
        metadata=rest(columns, *used, **more),
        source=origin.source,
        **{mine: columns[theirs] for theirs, mine in ours.items() if columns.get(theirs) is not None},
    )


def read_tokens(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """Token exports, one sequence a line, every list full-length; no text, no reward, no version."""
    origin = Origin.of("prime-rl-tokens", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        own = f"{data.get('rank', 0)}/{data.get('export_sequence_idx', number)}"
        return [_aligned(data, origin, own, {})]

    yield from convert(read_records(path, options), origin, options, build)


def read_results(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """verifiers' `results.jsonl` and prime-rl's older rollouts; with ids where `trajectory` has them."""
    from trajstore.importers.turns import Call, merge

    origin = Origin.of("verifiers", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        steps = [step["tokens"] for step in data.get("trajectory") or () if step.get("tokens")]
        sequences = merge(
            Call(
                tokens["prompt_ids"],
                tokens["completion_ids"],
                tokens.get("completion_logprobs"),
                mask=tokens.get("completion_mask"),
            )
            for tokens in steps
        )
        prompt, completion = data["prompt"], data["completion"]
        listed = isinstance(prompt, list) or isinstance(completion, list)
        cut = data.get("is_truncated")
        common: dict[str, Any] = {
            "group_id": origin.group(data.get("example_id")),
            "prompt": text(prompt),
            "response": text(completion),
            "status": TrajectoryStatus.FAILED if data.get("error") else TrajectoryStatus.COMPLETED,
            "finish_reason": data.get("stop_condition"),
            "terminated": False if cut else None,
            "metadata": rest(data, "prompt", "completion", "reward", "trajectory"),
            "source": origin.source,
            **reward_fields(data.get("reward")),
        }
        if listed:
            common["messages"] = [
                *(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]),
                *(
                    completion
                    if isinstance(completion, list)
                    else [{"role": "assistant", "content": completion}]
                ),
            ]
        if not sequences:
            return [Trajectory(id=origin.id(number), **common)]
        return [
            Trajectory(id=origin.id(number if i == 0 else f"{number}/{i}"), **common, **merged.fields())
            for i, merged in enumerate(sequences)
        ]

    yield from convert(read_records(path, options), origin, options, build)


def _is_packed(head: Head) -> str | None:
    return "is a msgpack list" if head.container == "msgpack" else None


FORMATS = (
    Format("prime-rl", told_by("json", "traces", "env", "task"), read_traces),
    Format("prime-rl-packed", _is_packed, read_packed),
    Format("prime-rl-tokens", told_by("json", "token_ids", "inference_logprobs", "loss_mask"), read_tokens),
    Format("verifiers", told_by("json", "example_id", "prompt", "completion"), read_results),
)
