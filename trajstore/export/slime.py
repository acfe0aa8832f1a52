"""Owns slime's dumps: `rollout_data/{n}.pt` with samples, `train_data/{n}.pt` with the trainer's values.

torch.load(weights_only=True) reads them: lists, numbers and text only. Per-token values are as long as the
response. `--load-debug-rollout-data FOLDER/rollout_data/{rollout_id}.pt` takes the first kind; the importer
joins the second by sample index.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trajstore.errors import ValidationError
from trajstore.export.selection import Selection
from trajstore.trajectory import Ints, Trajectory, TrajectoryStatus

HOLDS = frozenset(
    {
        *("id", "group_id", "prompt", "response", "tokens", "loss_mask", "action_mask"),
        *("behavior_log_probs", "log_probs", "values", "advantages", "returns", "reward"),
        *("version_id", "version_segments", "status", "finish_reason", "terminated", "metadata"),
    }
)

_TRAINED = ("log_probs", "values", "advantages", "returns")


def write(selection: Selection, path: Path) -> None:
    """A folder; a rollout of its own for every 1,024 rows, or fewer that are long.

    Raises:
        ValidationError: a row's split is not known, or its loss mask has ones on the prompt: slime's masks
            begin with the response.
    """
    import torch

    (path / "rollout_data").mkdir(parents=True)
    groups: dict[str, int] = {}
    index = 0
    for rollout, batch in enumerate(selection.batches()):
        samples, trained = [], []
        for trajectory in batch:
            samples.append(_sample(trajectory, index, groups, selection))
            if any(len(getattr(trajectory, name)) for name in _TRAINED):
                trained.append(_trained(trajectory, index, selection))
            index += 1
        dump: dict[str, Any] = {"rollout_id": rollout, "samples": samples}
        torch.save(dump, path / "rollout_data" / f"{rollout}.pt")
        if trained:
            (path / "train_data").mkdir(exist_ok=True)
            dump = {"format_version": 2, "rollout_id": rollout, "rank": 0, "samples": trained}
            torch.save(dump, path / "train_data" / f"{rollout}.pt")


def _sample(t: Trajectory, index: int, groups: dict[str, int], selection: Selection) -> dict[str, Any]:
    start = _response_start(t)
    mask, removed = _mask(t, start, selection)
    return {
        "group_index": None if t.group_id is None else groups.setdefault(t.group_id, len(groups)),
        "index": index,
        "prompt": t.prompt,
        "tokens": t.tokens,
        "response": t.response,
        "response_length": len(t.tokens) - start,
        "label": None,
        "reward": None if math.isnan(t.reward) else t.reward,
        "loss_mask": mask,
        "weight_versions": _versions(t),
        "rollout_log_probs": _response(t, "behavior_log_probs", start, selection) or None,
        "remove_sample": removed,
        "status": _status(t, selection),
        "metadata": t.metadata or {},
        "id": t.id,  # slime keeps what it does not know as an attribute of the sample
    }


def _response_start(t: Trajectory) -> int:
    if len(t.tokens) and not t.prompt_length and not t.response_length:
        raise ValidationError(
            "where the response begins is not known, and slime has response_length",
            id=t.id,
            column="response_length",
            hint="leave such rows out: --where 'response_length is not null'",
        )
    return t.prompt_length


def _mask(t: Trajectory, start: int, selection: Selection) -> tuple[Ints | None, bool]:
    """loss_mask and remove_sample: a sample whose loss is taken out keeps the mask of what was sampled."""
    loss, actions = t.loss_mask, t.action_mask
    if any(loss[:start]):
        raise ValidationError(
            "its loss mask has ones on the prompt, and slime's begins with the response",
            id=t.id,
            column="loss_mask",
            hint="export as jsonl or hf, or leave the row out with --where",
        )
    if len(loss) > start and len(actions) and not any(loss) and any(actions[start:]):
        return actions[start:], True
    if len(actions) and actions != (loss or [0] * start + [1] * (len(t.tokens) - start)):
        selection.lose("action_mask")
    return loss[start:] or None, False


def _response(t: Trajectory, name: str, start: int, selection: Selection) -> list[float]:
    values: list[float] = getattr(t, name)
    if any(values[:start]):  # 0.0 where nothing was given
        selection.lose(name)
    return values[start:]


def _versions(t: Trajectory) -> list[str]:
    """One entry an engine call; slime has no boundaries between them."""
    if t.version_segments:
        return [str(segment.version.version_id) for segment in t.version_segments]
    if t.version_span is not None:
        return [str(version) for version in t.version_span]
    return [] if t.version is None else [str(t.version.version_id)]


def _status(t: Trajectory, selection: Selection) -> str:
    if t.status is TrajectoryStatus.GENERATING:  # slime has no word for it
        selection.lose("status")
        return TrajectoryStatus.PENDING.value
    cut = t.status is TrajectoryStatus.COMPLETED and t.terminated is False
    return "truncated" if cut else t.status.value


def _trained(t: Trajectory, index: int, selection: Selection) -> dict[str, Any]:
    start = _response_start(t)
    given = {name: _response(t, name, start, selection) for name in _TRAINED if len(getattr(t, name))}
    return {
        "sample_index": index,
        "tokens": t.tokens,
        "response_lengths": len(t.tokens) - start,
        "total_lengths": len(t.tokens),
        **given,
    }
