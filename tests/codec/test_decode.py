"""Record batch → objects, and the small list of things `normalize` does."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch

from trajstore.codec import decode, encode, normalize
from trajstore.errors import LengthMismatchError, SchemaError
from trajstore.trajectory import PartialTrajectory, PolicyVersion, Trajectory, VersionSegment


def test_a_projection_cannot_be_decoded() -> None:
    batch = encode([Trajectory()]).drop_columns(["values"])
    with pytest.raises(SchemaError, match="'values' is missing"):
        decode(batch)


def test_extra_columns_are_left_out() -> None:
    batch = encode([Trajectory(id="a")])
    assert decode(batch.append_column("entropy", pa.array([1.0]))) == decode(batch)


def test_prompt_and_response_tokens_come_from_the_slices() -> None:
    found = decode(encode([Trajectory(prompt_tokens=[1], response_tokens=[2, 3])]))[0]
    assert (found.prompt_tokens, found.response_tokens, found.tokens) == ([1], [2, 3], [1, 2, 3])


def test_a_partial_stays_a_partial() -> None:
    partial = PartialTrajectory(continuation_prompt="go on", start_rollout_id="a", continuation_count=0)
    plain, again = decode(encode([Trajectory(), partial]))
    assert type(plain) is Trajectory
    assert isinstance(again, PartialTrajectory)
    assert (again.continuation_prompt, again.start_rollout_id, again.continuation_count) == ("go on", "a", 0)


def test_versions_come_back() -> None:
    spans = [VersionSegment(0, 2, PolicyVersion(3, 0.5, 30)), VersionSegment(2, 3, PolicyVersion(4, 1.5, 40))]
    rows = [
        Trajectory(tokens=[1, 2, 3], version_segments=spans),
        Trajectory(version_span=(1, 4), version_known="list"),
        Trajectory(version=PolicyVersion(7, 2.5, 70)),
    ]
    found = decode(encode(rows))
    assert found[0].version_segments == spans
    assert [row.version_span for row in found] == [None, (1, 4), None]
    assert [row.version_known for row in found] == ["exact", "list", "exact"]
    assert [row.version for row in found] == [None, None, PolicyVersion(7, 2.5, 70)]


def test_normalize_fills_and_aligns() -> None:
    found = normalize(
        Trajectory(
            prompt_tokens=np.array([1]),
            response_tokens=torch.tensor([2, 3]),
            values=torch.tensor([0.5, 0.25], dtype=torch.bfloat16),
            loss_mask=(1, 0, 1),
            reward=1,
        )
    )
    assert found.tokens == [1, 2, 3]
    assert (found.prompt_length, found.response_length) == (1, 2)
    assert found.values == [0.0, 0.5, 0.25]
    assert found.loss_mask == [1, 0, 1]
    assert found.version_known == "absent"
    assert isinstance(found.reward, float)


def test_normalize_rounds_to_float32_and_canonical_json() -> None:
    found = normalize(Trajectory(tokens=[1], values=[0.1], metadata={"a": (1, np.float32(0.5))}))
    assert found.values == [float(np.float32(0.1))]
    assert found.metadata == {"a": [1, 0.5]}
    nan = normalize(Trajectory(metadata={"x": math.nan})).metadata
    assert nan is not None
    assert math.isnan(nan["x"])


def test_normalize_leaves_the_given_object_alone() -> None:
    given = Trajectory(prompt_tokens=[1], response_tokens=[2], metadata={"a": [1]})
    before = given.to_dict()
    normalize(given).metadata["a"].append(2)  # type: ignore[index]  # it is a dict here
    assert given.to_dict() == before
    assert given.tokens == []


@pytest.mark.parametrize(
    "given",
    [
        Trajectory(id="x", tokens=[1, 2, 3], prompt_length=2, response_length=3),
        Trajectory(id="x", tokens=[1, 2, 3], values=[1.0, 2.0]),
        Trajectory(id="x", tokens=[1, 2, 3], prompt_length=1, attention_mask=[1, 1]),
    ],
)
def test_normalize_refuses_lengths_that_contradict(given: Trajectory) -> None:
    with pytest.raises(LengthMismatchError, match="trajectory 'x', column '"):
        normalize(given)
    with pytest.raises(LengthMismatchError):
        encode([given])
