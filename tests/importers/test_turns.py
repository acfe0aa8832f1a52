"""Owns the tests of merging an agent's calls into sequences."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import TrajectoryBatch
from trajstore.importers import ImportOptions, open_importer
from trajstore.importers.turns import Call, merge

FILES = Path(__file__).parents[1] / "cases" / "files"


def test_calls_that_continue_each_other_are_one_sequence() -> None:
    (one,) = merge([Call([1, 2], [3], [-0.5], 7), Call([1, 2, 3, 9, 9], [4, 5], [-0.1, -0.2], 8)])
    assert one.tokens == [1, 2, 3, 9, 9, 4, 5]
    assert one.action_mask == [0, 0, 1, 0, 0, 1, 1]
    assert one.logprobs == [0.0, 0.0, -0.5, 0.0, 0.0, -0.1, -0.2]
    assert one.versions == [-1, -1, 7, -1, -1, 8, 8]
    assert one.prompt_length == 2


def test_a_call_without_log_probs_leaves_none_for_its_sequence() -> None:
    (one,) = merge([Call([1], [2], [-0.5]), Call([1, 2], [3])])
    assert one.logprobs is None
    assert one.fields()["behavior_log_probs"] == []


def test_copied_context_is_an_action_and_not_trained() -> None:
    (one,) = merge([Call([1], [2], loss=False), Call([1, 2], [3])])
    assert (one.loss_mask, one.action_mask) == ([0, 0, 1], [0, 1, 1])


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="call 0 has 1 log-probs for 2 tokens"):
        merge([Call([1], [2, 3], [-0.5])])


def test_agent_steps_are_a_format() -> None:
    items = list(open_importer("auto")(FILES / "agent_steps.jsonl", ImportOptions()))
    rows = list(TrajectoryBatch([item.trajectory for item in items]))
    assert [list(row.tokens) for row in rows] == [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [1, 53122, 316],
        [1, 393, 30002, 8, 2],
    ]
    assert [s.version.version_id for s in rows[1].version_segments] == [6, 7]


ids = st.integers(0, 2)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.lists(ids, max_size=4), st.lists(ids, max_size=3)), max_size=6), st.data())
def test_nothing_sampled_is_lost_and_nothing_given_is_called_sampled(calls: list[Any], data: Any) -> None:
    made: list[Call] = []
    for prompt, completion in calls:
        before = data.draw(st.sampled_from([[], *(list(c.prompt) + list(c.completion) for c in made)]))
        made.append(Call(before + prompt, completion, [-float(t) for t in completion], len(made)))
    sequences = merge(made)
    assert sorted(number for s in sequences for number in s.calls) == list(range(len(made)))
    assert sum(map(sum, (s.action_mask for s in sequences))) == sum(len(c.completion) for c in made)
    for sequence in sequences:
        assert len(sequence.tokens) == len(sequence.action_mask) == len(sequence.versions)
        for number in sequence.calls:
            call = made[number]
            whole = [*call.prompt, *call.completion]
            assert sequence.tokens[: len(whole)] == whole
            start = len(call.prompt)
            assert sequence.versions[start : len(whole)] == [number] * len(call.completion)
