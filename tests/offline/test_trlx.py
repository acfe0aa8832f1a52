"""The builder against what trlX itself made of the same data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from tests.offline.goldens import golden
from trajstore import LengthMismatchError, Trajectory, TrajectoryBatch, ValidationError
from trajstore.offline import ilql_dataset
from trajstore.offline.dialogue import Turns, dialogue_trajectories

EOS, BOS = 50, 51


def encode(text: str) -> list[int]:
    """The tokenizer of the goldens."""
    order = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
    return [{"$": EOS, "^": BOS}.get(char) or order.index(char) + 1 for char in text]


TURNS = Turns(encode, eos="$", bos=BOS)


def from_turns(turns: list[list[dict[str, Any]]], returns: list[float]) -> list[Trajectory]:
    padded = [*returns, *[0.0] * (len(turns) - len(returns))]
    return [
        Trajectory(
            tokens=[token for turn in sample for token in turn["tokens"]],
            loss_mask=[int(turn["is_output"]) for turn in sample for _ in turn["tokens"]],
            reward=reward,
        )
        for sample, reward in zip(turns, padded, strict=True)
    ]


def build(case: dict[str, Any], rows: list[Trajectory], architecture: Any = "causal") -> Any:
    pretokenized = case.get("pretokenized", False)
    return ilql_dataset(
        TrajectoryBatch(rows),
        compat="trlx",
        architecture=architecture,
        max_length=case.get("max_length"),
        truncation_side=case.get("truncation_side", "right"),
        bos_token_id=None if pretokenized else BOS,
        returns=case["returns"],
    )


def fields(element: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(element).items() if value is not None}


def same(found: Any, expected: dict[str, Any], dtypes: dict[str, str]) -> None:
    found = fields(found)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert str(tensor.dtype) == f"torch.{dtypes[name]}", name
        wanted = torch.tensor(expected[name], dtype=tensor.dtype)
        if tensor.dtype == torch.int64:
            assert torch.equal(tensor, wanted), name
        else:
            torch.testing.assert_close(tensor, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


def check(case: dict[str, Any], rows: list[Trajectory], architecture: Any = "causal") -> None:
    made = build(case, rows, architecture)
    assert len(made) == len(case["elements"])
    for element, expected in zip(made, case["elements"], strict=True):
        same(element, expected, case["dtypes"])
    same(made.batch(), case["batch"], case["dtypes"])


def named(file: str) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in golden(file)["cases"].items()]


def rows_of(case: dict[str, Any]) -> list[Trajectory]:
    """From the strings where there are any, so that the eos rule is tested too."""
    if case.get("pretokenized"):
        return from_turns(case["turns_after_truncation"], case["returns"])
    returns = [*case["returns"], *[0.0] * (len(case["samples"]) - len(case["returns"]))]
    return dialogue_trajectories(case["samples"], returns, TURNS)


@pytest.mark.parametrize("case", [c for c in named("ilql_elements") if "error" not in c.values[0]])
def test_causal(case: dict[str, Any]) -> None:
    check(case, rows_of(case))
    if "turns" in case:
        check(case, from_turns(case["turns"], case["returns"]))


ERRORS = {
    "left_truncation_one_token_budget": r"trajectory 0: no action is left behind the bos token.*IndexError",
    "ERROR_odd_number_of_phrases": r"trajectory 0: the dialogue has 3 phrases, expected an even number",
    "ERROR_right_truncation_removes_all_outputs": r"trajectory 0: no output is left .*RuntimeError, hstack",
    "ERROR_right_truncation_bos_one_token": r"trajectory 0: no action is left behind the bos.*IndexError",
    "ERROR_pretok_no_outputs": r"trajectory 0: no output is left .*RuntimeError, hstack",
}


@pytest.mark.parametrize("case", [c for c in named("ilql_elements") if "error" in c.values[0]])
def test_causal_errors(case: dict[str, Any], request: pytest.FixtureRequest) -> None:
    expected = ERRORS[request.node.callspec.id]
    with pytest.raises(ValidationError, match=expected) as caught:
        build(case, rows_of(case))
    kind, message = case["error"]["type"], case["error"]["message"]
    if kind != "ValueError":  # ours is a ValueError already
        assert f"{kind}, {message.split(' for')[0]}" in str(caught.value)


def test_all_five_expected_errors_are_there() -> None:
    assert {n for n, c in golden("ilql_elements")["cases"].items() if "error" in c} == set(ERRORS)


@pytest.mark.parametrize("number", range(40))
def test_causal_fuzz(number: int) -> None:
    case = golden("ilql_elements_fuzz")["cases"][number]
    if "error" in case:
        with pytest.raises(ValidationError, match=case["error"]["type"]):
            build(case, rows_of(case))
    else:
        check(case, rows_of(case))


@pytest.mark.parametrize("case", [c for c in named("ilql_seq2seq") if "error" not in c.values[0]])
def test_seq2seq(case: dict[str, Any]) -> None:
    check(case, rows_of(case), "seq2seq")


SEQ2SEQ_ERRORS = {
    "ERROR_one_token_output": "the output has one token",
    "ERROR_truncated_to_prompt_only": "no output is left",
}


@pytest.mark.parametrize("case", [c for c in named("ilql_seq2seq") if "error" in c.values[0]])
def test_seq2seq_errors(case: dict[str, Any], request: pytest.FixtureRequest) -> None:
    with pytest.raises(ValidationError, match=SEQ2SEQ_ERRORS[request.node.callspec.id]) as caught:
        build(case, rows_of(case), "seq2seq")
    assert case["error"]["type"] in str(caught.value)


@pytest.mark.parametrize("number", range(15))
def test_seq2seq_fuzz(number: int) -> None:
    case = golden("ilql_seq2seq")["fuzz"][number]
    check(case, rows_of(case), "seq2seq")


def test_the_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = golden("ilql_elements")["cases"]["mixed_turn_counts"]
    monkeypatch.setattr("trajstore.offline.flat.blocks.__defaults__", (3,))
    assert build(case, rows_of(case)).table.column("rewards").num_chunks == 3
    check(case, rows_of(case))


def test_more_returns_than_rows_are_refused() -> None:
    rows = TrajectoryBatch([Trajectory(prompt_tokens=[1], response_tokens=[2])])
    with pytest.raises(LengthMismatchError, match="returns has length 2, the rows are 1"):
        ilql_dataset(rows, compat="trlx", returns=np.ones(2))
