"""The objects users hold: the seeds' fields and methods, and dicts that lose nothing."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from trajstore.errors import ValidationError
from trajstore.trajectory import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryStatus,
    VersionSegment,
    version_number,
)

PAGE = [
    *("id", "group_id", "prompt", "prompt_tokens", "prompt_length", "response", "response_tokens"),
    *(
        "response_length",
        "tokens",
        "attention_mask",
        "loss_mask",
        "log_probs",
        "behavior_log_probs",
        "reward",
    ),
    *(
        "token_rewards",
        "values",
        "advantages",
        "returns",
        "version",
        "version_segments",
        "status",
        "metadata",
    ),
    "generation_time_ms",
]
"""The fields of the public page, in its order: positional arguments of its users keep working."""


def full(kind: type[Trajectory] = Trajectory) -> Trajectory:
    """Every field at a value that is not its default."""
    floats = {
        name: [0.5, -1.0, 2.0] for name in ("log_probs", "behavior_log_probs", "token_rewards", "values")
    }
    partial: dict[str, Any] = {}
    if kind is PartialTrajectory:
        partial = {"continuation_prompt": "ab", "start_rollout_id": "first", "continuation_count": 2}
        partial["kv_cache_ref"] = "cache"
    return kind(
        id="x",
        group_id="g",
        prompt="a",
        prompt_tokens=[1],
        prompt_length=1,
        response="b",
        response_tokens=[2, 3],
        response_length=2,
        tokens=[1, 2, 3],
        attention_mask=[1, 1, 1],
        loss_mask=[0, 1, 1],
        reward=1.5,
        advantages=[0.0, 1.0, 1.0],
        returns=[0.0, 1.5, 1.5],
        version=PolicyVersion(3, 0.5, 30),
        version_segments=[
            VersionSegment(1, 2, PolicyVersion(3)),
            VersionSegment(2, 3, PolicyVersion(4, 1.0, 40)),
        ],
        status=TrajectoryStatus.ABORTED,
        metadata={"a": [1, {"b": None}]},
        generation_time_ms=2.5,
        group_size=8,
        messages=[{"role": "user", "content": "a"}],
        action_mask=[0, 1, 1],
        bootstrap_value=0.25,
        log_probs_version=5,
        version_span=(3, 4),
        version_known="span",
        finish_reason="abort",
        terminated=False,
        parent_id="parent",
        tokens_retokenized=True,
        source="test",
        **floats,
        **partial,
    )


def test_the_fields_of_the_page_come_first() -> None:
    assert [field.name for field in fields(Trajectory)][: len(PAGE)] == PAGE


@pytest.mark.parametrize("kind", [Trajectory, PartialTrajectory])
def test_dicts_are_lossless_for_every_field(kind: type[Trajectory]) -> None:
    row, default = full(kind), kind()
    for field in fields(kind):
        assert getattr(row, field.name) != getattr(default, field.name), f"{field.name} is not exercised"
    plain = row.to_dict()
    assert set(plain) == {field.name for field in fields(kind)}
    for found in (kind.from_dict(plain), Trajectory.from_dict(json.loads(json.dumps(plain)))):
        assert type(found) is kind
        assert found == row


@pytest.mark.parametrize("kind", [Trajectory, PartialTrajectory])
def test_missing_keys_take_their_defaults(kind: type[Trajectory]) -> None:
    assert kind.from_dict({}) == kind()


@pytest.mark.parametrize(
    "key", ["continuation_prompt", "start_rollout_id", "continuation_count", "kv_cache_ref"]
)
def test_a_partials_dict_gives_a_partial(key: str) -> None:
    assert type(Trajectory.from_dict({key: None})) is PartialTrajectory


def test_arrays_and_tensors_become_lists() -> None:
    row = Trajectory(
        tokens=np.array([1, 2], np.uint16),
        loss_mask=np.array([True, False]),
        values=torch.tensor([0.1, 2.0], dtype=torch.bfloat16, requires_grad=True),
        reward=np.float32(0.5),  # type: ignore[arg-type]  # users pass them
    )
    plain = json.loads(json.dumps(row.to_dict()))
    assert plain["tokens"] == [1, 2]
    assert plain["loss_mask"] == [True, False]
    assert plain["values"] == [0.10009765625, 2.0]
    assert plain["reward"] == 0.5


def test_an_engines_cache_object_is_kept_as_it_is() -> None:
    cache = object()
    assert PartialTrajectory(kv_cache_ref=cache).to_dict()["kv_cache_ref"] is cache


def test_segments_may_be_none() -> None:
    assert Trajectory(version_segments=None).to_dict()["version_segments"] == []  # type: ignore[arg-type]  # from old pickles


@pytest.mark.parametrize(
    ("data", "column", "says"),
    [
        ({"status": "done"}, "status", "cannot be read from 'done'"),
        ({"version": "three"}, "version", "cannot be read from 'three'"),
        ({"version": {"number": 3}}, "version", "cannot be read from {'number': 3}"),
        ({"version_segments": [{"start": 1}]}, "version_segments", "cannot be read from"),
        ({"version_segments": 5}, "version_segments", "cannot be read from 5"),
        ({"version_span": [1]}, "version_span", "cannot be read from [1]"),
        ({"rewards": 1.0}, None, "unknown field 'rewards'"),
    ],
)
def test_dicts_that_are_not_a_trajectory_are_refused(data: dict[str, Any], column: Any, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Trajectory.from_dict({"id": "x"} | data)
    assert (caught.value.id, caught.value.column) == ("x", column)
    assert "trajectory 'x'" in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.hint


def test_a_version_may_be_a_number() -> None:
    assert Trajectory.from_dict({"version": 3}).version == PolicyVersion(3)
    assert Trajectory.from_dict({"version": None}).version is None


@pytest.mark.parametrize("current", [7, PolicyVersion(7)])
def test_version_gap(current: PolicyVersion | int) -> None:
    assert Trajectory(version=PolicyVersion(4)).get_version_gap(current) == 3
    assert Trajectory(version=PolicyVersion(9)).get_version_gap(current) == -2
    assert version_number(current) == 7
    with pytest.raises(ValidationError, match=r"trajectory 'x', column 'version'.* not known"):
        Trajectory(id="x").get_version_gap(current)


def test_derived_properties() -> None:
    assert Trajectory(tokens=[1, 2], prompt_tokens=[1]).total_length == 2
    assert Trajectory(prompt_tokens=np.array([1]), response_tokens=[2, 3]).total_length == 3
    assert Trajectory().total_length == 0
    assert Trajectory(status=TrajectoryStatus.COMPLETED).is_complete
    assert not Trajectory().is_complete
    one, two = (VersionSegment(i, i + 1, PolicyVersion(i)) for i in range(2))
    assert Trajectory(version_segments=[one, two]).has_version_boundaries
    assert not Trajectory(
        version_segments=[one, VersionSegment(1, 2, PolicyVersion(0))]
    ).has_version_boundaries


@pytest.mark.parametrize("status", list(TrajectoryStatus))
def test_what_can_be_continued(status: TrajectoryStatus) -> None:
    unfinished = status in (TrajectoryStatus.ABORTED, TrajectoryStatus.GENERATING)
    assert PartialTrajectory(status=status, continuation_count=2).can_continue() is unfinished
    assert not PartialTrajectory(status=status, continuation_count=3).can_continue()
    assert PartialTrajectory(status=status, continuation_count=3).can_continue(4) is unfinished


def test_prepare_continuation() -> None:
    partial = PartialTrajectory(prompt="a", response="b")
    assert partial.prepare_continuation() == partial.continuation_prompt == "ab"


def test_defaults_are_not_shared() -> None:
    Trajectory().tokens.append(1)
    assert Trajectory().tokens == []
