"""Continuing a generation that was cut off: tokens, log-probs, masks, versions and lineage stay exact."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trajstore import (
    LengthMismatchError,
    PartialTrajectory,
    PolicyVersion,
    TrajectoryStatus,
    ValidationError,
    VersionSegment,
)
from trajstore.codec import decode, encode, normalize

ABORTED = TrajectoryStatus.ABORTED
NAN = math.nan


def partial(**given: Any) -> PartialTrajectory:
    fields: dict[str, Any] = {
        "id": "first",
        "group_id": "g",
        "prompt": "2+2",
        "prompt_tokens": [1, 2],
        "response": "is",
        "response_tokens": [3, 4, 5],
        "behavior_log_probs": [-1.0, -2.0, -3.0],
        "version": PolicyVersion(2, 20.0, 200),
        "status": ABORTED,
        "kv_cache_ref": object(),
    }
    return PartialTrajectory(**fields | given)


def spans(row: PartialTrajectory) -> list[tuple[int, int, int]]:
    return [(s.start, s.end, s.version.version_id) for s in row.version_segments]


def test_a_continuation_appends_and_says_whence_it_comes() -> None:
    first = partial()
    again = first.continue_with([6, 7], [-4.0, -5.0], 4, response=" fo", status=ABORTED, kv_cache_ref="c")
    done = again.continue_with([8], [-6.0], PolicyVersion(6), response="ur", finish_reason="stop")
    assert (again.response, done.response) == ("is fo", "is four")
    assert done.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
    assert done.response_tokens == [3, 4, 5, 6, 7, 8]
    assert (done.prompt_length, done.response_length) == (2, 6)
    assert done.behavior_log_probs == [-1, -2, -3, -4, -5, -6]
    assert done.version_segments[0] == VersionSegment(2, 5, PolicyVersion(2, 20.0, 200))
    assert spans(done) == [(2, 5, 2), (5, 7, 4), (7, 8, 6)]
    assert done.version == PolicyVersion(2, 20.0, 200)
    assert done.has_version_boundaries
    assert [t.continuation_count for t in (first, again, done)] == [0, 1, 2]
    assert len({first.id, again.id, done.id}) == 3
    assert (again.parent_id, done.parent_id) == ("first", again.id)
    assert again.start_rollout_id == done.start_rollout_id == "first"
    assert (again.status, done.status) == (ABORTED, TrajectoryStatus.COMPLETED)
    assert (again.kv_cache_ref, done.kv_cache_ref, done.finish_reason) == ("c", None, "stop")
    assert done.group_id == "g"
    (back,) = decode(encode([done]))
    assert back == normalize(done)
    assert back.behavior_log_probs == [0, 0, -1, -2, -3, -4, -5, -6]
    # The parent is as it was.
    assert first.tokens == []
    assert first.response_tokens == [3, 4, 5]


@pytest.mark.parametrize("box", [np.array, torch.tensor])
def test_arrays_and_tensors_are_taken(box: Any) -> None:
    first = partial(response_tokens=box([3, 4, 5]), behavior_log_probs=box([-1.0, -2.0, -3.0]))
    after = first.continue_with(box([6]), box([-4.0]), 4)
    assert after.tokens == [1, 2, 3, 4, 5, 6]
    assert after.behavior_log_probs == [-1, -2, -3, -4]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([0, 0, 0], [0, 0, 0, 1, 1]),
        ([0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("name", ["loss_mask", "action_mask"])
def test_masks_grow_as_they_are_aligned(name: str, given: list[int], expected: list[int]) -> None:
    after = partial(**{name: given}).continue_with([6, 7], [-4.0, -5.0], 4)
    assert getattr(after, name) == expected
    assert encode([after]).num_rows == 1


def test_attention_mask_is_full_length_only() -> None:
    after = partial(attention_mask=[1] * 5).continue_with([6], [-4.0], 4)
    assert after.attention_mask == [1] * 6
    with pytest.raises(LengthMismatchError, match=r"'attention_mask': has 3 values, expected 5"):
        partial(attention_mask=[1] * 3).continue_with([6], [-4.0], 4)


def test_log_probs_that_one_part_lacks_are_nan() -> None:
    engine = partial(behavior_log_probs=[]).continue_with([6], [-4.0], 4)
    np.testing.assert_array_equal(engine.behavior_log_probs, [NAN, NAN, NAN, -4])
    none = partial().continue_with([6], None, 4)
    np.testing.assert_array_equal(none.behavior_log_probs, [-1, -2, -3, NAN])
    full = partial(behavior_log_probs=[0.0, 0.0, -1.0, -2.0, -3.0]).continue_with([6], [-4.0], 4)
    assert full.behavior_log_probs == [0, 0, -1, -2, -3, -4]
    assert partial(behavior_log_probs=[]).continue_with([6], None, 4).behavior_log_probs == []


def test_what_the_shorter_response_led_to_is_not_carried_over() -> None:
    first = partial(
        reward=1.0,
        log_probs=[-1.0] * 3,
        log_probs_version=3,
        values=[0.5] * 3,
        advantages=[0.5] * 3,
        returns=[0.5] * 3,
        token_rewards=[0.5] * 3,
        bootstrap_value=2.0,
    )
    after = first.continue_with([6], [-4.0], 4)
    for name in ("log_probs", "values", "advantages", "returns", "token_rewards"):
        assert getattr(after, name) == []
    assert (after.reward, after.bootstrap_value, after.log_probs_version) == (0.0, None, None)


def test_nothing_was_sampled_yet() -> None:
    first = partial(response="", response_tokens=[], behavior_log_probs=[], version=None)
    after = first.continue_with([3, 4], [-1.0, -2.0], 5)
    assert spans(after) == [(2, 4, 5)]
    assert after.version == PolicyVersion(5)
    assert normalize(after).behavior_log_probs == [0, 0, -1, -2]
    still = first.continue_with([], [], None, status=ABORTED)
    assert (still.version, still.version_segments, still.tokens) == (None, [], [1, 2])


def test_no_new_token_leaves_no_segment() -> None:
    after = partial().continue_with([], [], 9, status=ABORTED)
    assert spans(after) == [(2, 5, 2)]
    assert (after.version, after.continuation_count) == (PolicyVersion(2, 20.0, 200), 1)


def test_a_version_that_is_not_known_makes_the_row_unknown() -> None:
    for after in (
        partial().continue_with([6], [-4.0], None),
        partial(version=None).continue_with([6], [-4.0], 4),
    ):
        assert (after.version, after.version_segments) == (None, [])
        assert encode([after]).column("version_known").to_pylist() == ["absent"]
    span = partial(version_span=(1, 3), version_known="list").continue_with([6], [-4.0], 7)
    batch = encode([span])
    assert batch.column("oldest_version_id").to_pylist() == [1]
    assert batch.column("newest_version_id").to_pylist() == [7]
    assert batch.column("version_known").to_pylist() == ["list"]


def test_tool_tokens_belong_to_no_segment() -> None:
    after = partial(action_mask=[1, 0, 1]).continue_with([6], [-4.0], 4)
    assert spans(after) == [(2, 3, 2), (4, 5, 2), (5, 6, 4)]


def test_only_what_was_cut_off_goes_on() -> None:
    for status in (TrajectoryStatus.COMPLETED, TrajectoryStatus.FAILED, TrajectoryStatus.PENDING):
        assert not partial(status=status).can_continue()
        with pytest.raises(ValidationError, match=f"its status is '{status.value}'"):
            partial(status=status).continue_with([6], [-4.0], 4)
    row = partial()
    for left in (True, True, True, False):
        assert row.can_continue() is left
        row = row.continue_with([6], [-4.0], 4, status=ABORTED)


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LengthMismatchError, match="has 1 new values for 2 new tokens"):
        partial().continue_with([6, 7], [-4.0], 4)
    with pytest.raises(
        LengthMismatchError, match=r"'behavior_log_probs': has 2 values, expected 5 \(tokens\) or 3"
    ):
        partial(behavior_log_probs=[-1.0, -2.0]).continue_with([6], [-4.0], 4)
    with pytest.raises(LengthMismatchError, match="prompt_length 2 \\+ response_length 7 is not the 5"):
        partial(response_length=7).continue_with([6], [-4.0], 4)
    unknown = PartialTrajectory(id="u", tokens=[1, 2, 3], status=ABORTED)
    with pytest.raises(ValidationError, match="where the response begins is not known"):
        unknown.continue_with([6], [-4.0], 4)


def test_a_budget_holds_over_all_attempts() -> None:
    assert partial().continue_with([6, 7], None, 4, max_response_length=5).response_length == 5
    with pytest.raises(ValidationError, match="6 response tokens exceed max_response_length 5") as refused:
        partial().continue_with([6, 7, 8], None, 4, max_response_length=5)
    assert refused.value.hint == "generate at most 2 more tokens"


def test_a_partial_without_an_id_gets_one() -> None:
    first = partial(id="")
    after = first.continue_with([6], [-4.0], 4)
    assert first.id
    assert after.parent_id == after.start_rollout_id == first.id
