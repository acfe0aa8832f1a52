"""Owns SkyRL's dumps: the pickled training input and the evaluation's JSON lines; loads no SkyRL, no torch.

In a training input prompt and response are one block padded left, and everything else is [B, A], the last A
columns of the block. Older ones pad the prompt left and the response right; they are told apart by whether
every row's response reaches the last column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajstore.errors import ImportFormatError
from trajstore.importers.files import read_whole
from trajstore.importers.head import Format, Head, told_by
from trajstore.importers.pickles import load_pickle, load_torch
from trajstore.importers.records import Imported, ImportOptions, read_records
from trajstore.importers.rows import (
    NOT_KNOWN,
    Origin,
    convert,
    elements,
    finish_fields,
    grouped,
    rest,
    reward_fields,
    text,
)  # fmt: skip
from trajstore.trajectory import Trajectory, TrajectoryStatus

_FLOATS = {
    "rollout_logprobs": "behavior_log_probs",
    "action_log_probs": "log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
_HINT = "give dumped_data/global_step_N_training_input.pkl as SkyRL wrote it"


def read_training(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """A training input: ids, masks, log-probs and rewards; no text, no version."""
    state = load_pickle(path, read_whole(path))
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise ImportFormatError(f"{path}: it has no 'batch_dict'", hint=_HINT)
    try:
        named = {k: _values(path, v) for k, v in state["batch_dict"].items() if v is not None}
        ids, attention, responses = (named[k] for k in ("sequences", "attention_mask", "response_mask"))
    except (KeyError, TypeError, ValueError) as error:
        raise ImportFormatError(
            f"{path}: its columns are not laid out as SkyRL does: {error}", hint=_HINT
        ) from error
    block = bool(np.all(responses[:, -1] == 1))
    width = responses.shape[1]
    meta = state.get("metadata") or {}
    uids = meta.get("uids") or [None] * len(ids)
    origin = Origin.of("skyrl", path, options)
    used = {"sequences", "attention_mask", "response_mask", "loss_mask", "rewards", *_FLOATS}

    def build(_: Any, i: int) -> list[Trajectory]:
        inside = np.flatnonzero(responses[i])
        if not len(inside):
            raise ValueError("its response_mask is empty")
        here = slice(int(inside[0]), width) if block else slice(0, int(inside[-1]) + 1)
        length = here.stop - here.start
        valid = attention[i] != 0
        columns: dict[str, Any] = {k: v[i][here] for k, v in named.items() if len(v[i]) == width}
        if block:
            tokens = ids[i][valid]
        else:
            split = ids.shape[1] - width
            tokens = np.concatenate([ids[i][:split][valid[:split]], ids[i][split:][:length]])
        reward = reward_fields(columns.get("rewards"))
        if "token_rewards" in reward and not np.any(reward["token_rewards"][:-1]):
            del reward["token_rewards"]  # one number, at the end
        extras = {k: v for k, v in columns.items() if k not in used}
        return [
            Trajectory(
                id=origin.id(i),
                group_id=origin.group(None if uids[i] is None else str(uids[i])),
                tokens=tokens,
                prompt_length=len(tokens) - length,
                response_length=length,
                loss_mask=columns.get("loss_mask", columns["response_mask"]),
                status=TrajectoryStatus.COMPLETED,
                metadata=rest(extras, step=_step(path)),
                source=origin.source,
                **reward,
                **{ours: columns[theirs] for theirs, ours in _FLOATS.items() if theirs in columns},
            )
        ]

    yield from convert(elements(path, range(len(ids)), path.stat().st_size), origin, options, build)


def _values(path: Path, encoded: Any) -> Any:
    kind = encoded.get("format", "numpy" if "dtype" in encoded else "torch")
    if kind == "tensor_list":
        return [_values(path, one) for one in encoded["items"]]
    if kind == "torch":
        return load_torch(path, encoded["data"])
    dtype = np.dtype(str(encoded["dtype"]).removeprefix("torch."))
    if dtype.kind not in "biuf" or math.prod(encoded["shape"]) * dtype.itemsize != len(encoded["data"]):
        raise ValueError(f"an array of {dtype} does not hold as many bytes as it says")
    values: NDArray[Any] = np.frombuffer(encoded["data"], dtype).reshape(encoded["shape"])
    return values


def _step(path: Path) -> int | None:
    found = re.search(r"global_step_(\d+)", str(path))
    return int(found[1]) if found else None


def read_evals(path: Path, options: ImportOptions) -> Iterator[Imported]:
    """An evaluation's lines, `{input_prompt, output_response, score, stop_reason, ...}`: text only.

    A score that is a list (one number a token) is summed, and kept in metadata: there are no ids to align it.
    """
    origin = Origin.of("skyrl-evals", path, options)

    def build(data: Any, number: int) -> list[Trajectory]:
        prompt, score = text(data["input_prompt"]), data.get("score")
        reward = reward_fields(score).get("reward", NOT_KNOWN)
        group, how = grouped(origin, prompt, options)
        used = (
            "input_prompt",
            "output_response",
            "stop_reason",
            *(() if isinstance(score, list) else ("score",)),
        )
        return [
            Trajectory(
                id=origin.id(number),
                group_id=group,
                prompt=prompt,
                response=text(data["output_response"]),
                reward=reward,
                metadata=rest(data, *used, group_by=how, step=_step(path)),
                source=origin.source,
                **finish_fields(data.get("stop_reason")),
            )
        ]

    yield from convert(read_records(path, options), origin, options, build)


def _is_training(head: Head) -> str | None:
    if head.container == "pickle" and any(name.endswith("._rebuild_tensor_batch") for name in head.names):
        return "is a pickle of SkyRL's TrainingInputBatch"
    return None


FORMATS = (
    Format("skyrl", _is_training, read_training),
    Format("skyrl-evals", told_by("json", "input_prompt", "output_response"), read_evals),
)
