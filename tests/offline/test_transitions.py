"""Other forms of a set lose nothing on the way there and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.offline.test_ilql import BOS, options, row, rows
from trajstore import InputError, Trajectory, TrajectoryBatch
from trajstore.offline import ILQLDataset, ilql_dataset
from trajstore.offline.transitions import from_jaxseq, from_transitions, to_jaxseq, to_transitions


def same(a: ILQLDataset, b: ILQLDataset) -> None:
    names = a.table.schema.names
    assert set(b.table.schema.names) == set(names)
    assert a.table.select(names).to_pylist() == b.table.select(names).to_pylist()
    assert a.report == b.report


@settings(max_examples=30, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=5), options, st.sampled_from(["none", "global", None]))
def test_both_forms_lose_nothing(given_rows: list[Trajectory], chosen: dict[str, Any], scale: Any) -> None:
    if scale is None:
        given_rows = [r for r in given_rows if r.reward == r.reward]
        chosen = {"compat": "trlx", "bos_token_id": BOS}
    else:
        chosen = chosen | {"scale": scale}
    try:
        data = ilql_dataset(TrajectoryBatch(given_rows), **chosen)
    except ValueError:
        assume(False)
    same(from_jaxseq(to_jaxseq(data)), data)
    same(from_transitions(to_transitions(data)), data)


def multi_turn() -> ILQLDataset:
    rows_ = [
        row(tokens=[1, 2, 3, 4, 5, 6], loss_mask=[0, 1, 1, 0, 0, 1], prompt_tokens=[], response_tokens=[],
            token_rewards=[0, 0.25, 0.5, 0, 1, 2], prompt_length=1, response_length=5),
        row(terminated=False),
    ]  # fmt: skip
    return ilql_dataset(TrajectoryBatch(rows_))


def test_jaxseq_rows_say_what_each_position_predicts() -> None:
    first, second = to_jaxseq(multi_turn()).to_pylist()
    assert first["should_take_action"] == [1, 1, 0, 0, 1]
    assert first["rewards"] == [0.25, 1.5, 0, 0, 2]
    assert (first["done"], second["done"]) == (True, False)
    assert first["next_token_ids"] is first["next_done"] is None


def test_transitions_are_turns() -> None:
    made = to_transitions(multi_turn(), gamma=0.5).to_pylist()
    assert [(t["turn"], t["observation"], t["action"], t["next_observation"], t["done"]) for t in made] == [
        (0, [1], [2, 3], [1, 2, 3, 4, 5], False),
        (1, [1, 2, 3, 4, 5], [6], [1, 2, 3, 4, 5, 6], True),
        (0, [1, 2], [3, 4, 5], [1, 2, 3, 4, 5], False),
    ]
    assert [t["reward"] for t in made] == [1.75, 2, 1]
    assert [t["trajectory_reward"] for t in made] == [3.75, 3.75, 1]
    assert [t["mc_return"] for t in made] == [2.75, 2, 1]


def test_what_has_no_such_form_is_refused() -> None:
    rows_ = TrajectoryBatch([row()])
    for convert in (to_jaxseq, to_transitions):
        with pytest.raises(InputError, match="causal"):
            convert(ilql_dataset(rows_, architecture="seq2seq"))
        with pytest.raises(InputError, match="-1"):
            convert(ilql_dataset(TrajectoryBatch([row(prompt_tokens=[])]), compat="trlx"))
    with pytest.raises(InputError, match="attention masks"):
        to_transitions(ilql_dataset(TrajectoryBatch([row(attention_mask=[0, 1, 1, 1, 1])])))
