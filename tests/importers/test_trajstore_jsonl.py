"""Owns the tests of trajstore's own JSON lines: what is written reads back as the same object."""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.errors import ImportFormatError, ValidationError
from trajstore.importers import trajstore_jsonl
from trajstore.importers.records import ImportOptions
from trajstore.importers.tokenizer import load_tokenizer
from trajstore.importers.trajstore_jsonl import write_line
from trajstore.trajectory import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryStatus,
    VersionSegment,
)

Lines = Callable[..., Path]

texts = st.text(max_size=8) | st.sampled_from(["a\u2028b", "\ud83d cut", "line\r\nline", "\x00"])
floats = st.floats() | st.sampled_from([-0.0, math.nan, math.inf, 1e-308])
ints = st.integers(-(2**63), 2**63)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
masks = st.lists(st.integers(0, 1), max_size=4)
float_lists = st.lists(floats, max_size=4)
plain = st.recursive(
    st.none() | st.booleans() | ints | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
versions = st.builds(PolicyVersion, ints, floats, ints)
segments = st.lists(st.builds(VersionSegment, ints, ints, versions), max_size=2)
common: dict[str, st.SearchStrategy[Any]] = {
    "id": texts,
    "group_id": st.none() | texts,
    "prompt": texts,
    "prompt_tokens": ids,
    "prompt_length": ints,
    "response": texts,
    "response_tokens": ids,
    "response_length": ints,
    "tokens": ids,
    "attention_mask": masks,
    "loss_mask": masks,
    "log_probs": float_lists,
    "behavior_log_probs": float_lists,
    "reward": floats | st.sampled_from([0, 1]),
    "token_rewards": float_lists,
    "values": float_lists,
    "advantages": float_lists,
    "returns": float_lists,
    "version": st.none() | versions,
    "version_segments": segments,
    "status": st.sampled_from(TrajectoryStatus),
    "metadata": st.none() | st.dictionaries(texts, plain, max_size=3),
    "generation_time_ms": floats,
    "group_size": st.none() | ints,
    "messages": st.none() | st.lists(plain, max_size=3),
    "action_mask": masks,
    "bootstrap_value": st.none() | floats,
    "log_probs_version": st.none() | ints,
    "version_span": st.none() | st.tuples(ints, ints),
    "version_known": st.none() | texts,
    "finish_reason": st.none() | texts,
    "terminated": st.none() | st.booleans(),
    "parent_id": st.none() | texts,
    "tokens_retokenized": st.booleans(),
    "source": st.none() | texts,
}
partial: dict[str, st.SearchStrategy[Any]] = {
    "continuation_prompt": texts,
    "start_rollout_id": st.none() | texts,
    "continuation_count": ints,
    "kv_cache_ref": plain,
}
# Each field is there or has its default.
trajectories = st.fixed_dictionaries({}, optional=common).map(
    lambda d: Trajectory(**d)
) | st.fixed_dictionaries({}, optional=common | partial).map(lambda d: PartialTrajectory(**d))


def read_back(*rows: Trajectory) -> list[Trajectory]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text("".join(write_line(row) + "\n" for row in rows), encoding="utf-8", newline="")
        return [imported.trajectory for imported in trajstore_jsonl.read(path, ImportOptions())]


@settings(deadline=None, max_examples=80)
@given(st.lists(trajectories, min_size=1, max_size=2))
def test_write_then_read_gives_the_same_objects(rows: list[Trajectory]) -> None:
    assert [repr(row) for row in read_back(*rows)] == [
        repr(row) for row in rows
    ]  # repr tells NaN, -0.0, 0 and 0.0


def test_the_full_form_reads_as_well(lines: Lines) -> None:
    rows = [
        Trajectory(tokens=[1], reward=math.nan, version=PolicyVersion(3, 0.5, 2), version_span=(1, 3)),
        PartialTrajectory(version_segments=[VersionSegment(0, 1, PolicyVersion(3))]),
    ]
    path = lines(*(row.to_dict() for row in rows))
    again = [imported.trajectory for imported in trajstore_jsonl.read(path, ImportOptions())]
    assert [repr(row) for row in again] == [repr(row) for row in rows]


def test_a_line_is_short_and_one_line() -> None:
    row = Trajectory(tokens=[1, 2], prompt="a\nb", reward=math.nan)
    text = write_line(row)
    assert text == '{"id": "", "prompt": "a\\nb", "tokens": [1, 2], "reward": NaN, "status": "pending"}'
    assert "é" in write_line(Trajectory(prompt="é"))


def test_defaults_that_look_alike_are_kept() -> None:
    rows = [
        Trajectory(metadata=None, generation_time_ms=-0.0, messages=[]),
        Trajectory(metadata={}, terminated=False),
        PartialTrajectory(),
        PartialTrajectory(kv_cache_ref="k"),
    ]
    again = read_back(*rows)
    assert [repr(row) for row in again] == [repr(row) for row in rows]
    assert [type(row) for row in again] == [Trajectory, Trajectory, PartialTrajectory, PartialTrajectory]


def test_arrays_are_written_as_lists() -> None:
    row = Trajectory(
        tokens=np.array([1, 2], np.int32),
        log_probs=[np.float32(-0.5), np.float32("nan")],
        metadata={"score": np.float64(1.5), "all": np.arange(2)},
    )
    (again,) = read_back(row)
    assert again.tokens == [1, 2]
    assert repr(again.log_probs) == "[-0.5, nan]"
    assert again.metadata == {"score": 1.5, "all": [0, 1]}


@pytest.mark.parametrize(
    ("row", "column", "reason"),
    [
        (Trajectory(id="r", metadata={"a": {3: "x"}}), "metadata", "key 3 is not text"),
        (Trajectory(id="r", metadata={"a": {1, 2}}), "metadata", "set has no JSON form"),
        (Trajectory(id="r", messages=[{None: 1}]), "messages", "key None is not text"),
        (PartialTrajectory(id="r", kv_cache_ref=object()), "kv_cache_ref", "object has no JSON form"),
    ],
)
def test_what_would_not_read_back_is_not_written(row: Trajectory, column: str, reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        write_line(row)
    assert (caught.value.id, caught.value.column) == ("r", column)
    assert caught.value.reason == f"cannot be written as JSON: {reason}"
    assert caught.value.hint


def test_places(lines: Lines) -> None:
    path = lines({"id": "a"}, {"id": "b"})
    found = list(trajstore_jsonl.read(path, ImportOptions()))
    assert [i.where for i in found] == [f"{path}:1", f"{path}:2"]
    assert found[-1].bytes_read == path.stat().st_size


@pytest.mark.parametrize(
    ("bad", "message", "hint"),
    [
        (
            {"id": "b", "rewrd": 1},
            "trajectory 'b': unknown field 'rewrd'",
            "put extra values under 'metadata'",
        ),
        ({"status": "done"}, "column 'status': cannot be read from 'done'", "give one of pending"),
        ({"version": {"id": 3}}, "column 'version': cannot be read from", '{"version_id": 3'),
        ({"version_segments": [{"start": 1}]}, "column 'version_segments': cannot be read", '"end": 9'),
        ({"version_span": 3}, "column 'version_span': cannot be read", "give [oldest, newest]"),
        (["id"], "expected a JSON object, found a list", "named fields"),
    ],
)
def test_bad_lines_are_named(lines: Lines, bad: Any, message: str, hint: str) -> None:
    path = lines({"id": "a"}, bad)
    with pytest.raises(ImportFormatError) as caught:
        list(trajstore_jsonl.read(path, ImportOptions()))
    assert caught.value.message.startswith(f"{path}:2: {message}")
    assert hint in str(caught.value.hint)


def test_text_is_tokenised_on_request(lines: Lines, bpe_file: Path) -> None:
    tokenizer = load_tokenizer(bpe_file)
    path = lines(
        {"prompt": "hello ", "response": "world<|im_end|>", "prompt_length": 99, "loss_mask": []},
        {"prompt": "hello ", "response": "world", "tokens": [7, 8]},
        {"prompt": "hello ", "prompt_tokens": [7], "response_tokens": [8]},
        {"reward": 1.0},
    )
    text, tokens, split, empty = (i.trajectory for i in trajstore_jsonl.read(path, ImportOptions(tokenizer)))
    assert text.tokens == tokenizer.encode("hello ") + tokenizer.encode("world<|im_end|>")
    assert text.prompt_length == len(tokenizer.encode("hello "))
    assert text.response_length == len(text.tokens) - text.prompt_length
    assert text.tokens_retokenized is True
    assert text.loss_mask == []
    assert (tokens.tokens, tokens.tokens_retokenized) == ([7, 8], False)
    assert (split.tokens, split.prompt_tokens, split.tokens_retokenized) == ([], [7], False)
    assert (empty.tokens, empty.tokens_retokenized) == ([], False)
    without = next(trajstore_jsonl.read(path, ImportOptions())).trajectory
    assert without == Trajectory(prompt="hello ", response="world<|im_end|>", prompt_length=99)


def test_messages_are_tokenised_as_a_conversation(lines: Lines, bpe_file: Path) -> None:
    from trajstore.importers.messages import render

    tokenizer = load_tokenizer(bpe_file)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    row = Trajectory(prompt="hi", response="hello", messages=talk)
    path = lines(json.loads(write_line(row)))
    (imported,) = trajstore_jsonl.read(path, ImportOptions(tokenizer))
    rendered = render(talk, tokenizer)
    expected = replace(
        row,
        tokens=rendered.tokens,
        loss_mask=rendered.loss_mask,
        prompt_length=rendered.prompt_length,
        response_length=len(rendered.tokens) - rendered.prompt_length,
        tokens_retokenized=True,
    )
    assert imported.trajectory == expected
    bad = lines({"messages": [{"content": 1}]})
    with pytest.raises(ImportFormatError, match=r"file\.jsonl:1: message 0: 'role' must be text"):
        list(trajstore_jsonl.read(bad, ImportOptions(tokenizer)))


@pytest.mark.parametrize(
    "aligned",
    [
        {"log_probs": [0.5]},
        {"loss_mask": [1, 1]},
        {"version_segments": [{"start": 0, "end": 1, "version": 3}]},
    ],
)
def test_new_tokens_never_meet_old_lists(lines: Lines, bpe_file: Path, aligned: dict[str, Any]) -> None:
    path = lines({"prompt": "a", "response": "b"}, {"response": "hello", **aligned})
    with pytest.raises(ImportFormatError) as caught:
        list(trajstore_jsonl.read(path, ImportOptions(load_tokenizer(bpe_file))))
    (column,) = aligned
    assert caught.value.message.startswith(f"{path}:2: {column!r} belongs to tokens that the row lacks")
    assert caught.value.hint
    assert len(list(trajstore_jsonl.read(path, ImportOptions()))) == 2
