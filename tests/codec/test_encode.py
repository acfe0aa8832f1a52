"""Objects → record batch: what is filled and aligned, every refusal with its class, row, id and column."""

from __future__ import annotations

import hashlib
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from trajstore.codec import encode, id_hashes
from trajstore.errors import LengthMismatchError, ValidationError
from trajstore.schema import TOKEN_FLOATS, TOKEN_MASKS
from trajstore.trajectory import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryStatus,
    VersionSegment,
)


def row(**fields: Any) -> Trajectory:
    """Two tokens of prompt, three of response."""
    return Trajectory(**({"id": "bad", "tokens": [5, 6, 7, 8, 9], "prompt_length": 2} | fields))


def refusal(
    trajectory: Any, column: str | None, *says: str, kind: type[ValidationError] = ValidationError
) -> ValidationError:
    """Encodes the trajectory behind a sound one; the error must name it, the column and what was found."""
    with pytest.raises(ValidationError) as caught:
        encode([Trajectory(id="good", tokens=[1, 2]), trajectory])
    error = caught.value
    assert type(error) is kind
    assert (error.row, error.column) == (1, column)
    if isinstance(trajectory, Trajectory):
        assert error.id == str(trajectory.id)
        assert f"trajectory 1 (id {trajectory.id!r}), column {column!r}: " in str(error)
    for text in says:
        assert text in str(error)
    return error


def segments(*spans: tuple[int, int]) -> list[VersionSegment]:
    return [VersionSegment(start, end, PolicyVersion(i)) for i, (start, end) in enumerate(spans)]


# Filling


def test_tokens_are_joined_from_prompt_and_response() -> None:
    batch = encode([Trajectory(prompt_tokens=[1, 2], response_tokens=np.array([3]))])
    assert batch.column("tokens").to_pylist() == [[1, 2, 3]]
    assert (batch.column("prompt_length")[0].as_py(), batch.column("response_length")[0].as_py()) == (2, 1)
    assert batch.column("prompt_tokens").to_pylist() == [None], "equal to the slice, so not stored twice"


def test_prompt_tokens_that_differ_from_the_slice_are_kept_verbatim() -> None:
    rows = [row(prompt_tokens=[5, 6]), row(prompt_tokens=[5, 7]), row(prompt_tokens=[5, 6])]
    assert encode(rows).column("prompt_tokens").to_pylist() == [None, [5, 7], None]


@pytest.mark.parametrize("given", [{"prompt_length": 2}, {"response_length": 3, "prompt_length": 0}])
def test_one_length_makes_the_other_certain(given: dict[str, int]) -> None:
    batch = encode([row(**given)])
    assert (batch.column("prompt_length")[0].as_py(), batch.column("response_length")[0].as_py()) == (2, 3)


def test_a_split_that_is_not_known_is_null() -> None:
    batch = encode([row(prompt_length=0)])
    assert batch.column("prompt_length").null_count == batch.column("response_length").null_count == 1


@pytest.mark.parametrize("name", [*TOKEN_MASKS[1:], *TOKEN_FLOATS])
@pytest.mark.parametrize("box", [list, np.array, torch.tensor])
def test_response_aligned_lists_are_shifted(name: str, box: Any) -> None:
    column = encode([row(), row(**{name: box([1, 0, 1])}), row(**{name: [1, 0, 1, 0, 1]})]).column(name)
    assert column.to_pylist() == [None, [0, 0, 1, 0, 1], [1, 0, 1, 0, 1]]


def test_an_explicit_mask_equal_to_the_default_stays_explicit() -> None:
    batch = encode([row(loss_mask=[0, 0, 1, 1, 1]), row()])
    assert batch.column("loss_mask").to_pylist() == [[0, 0, 1, 1, 1], None]


def test_the_id_hash_is_blake2b() -> None:
    expected = [int.from_bytes(hashlib.blake2b(i.encode(), digest_size=8).digest(), "little", signed=True)
                for i in ("", "a", "é")]  # fmt: skip
    assert id_hashes(["", "a", "é"]).to_pylist() == expected
    assert encode([Trajectory(id="a")]).column("id_hash")[0].as_py() == expected[1]


@pytest.mark.parametrize(
    ("fields", "known", "oldest", "newest"),
    [
        ({}, "absent", None, None),
        ({"version": PolicyVersion(4)}, "exact", 4, 4),
        ({"version_span": (2, 6)}, "span", 2, 6),
        ({"version_span": (2, 6), "version": PolicyVersion(6)}, "span", 2, 6),
        ({"version_span": (2, 6), "version_known": "list"}, "list", 2, 6),
        ({"version_segments": segments((0, 3), (3, 5)), "version": PolicyVersion(3)}, "exact", 0, 1),
    ],
)  # fmt: skip
def test_oldest_and_newest_version(fields: dict[str, Any], known: str, oldest: Any, newest: Any) -> None:
    batch = encode([row(), row(**fields), row(version=PolicyVersion(1))])
    for name, value in (
        ("version_known", known),
        ("oldest_version_id", oldest),
        ("newest_version_id", newest),
    ):
        assert batch.column(name)[1].as_py() == value
    assert batch.column("oldest_version_id").to_pylist()[::2] == [None, 1]


def test_a_cache_reference_that_is_no_text_is_left_out_aloud() -> None:
    partial = PartialTrajectory(kv_cache_ref=object())
    with pytest.warns(UserWarning, match="kv_cache_ref of 1 partial"):
        batch = encode([partial])
    assert batch.column("kv_cache_ref").to_pylist() == [None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encode([PartialTrajectory(kv_cache_ref="k")]).column("kv_cache_ref").to_pylist() == ["k"]


def test_rows_may_come_from_any_sequence() -> None:
    rows = (row(id="a"), row(id="b"))
    assert encode(rows).equals(encode(list(rows)))


def test_nulls_on_request() -> None:
    found = encode([row(values=[1.0, None, 2.0, None, 3.0])], nulls="nan").column("values")[0].as_py()
    assert [math.isnan(v) for v in found] == [False, True, False, True, False]
    with pytest.raises(ValidationError, match="found None at index 1, expected 0 or 1"):
        encode([row(loss_mask=[1, None, 1, 1, 1])], nulls="nan")


# Refusals: lengths


@pytest.mark.parametrize("name", [*TOKEN_MASKS, *TOKEN_FLOATS])
@pytest.mark.parametrize("size", [1, 4, 6])  # 4: the t→t+1 shift of raw logits, or one short
def test_a_list_of_another_length_is_refused(name: str, size: int) -> None:
    refusal(
        row(**{name: [1] * size}), name, f"has {size} values, expected 5 (tokens)", kind=LengthMismatchError
    )


@pytest.mark.parametrize("size", [2, 4])
def test_a_response_aligned_list_one_off_is_refused(size: int) -> None:
    says = f"has {size} values, expected 5 (tokens) or 3 (response)"
    refusal(row(log_probs=[-0.5] * size), "log_probs", says, kind=LengthMismatchError)


def test_a_response_aligned_attention_mask_is_refused() -> None:
    says = "has 3 values, expected 5 (tokens)"
    error = refusal(row(attention_mask=[1, 1, 1]), "attention_mask", says, kind=LengthMismatchError)
    assert "response)" not in error.reason


def test_a_response_aligned_list_without_a_known_split_is_refused() -> None:
    trajectory = row(prompt_length=0, values=[1.0, 2.0, 3.0])
    refusal(trajectory, "values", "has 3 values, expected 5 (tokens)", kind=LengthMismatchError)


@pytest.mark.parametrize("name", ["log_probs", "behavior_log_probs"])
@pytest.mark.parametrize("mask", [[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]])
def test_response_log_probs_under_a_loss_on_the_prompt_are_refused(name: str, mask: list[int]) -> None:
    trajectory = row(**{name: [-1.0, -2.0, -3.0]}, loss_mask=mask)
    refusal(trajectory, name, "given for the response only, but loss_mask has ones on the prompt")
    encode([row(**{name: [-1.0] * 5}, loss_mask=mask), row(**{name: [-1.0] * 3}, loss_mask=[0, 0, 0, 1, 1])])


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_length": 2, "response_length": 4},
        {"prompt_length": 6},
        {"prompt_length": 0, "response_length": 6},
        {"prompt_length": 0, "prompt_tokens": [5], "response_tokens": [6]},
        {"tokens": [], "prompt_length": 2},
    ],
)
def test_lengths_that_contradict_the_tokens_are_refused(fields: dict[str, Any]) -> None:
    total = len(fields.get("tokens", [1] * 5))
    refusal(row(**fields), "tokens", f"is not the {total} of tokens", kind=LengthMismatchError)


@pytest.mark.parametrize("name", ["prompt_length", "response_length"])
def test_negative_lengths_are_refused(name: str) -> None:
    refusal(row(**({"prompt_length": 0} | {name: -1})), name, "found -1")


# Refusals: values of lists


@pytest.mark.parametrize("name", ["tokens", "prompt_tokens", "response_tokens"])
@pytest.mark.parametrize("value", [2**31, -1, 1.0, math.nan, None, "7"])
def test_bad_token_ids_are_refused(name: str, value: Any) -> None:
    found = "None at index 1" if value is None else f"{value!r} at index 1"
    refusal(row(**{name: [5, value]}, prompt_length=0), name, found, "expected a token id")


@pytest.mark.parametrize("name", TOKEN_MASKS)
@pytest.mark.parametrize("value", [200, 2, -100, math.nan, 0.5, None])
def test_bad_mask_values_are_refused(name: str, value: Any) -> None:
    refusal(row(**{name: [1, 0, 1, 0, value]}), name, f"{value!r} at index 4", "expected 0 or 1")


@pytest.mark.parametrize("name", TOKEN_FLOATS)
@pytest.mark.parametrize("box", [list, np.array])
def test_floats_outside_float32_are_refused(name: str, box: Any) -> None:
    says = "1e+300 at index 3 is outside float32"
    refusal(
        row(**{name: box([0.0, 0.0, 0.0, 1e300, 0.0])}), name, says, "expected a number that fits float32"
    )


@pytest.mark.parametrize("name", TOKEN_FLOATS)
def test_none_in_a_list_of_floats_is_refused_by_index(name: str) -> None:
    error = refusal(row(**{name: [0.0, 0.0, None, 0.0, 0.0]}), name, "found None at index 2")
    assert error.hint is not None
    assert 'nulls="nan"' in error.hint


# Refusals: versions


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (segments((0, 6)), "[0, 6) is not a range within the 5 tokens"),
        (segments((-1, 5)), "[-1, 5) is not a range within the 5 tokens"),
        (segments((0, 2**40)), "is not a range within the 5 tokens"),
        (segments((0, 5), (5, 5)), "[5, 5) is not a range within the 5 tokens"),
        (segments((0, 3), (4, 3)), "[4, 3) is not a range within the 5 tokens"),
        (segments((0, 3), (2, 5)), "[2, 5) begins before [0, 3) has ended"),
        (segments((3, 5), (0, 3)), "[0, 3) begins before [3, 5) has ended"),
        (segments((2, 4)), "no segment covers the sampled token at index 4"),
        (segments((2, 3), (4, 5)), "no segment covers the sampled token at index 3"),
        ([VersionSegment(0.5, 5, PolicyVersion(0))], "expected VersionSegment(start, end, version)"),
        ([VersionSegment(0, 5, 3)], "expected VersionSegment(start, end, version)"),
        ([(0, 5, 3)], "found (0, 5, 3), expected VersionSegment(start, end, version)"),
        (VersionSegment(0, 5, PolicyVersion(0)), "expected a list of VersionSegment"),
    ],
    ids=repr,
)
def test_bad_segments_are_refused(given: Any, says: str) -> None:
    refusal(row(version_segments=given), "version_segments", says)


def test_masks_say_which_tokens_were_sampled() -> None:
    gap = segments((2, 3), (4, 5))
    encode(
        [row(version_segments=gap, action_mask=[0, 0, 1, 0, 1]), row(version_segments=gap, prompt_length=0)]
    )
    encode([row(version_segments=gap, loss_mask=[0, 0, 1, 0, 1])])
    masked = row(version_segments=gap, loss_mask=[0, 0, 1, 0, 1], action_mask=[0, 0, 1, 1, 1])
    refusal(masked, "version_segments", "no segment covers the sampled token at index 3")
    refusal(row(version_segments=gap, loss_mask=[1, 0, 0, 0, 0]), "version_segments", "token at index 0")


@pytest.mark.parametrize(
    ("fields", "column", "says"),
    [
        ({"version_known": "exact"}, "version_known", "'exact' says a version is known, but none is given"),
        ({"version_known": "span"}, "version_known", "'span' says that only the oldest and newest"),
        ({"version_known": "list", "version": PolicyVersion(1)}, "version_known", "'list' says that only"),
        ({"version_known": "absent", "version": PolicyVersion(1)}, "version_known", "'absent' contradicts"),
        ({"version_known": "absent", "version_span": (1, 2)}, "version_known", "'absent' contradicts"),
        (
            {"version_known": "exact", "version_span": (1, 2)},
            "version_known",
            "'exact' contradicts version_span",
        ),
        (
            {"version_known": "guess", "version": PolicyVersion(1)},
            "version_known",
            "'guess' is not one of exact",
        ),
        ({"version_known": 3}, "version_known", "found 3, expected text"),
        (
            {"version_span": (1, 2), "version_segments": segments((0, 5))},
            "version_span",
            "beside version_segments",
        ),
        ({"version_span": (2, 1)}, "oldest_version_id", "2 is above newest_version_id"),
        ({"version_span": (1,)}, "version_span", "found (1,), expected (oldest, newest)"),
        ({"version_span": 4}, "version_span", "found 4, expected (oldest, newest) or None"),
        ({"version_span": (1, None)}, "version_span", "found (1, None)"),
        ({"version_span": (1.5, 2)}, "oldest_version_id", "found 1.5, expected an integer"),
        ({"version": 0}, "version", "found 0, expected a PolicyVersion or None"),
        ({"version": 7}, "version", "found 7, expected a PolicyVersion or None"),
        ({"version": PolicyVersion(1.5)}, "version_id", "found 1.5, expected an integer"),
        ({"version": PolicyVersion(2**63)}, "version_id", "expected an integer"),
        (
            {"version": PolicyVersion(1, timestamp="now")},
            "version_timestamp",
            "found 'now', expected a number",
        ),
    ],
)
def test_contradicting_versions_are_refused(fields: dict[str, Any], column: str, says: str) -> None:
    refusal(row(**fields), column, says)


@pytest.mark.parametrize("name", ["log_probs", "behavior_log_probs"])
def test_retokenized_tokens_have_no_log_probs(name: str) -> None:
    trajectory = row(tokens_retokenized=True, **{name: [0.0] * 5})
    refusal(trajectory, name, "is given, but tokens_retokenized says")
    encode([row(tokens_retokenized=True, values=[0.0] * 5)])


# Refusals: scalars


@pytest.mark.parametrize(
    ("fields", "column", "says"),
    [
        ({"status": "completed"}, "status", "found 'completed', expected a TrajectoryStatus"),
        ({"status": None}, "status", "found None, expected a TrajectoryStatus"),
        ({"id": 5}, "id", "found 5, expected text"),
        ({"id": "\ud800"}, "id", "expected text that UTF-8 can hold"),
        ({"prompt": None}, "prompt", "found None, expected text"),
        ({"prompt": 5}, "prompt", "found 5, expected text"),
        ({"prompt": b"text"}, "prompt", "found b'text', expected text"),
        ({"prompt": "a\ud800"}, "prompt", r"found 'a\ud800', expected text that UTF-8 can hold"),
        ({"response": ["text"]}, "response", "found ['text'], expected text"),
        ({"group_id": 3}, "group_id", "found 3, expected text or None"),
        ({"group_id": b"g"}, "group_id", "found b'g', expected text or None"),
        ({"reward": None}, "reward", "found None, expected a number"),
        ({"reward": "1"}, "reward", "found '1', expected a number"),
        ({"bootstrap_value": "x"}, "bootstrap_value", "found 'x', expected a number"),
        ({"terminated": 1}, "terminated", "found 1, expected True, False or None"),
        ({"tokens_retokenized": None}, "tokens_retokenized", "found None, expected True or False"),
        ({"group_size": 1.5}, "group_size", "found 1.5, expected an integer"),
        ({"group_size": 2**31}, "group_size", "found 2147483648, expected a value that fits int32"),
        ({"group_size": -1}, "group_size", "-1 is negative"),
        ({"group_size": np.array([1, 2])}, "group_size", "expected an integer"),
        ({"prompt_length": 2.0}, "prompt_length", "found 2.0, expected an integer"),
        ({"prompt_length": None}, "prompt_length", "found None, expected an integer"),
        ({"metadata": [1]}, "metadata", "found [1], expected a dict or None"),
        ({"metadata": []}, "metadata", "found [], expected a dict or None"),
        ({"metadata": {"a": {1: 2}}}, "metadata", "cannot be written as JSON: key 1 is not text"),
        ({"metadata": {"a": object()}}, "metadata", "cannot be written as JSON: object has no JSON form"),
        ({"metadata": {"a": np.array([{1: 2}])}}, "metadata", "cannot be written as JSON: key 1 is not text"),
        ({"messages": {"role": "user"}}, "messages", "found {'role': 'user'}, expected a list or None"),
        ({"messages": [{None: 1}]}, "messages", "cannot be written as JSON: key None is not text"),
    ],
)
def test_bad_scalars_are_refused(fields: dict[str, Any], column: str, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        encode([Trajectory(id="good"), row(**fields)])
    assert (caught.value.row, caught.value.column) == (1, column)
    assert "trajectory 1 (id " in str(caught.value)
    assert says in str(caught.value)


def test_metadata_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    refusal(row(metadata=loop), "metadata", "cannot be written as JSON")


@pytest.mark.parametrize(
    ("fields", "column"),
    [
        ({"continuation_count": None}, "continuation_count"),
        ({"continuation_count": -1}, "continuation_count"),
        ({"continuation_prompt": 5}, "continuation_prompt"),
        ({"start_rollout_id": 5}, "start_rollout_id"),
    ],
)
def test_bad_partials_are_refused(fields: dict[str, Any], column: str) -> None:
    refusal(PartialTrajectory(id="bad", **fields), column)


@pytest.mark.parametrize("thing", [{"id": "x"}, None, "text"], ids=repr)
def test_what_is_no_trajectory_is_refused(thing: Any) -> None:
    with pytest.raises(ValidationError, match=r"trajectory 1: found .*, expected a Trajectory"):
        encode([Trajectory(), thing])


def test_a_long_value_does_not_flood_the_message() -> None:
    assert len(str(refusal(row(prompt=["x" * 10_000]), "prompt"))) < 300


def test_status_values_are_stored() -> None:
    rows = [Trajectory(status=status) for status in TrajectoryStatus]
    assert encode(rows).column("status").to_pylist() == [status.value for status in TrajectoryStatus]
