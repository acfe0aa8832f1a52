"""Owns the dumps of slime and miles: rollouts, what the trainer made of them, and miles' side files.

`rollout_data/{id}.pt` holds samples; `train_data/{id}.pt` (or `{id}_{rank}.pt`) beside it is joined by sample
index, so that one row has the engine's log-probs and the trainer's. Per-token values are as long as the
response. An entry of `weight_versions` is one call of the engine, without boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trajstore.errors import ImportFormatError
from trajstore.importers.files import read_whole
from trajstore.importers.head import Format, Head, told_by
from trajstore.importers.pickles import load_torch
from trajstore.importers.records import Imported, ImportOptions, read_records, require_object
from trajstore.importers.rows import (
    NOT_KNOWN,
    Origin,
    chat,
    convert,
    elements,
    listed_versions,
    plain,
    rest,
    reward_fields,
    spread,
    status_fields,
    text,
)  # fmt: skip
from trajstore.importers.tables import read_parquet
from trajstore.trajectory import Trajectory, TrajectoryStatus

_TAKEN = (
    "group_index", "index", "prompt", "tokens", "response", "response_length", "reward", "loss_mask",
    "weight_versions", "rollout_log_probs", "status",
)  # fmt: skip
_TRAINED = {"log_probs": "log_probs", "values": "values", "advantages": "advantages", "returns": "returns"}
_HINT = "give the file as --save-debug-rollout-data or --dump-details wrote it"


def read_rollouts(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """A rollout dump, `{rollout_id, samples}` by torch.save or JSON; the train dump beside it is joined."""
    dump = _load(path)
    samples = dump.get("samples")
    if not isinstance(samples, list):
        raise ImportFormatError(f"{path}: its 'samples' are not a list", hint=_HINT)
    origin = Origin.of("slime", path, options)
    trained = _trained_beside(path)
    step = dump.get("rollout_id")
    step = path.stem if step is None else step  # evaluation files are eval_{id}

    def build(data: Any, number: int) -> list[Trajectory]:
        index = data.get("index")
        return [_sample(data, trained.get(index, {}), origin, step, number if index is None else index)]

    records = elements(path, samples, path.stat().st_size, "samples")
    yield from convert(records, origin, options, build)


def _sample(
    data: Mapping[str, Any], trained: Mapping[str, Any], origin: Origin, step: Any, own: Any
) -> Trajectory:
    length, tokens = int(data["response_length"]), data["tokens"]
    if not 0 <= length <= len(tokens):
        raise ValueError(f"response_length is {length}, and there are {len(tokens)} tokens")
    reward = reward_fields(data.get("reward"))
    named = reward.pop("named", None)
    mask = data.get("loss_mask")
    actions: Any = []
    if data.get("remove_sample"):  # the trainer takes its loss out; the tokens were sampled all the same
        actions, mask = np.ones(length, np.int8) if mask is None else mask, np.zeros(length, np.int8)
    group = data.get("group_index")
    return Trajectory(
        id=origin.id(own),
        group_id=origin.group(group),
        prompt=text(data.get("prompt")),
        response=text(data.get("response")),
        tokens=tokens,
        prompt_length=len(tokens) - length,
        response_length=length,
        loss_mask=[] if mask is None else mask,
        action_mask=actions,
        behavior_log_probs=_or_empty(data.get("rollout_log_probs")),
        messages=chat(data.get("prompt"), text(data.get("response"))),
        metadata=rest(data, *_TAKEN, step=step, rewards=named, trained=_extras(trained)),
        source=origin.source,
        **reward,
        **status_fields(data.get("status", "completed")),
        **listed_versions(data.get("weight_versions")),
        **{ours: spread(trained[theirs], length) for theirs, ours in _TRAINED.items() if theirs in trained},
    )


def _or_empty(values: Any) -> Any:
    return [] if values is None else values


def _extras(trained: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the train dump says of a sample that no column holds, like its normalised reward."""
    known = {*_TRAINED, "tokens", "response_lengths", "total_lengths", "loss_masks", "rollout_log_probs"}
    known |= {"sample_index", "sample_indices"}
    found = {key: value for key, value in trained.items() if key not in known and value is not None}
    return plain(found) if found else None


def _load(path: Path) -> dict[str, Any]:
    data = read_whole(path)
    zipped = bytes(data[:2]) == b"PK"
    value = load_torch(path, data) if zipped else require_object(next(read_records(path)))
    if not isinstance(value, dict):
        raise ImportFormatError(f"{path}: it holds no dict", hint=_HINT)
    return value


def train_files(path: Path) -> list[Path]:
    """The train dumps that belong to a rollout dump, in order of their ranks."""
    folder = path.parent.parent / "train_data"
    if path.parent.name != "rollout_data" or not folder.is_dir():
        return []
    own = folder / path.name
    ranks = [file for file in folder.glob("*.pt") if file.stem.rpartition("_")[0] == path.stem]
    return [own] if own.is_file() else sorted(ranks)


def _trained_beside(path: Path) -> dict[Any, Mapping[str, Any]]:
    trained: dict[Any, Mapping[str, Any]] = {}
    for file in train_files(path):
        for index, row in _train_rows(file, _load(file)):
            trained.setdefault(index, row)  # tensor-parallel ranks write the same rows again
    return trained


def _train_rows(path: Path, dump: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Sample index and values of each row of a train dump, in either form.

    Raises:
        ImportFormatError: its log-probs are spread over context-parallel ranks.
    """
    if int(dump.get("cp_size") or 1) > 1:
        raise ImportFormatError(
            f"{path}: written with cp_size {dump['cp_size']}: its values are spread zig-zag over ranks",
            hint="import the rollout dump alone, or dump with context parallelism off",
        )
    if isinstance(dump.get("samples"), list):
        for number, row in enumerate(dump["samples"]):
            yield row.get("sample_index", number), row
        return
    columns = dump.get("rollout_data")
    if not isinstance(columns, dict) or "tokens" not in columns:
        raise ImportFormatError(f"{path}: it has neither 'samples' nor 'rollout_data'", hint=_HINT)
    count = len(columns["tokens"])
    # raw_reward counts the whole batch, not this rank's part of it
    rows = {
        k: v for k, v in columns.items() if k != "raw_reward" and hasattr(v, "__len__") and len(v) == count
    }
    for number in range(count):
        row = {key: values[number] for key, values in rows.items()}
        yield row.get("sample_indices", number), row


def read_train(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """A train dump without its rollouts: no text, no versions; its normalised rewards are in metadata."""
    dump = _load(path)
    origin = Origin.of("slime-train", path, options)
    rows = list(_train_rows(path, dump))

    def build(item: Any, number: int) -> list[Trajectory]:
        index, row = item
        length, tokens = int(row["response_lengths"]), row["tokens"]
        cut = row.get("truncated")
        return [
            Trajectory(
                id=origin.id(index),
                tokens=tokens,
                prompt_length=len(tokens) - length,
                response_length=length,
                loss_mask=_or_empty(row.get("loss_masks")),
                behavior_log_probs=_or_empty(row.get("rollout_log_probs")),
                reward=NOT_KNOWN,
                status=TrajectoryStatus.COMPLETED,
                terminated=None if cut is None else not bool(cut),
                metadata=rest(_extras(row) or {}, step=dump.get("rollout_id")),
                source=origin.source,
                **{ours: spread(row[theirs], length) for theirs, ours in _TRAINED.items() if theirs in row},
            )
        ]

    yield from convert(elements(path, rows, path.stat().st_size, "samples"), origin, options, build)


def read_columns(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """miles' `dashboard_columns/rollout_{id}.parquet`: tokens, masks and log-probs; no reward, no version."""
    origin = Origin.of("miles-columns", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        length = int(data["response_length"])
        return [
            Trajectory(
                id=origin.id(data["sample_index"]),
                tokens=data["tokens"],
                prompt_length=len(data["tokens"]) - length,
                response_length=length,
                loss_mask=_or_empty(data.get("loss_mask")),
                behavior_log_probs=_or_empty(data.get("rollout_log_probs")),
                reward=NOT_KNOWN,
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(
                    data, "response_length", "total_length", "tokens", "loss_mask", "rollout_log_probs"
                ),
                source=origin.source,
            )
        ]

    yield from convert(read_parquet(path), origin, options, build)


def read_texts(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """miles' `trajectory/{id}.jsonl`: text, messages, reward and status of each sample; no tokens."""
    origin = Origin.of("miles-trajectory", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        said = data.get("messages") or []
        reward = reward_fields(data.get("reward"))
        named = reward.pop("named", None)
        return [
            Trajectory(
                id=origin.id(data["sample_index"]),
                group_id=origin.group(data.get("group_index")),
                prompt=text(data.get("prompt")),
                response=text(said),
                messages=chat(data.get("prompt"), said),
                metadata=rest(
                    data,
                    "group_index",
                    "prompt",
                    "messages",
                    "reward",
                    "status",
                    rewards=named,
                    step=path.stem,
                ),
                source=origin.source,
                **reward,
                **status_fields(data.get("status", "completed")),
            )
        ]

    yield from convert(read_records(path, options), origin, options, build)


def _is_rollouts(head: Head) -> str | None:
    if head.container == "torch" and head.has("samples", "response_length", "tokens"):
        return "is a torch archive with 'samples' that have 'response_length' and 'tokens'"
    if head.container == "json" and head.lists("samples") and head.has("rollout_id"):
        return "has 'rollout_id' and a list of 'samples'"
    return None


def _is_train(head: Head) -> str | None:
    if head.container == "torch" and head.has("response_lengths", "total_lengths"):
        return "is a torch archive with 'response_lengths' and 'total_lengths'"
    return None


FORMATS = (
    Format("slime", _is_rollouts, read_rollouts),
    Format("slime-train", _is_train, read_train),
    Format(
        "miles-columns", told_by("parquet", "sample_index", "response_length", "total_length"), read_columns
    ),
    Format("miles-trajectory", told_by("json", "sample_index", "group_index", "messages"), read_texts),
)
