"""Preference pairs, KTO labels and SFT rows against the plain meaning of their options."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import InputError, Trajectory, TrajectoryBatch, TrajectoryStatus, TrajectoryStore
from trajstore.ingest import ingest
from trajstore.offline.preference import kto_labels, preference_pairs, sft_rows, step_labels


def row(id: str, reward: float, response: list[int] | None = None, **given: Any) -> Trajectory:
    defaults = {"group_id": "g", "prompt_tokens": [1, 2], "prompt": "q", "response": f"answer {id}"}
    tokens = [10 + ord(id[-1])] if response is None else response
    return Trajectory(id=id, reward=reward, response_tokens=tokens, **{**defaults, **given})


def pairs(*rows: Trajectory, **options: Any) -> list[tuple[str, str]]:
    made = preference_pairs(TrajectoryBatch(rows), **options).table
    return list(zip(made["chosen_id"].to_pylist(), made["rejected_id"].to_pylist(), strict=True))


def test_best_against_worst_and_ties_go_to_like_lengths() -> None:
    rows = [
        row("a", 0.5),
        row("b", 1.0, [5]),
        row("c", 1.0, [5, 6, 7]),
        row("d", 0.0, [8, 9, 9]),
        row("e", 0.0, [8]),
    ]
    assert pairs(*rows) == [("b", "e")]
    assert pairs(*rows[:4]) == [("c", "d")]
    assert pairs(row("a", 1), row("b", 1)) == []


def test_all_pairs_above_a_margin() -> None:
    rows = [row("a", 0.0), row("b", 0.5), row("c", 1.0), row("d", 1.0)]
    assert pairs(*rows, pairing="all") == [
        ("c", "b"), ("c", "a"), ("d", "b"), ("d", "a"), ("b", "a")
    ]  # fmt: skip
    assert pairs(*rows, pairing="all", margin=0.5) == [("c", "a"), ("d", "a")]


def test_what_is_left_out_is_counted() -> None:
    rows = [
        row("a", 1.0, [5]),
        row("b", 0.0, [5]),
        row("c", 0.0, [6] * 9),
        row("d", 0.0, [7], prompt_tokens=[3]),
        row("e", float("nan"), [8]),
        row("f", 1.0, []),
        row("h", 1.0, group_id=None),
        row("i", 1.0, group_id="alone"),
        Trajectory(id="j", tokens=[1, 2], group_id="g"),
        row("k", 1.0, group_id="equal"),
        row("l", 1.0, group_id="equal"),
    ]
    made = preference_pairs(TrajectoryBatch(rows), length_ratio=8)
    assert len(made) == 0
    assert made.dropped == {
        "duplicate": 1,
        "prompt differs from its group's": 1,
        "reward is not finite": 1,
        "no response": 1,
        "no group_id": 1,
        "alone in its group": 1,
        "the split into prompt and response is not known": 1,
        "no pair with a margin": 1,
        "lengths too different": 1,
    }
    assert len(preference_pairs(TrajectoryBatch(rows), length_ratio=9)) == 1


scores = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), scores, st.integers(0, 5)), max_size=9), st.sampled_from([0, 0.3])
)
def test_all_pairs_are_what_two_loops_give(drawn: list[tuple[int, float, int]], margin: float) -> None:
    rows = [row(str(i), r, [token], group_id=str(g)) for i, (g, r, token) in enumerate(drawn)]
    first: dict[tuple[str | None, int], Trajectory] = {}
    for r in rows:
        first.setdefault((r.group_id, r.response_tokens[0]), r)
    kept = list(first.values())
    expected = {
        (a.id, b.id) for a in kept for b in kept if a.group_id == b.group_id and a.reward - b.reward > margin
    }
    found = pairs(*rows, pairing="all", margin=margin)
    assert len(found) == len(expected)
    assert set(found) == expected


def test_kto_labels() -> None:
    rows = TrajectoryBatch([row("a", 0.0), row("b", 0.5), row("c", 1.0, group_id=None)])
    made = kto_labels(rows, desirable=0.5)
    assert made.table["label"].to_pylist() == [False, True, True]
    made = kto_labels(rows, desirable=1.0, undesirable=0.5)
    assert made.table["id"].to_pylist() == ["a", "c"]
    assert made.dropped == {"between the thresholds": 1}
    with pytest.raises(InputError, match="undesirable is 2"):
        kto_labels(rows, desirable=1, undesirable=2)


def test_sft_rows() -> None:
    rows = TrajectoryBatch(
        [row("a", 0.0), row("b", 1.0), row("c", 1.0), row("d", 0.5), row("e", 0.0, group_id="h")]
    )
    assert sft_rows(rows, top=0.5).table["id"].to_pylist() == ["b", "c", "e"]
    assert sft_rows(rows, top=0.1).table["id"].to_pylist() == ["b", "e"]
    assert sft_rows(rows, min_reward=0.5).table["id"].to_pylist() == ["b", "c", "d"]
    both = sft_rows(rows, top=0.5, min_reward=0.5)
    assert both.table["id"].to_pylist() == ["b", "c"]
    assert both.dropped == {"not among the best": 3}


@pytest.mark.parametrize(
    "wrong", [{"pairing": "some"}, {"margin": -1}, {"margin": float("nan")}, {"length_ratio": 0.5}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        preference_pairs(TrajectoryBatch([]), **wrong)
    for options in ({}, {"top": 0}, {"top": 1.5}):
        with pytest.raises(InputError):
            sft_rows(TrajectoryBatch([]), **options)


def test_files_say_where_they_come_from(tmp_path: Any) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append([row("a", 0.0), row("b", 1.0), row("c", float("nan"))])
    made = preference_pairs(store.scan(where="length > 0"))
    made.write(tmp_path / "pairs.parquet")
    table = pq.read_table(tmp_path / "pairs.parquet")
    assert table.equals(made.table)
    said = json.loads(table.schema.metadata[b"trajstore.offline"])
    assert said["snapshot"] == store.scan().snapshot
    assert "length > 0" in said["source"]
    assert said["dropped"] == {"reward is not finite": 1}
    made.write(tmp_path / "pairs.jsonl")
    (line,) = (tmp_path / "pairs.jsonl").read_text().splitlines()
    assert json.loads(line) == table.to_pylist()[0]
    assert {"prompt": "q", "chosen": "answer b", "rejected": "answer a"}.items() <= json.loads(line).items()
    assert json.loads((tmp_path / ".pairs.jsonl.meta.json").read_text()) == said
    with pytest.raises(InputError, match="neither"):
        made.write(tmp_path / "pairs.csv")


def test_empty_sets_keep_their_columns() -> None:
    empty = TrajectoryBatch([])
    assert (
        preference_pairs(empty).table.schema
        == preference_pairs(TrajectoryBatch([row("a", 0), row("b", 1)])).table.schema
    )
    assert sft_rows(empty, top=1).table.schema == sft_rows(TrajectoryBatch([row("a", 0)]), top=1).table.schema


def test_step_labels_are_turns_that_earned_enough() -> None:
    turns = {
        "tokens": [1, 2, 3, 4, 5, 6],
        "loss_mask": [0, 1, 1, 0, 0, 1],
        "prompt_length": 1,
        "response_length": 5,
    }
    rows = [
        Trajectory(id="a", **turns, token_rewards=[0, 0.25, 0.5, 0, 0, -1]),
        Trajectory(id="b", prompt_tokens=[7], response_tokens=[8], token_rewards=[0, 1]),
        row("c", 1.0),
    ]
    made = step_labels(TrajectoryBatch(rows), lambda ids: " ".join(map(str, ids)))
    assert made.table.to_pylist() == [
        {"prompt": "1", "completions": ["2 3", "6"], "labels": [True, False], "id": "a"},
        {"prompt": "7", "completions": ["8"], "labels": [True], "id": "b"},
    ]
    assert made.dropped == {"no token_rewards": 1}
    assert len(step_labels(TrajectoryBatch(rows[2:]), str)) == 0
    high = step_labels(TrajectoryBatch(rows[:1]), str, threshold=0.75)
    assert high.table["labels"].to_pylist() == [[False, False]]


CHAT = [{"role": "user", "content": "q"}]


def chat(id: str, reward: float, *turns: dict[str, Any], **given: Any) -> Trajectory:
    return row(id, reward, messages=[*CHAT, *turns], **given)


def say(content: str, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_rows_with_messages_give_trl_s_conversational_form() -> None:
    rows = [
        chat("a", 0.0, say("no")),
        chat("b", 1.0, say("look"), say("found", "user"), say("yes")),
        replace(chat("c", 0.5, group_id=None), response=""),
    ]
    made = preference_pairs(TrajectoryBatch(rows))
    (pair,) = made.table.select(["prompt", "chosen", "rejected"]).to_pylist()
    assert pair == {
        "prompt": CHAT,
        "chosen": [say("look"), say("found", "user"), say("yes")],
        "rejected": [say("no")],
    }
    assert made.dropped == {"no messages, or none of an assistant": 1}
    (one, other) = kto_labels(TrajectoryBatch(rows[:2]), desirable=1.0).table.to_pylist()
    assert (one["completion"], one["label"], other["label"]) == ([say("no")], False, True)
    texts = preference_pairs(TrajectoryBatch(rows), form="text").table
    assert texts["chosen"].to_pylist() == ["answer b"]
    mixed = TrajectoryBatch([*rows[:2], row("d", 0.0)])
    assert sft_rows(mixed, min_reward=0).table["completion"].to_pylist() == [
        "answer a",
        "answer b",
        "answer d",
    ]
    some = sft_rows(mixed, min_reward=0, form="messages")
    assert (len(some), some.dropped) == (2, {"no messages, or none of an assistant": 1})
    with pytest.raises(InputError, match="form is 'chat'"):
        sft_rows(mixed, min_reward=0, form="chat")  # type: ignore[arg-type]  # on purpose


def split(*messages: dict[str, Any], **given: Any) -> Any:
    rows = TrajectoryBatch([replace(row("a", 1.0, messages=list(messages)), **given)])
    made = sft_rows(rows, min_reward=0, form="messages").table.to_pylist()
    return (made[0]["prompt"], made[0]["completion"]) if made else None


def test_messages_are_split_where_the_rows_prompt_ends() -> None:
    """An earlier conversation is the prompt's, whoever spoke in it; the response may be of several turns."""
    talk = [say("rules", "system"), say("hi", "user"), say("hello"), say("sum?", "user")]
    answer = [say("let me see"), say("2", "tool"), say("two")]
    assert split(*talk, *answer, prompt="rules\nhi\nhello\nsum?") == (talk, answer)
    assert split(*talk, *answer, prompt="rules\nhi") == (talk[:2], [*talk[2:], *answer])
    for other in ("", "<|im_start|>rules<|im_end|>"):  # the prompt's text is not that of the messages
        assert split(*talk, *answer, prompt=other) == (talk[:2], [*talk[2:], *answer])
    quiet = [say("go", "user"), say(""), say("done", "tool"), say("end")]
    assert split(*quiet, prompt="go") == (quiet[:1], quiet[1:])


def test_messages_of_a_prompt_only_are_answered_by_the_rows_text() -> None:
    """As TRL's hook stores them."""
    talk = [say("hi", "user"), say("hello"), say("sum?", "user")]
    assert split(*talk, prompt="", response="two") == (talk, [say("two")])
    assert split(say("hi", "user"), prompt="", response="two") == ([say("hi", "user")], [say("two")])
    ended = [*talk, say("two"), say("###STOP###", "user")]  # the user ends it, and the answer is among them
    assert split(*ended, prompt="", response="two") == (ended[:1], ended[1:])
    assert split(say("hi", "user"), prompt="hi", response="") is None


def test_pairs_come_back_as_they_were_read(tmp_path: Any) -> None:
    talk = [say("hi", "user"), say("hello"), say("sum?", "user")]
    pair = {"chosen": [*talk, say("two")], "rejected": [*talk, say("three")]}
    scores = {"score_chosen": 1.0, "score_rejected": 0.0}
    explicit = {"prompt": talk, "chosen": [say("two")], "rejected": [say("three")]}
    for number, read in enumerate((pair, explicit)):
        (tmp_path / "pairs.jsonl").write_text(json.dumps(read | scores) + "\n")
        ingest(tmp_path / "pairs.jsonl", tmp_path / f"s{number}", format="preference")
        (made,) = preference_pairs(TrajectoryStore.open(tmp_path / f"s{number}").scan()).table.to_pylist()
        assert (made["prompt"], made["chosen"], made["rejected"]) == (talk, [say("two")], [say("three")])


def test_rows_that_are_not_finished_are_no_answers() -> None:
    """A partial rollout's response is the beginning of another row's, and its reward no verdict."""
    cut = [row(name[0], 0.0, status=TrajectoryStatus(name)) for name in ("aborted", "failed", "generating")]
    rows = TrajectoryBatch([*cut, row("x", 1.0), row("y", 0.5, status=TrajectoryStatus.PENDING)])
    (pair,) = preference_pairs(rows).table.to_pylist()
    assert (pair["chosen_id"], pair["rejected_id"]) == ("x", "y")
    for made in (preference_pairs(rows), kto_labels(rows, desirable=1), sft_rows(rows, top=1)):
        assert made.dropped == {"not finished: aborted, failed or still generating": 3}


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sft_rows(TrajectoryBatch([row("a", 1.0)]), min_reward=0)
    names = {".sft.jsonl.meta.json", "sft.jsonl", "sft.parquet"}
    for name in ("sft.parquet", "sft.jsonl"):
        made.write(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == names
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fails(table: Any, path: Any) -> None:
        path.write_text("half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr("trajstore.offline.preference.pq.write_table", fails)
    monkeypatch.setattr("trajstore.offline.preference.json.dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(OSError, match="no space"):
        made.write(tmp_path / "sft.parquet")
    with pytest.raises(ZeroDivisionError):
        made.write(tmp_path / "sft.jsonl")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    sft_rows(TrajectoryBatch([row("b", 1.0)]), min_reward=0).write(tmp_path / "sft.jsonl")
    assert json.loads((tmp_path / "sft.jsonl").read_text())["id"] == "b", "what was there is replaced"
    assert {path.name for path in tmp_path.iterdir()} == names


def test_messages_keep_their_tool_calls() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"where": "here"}}}
    rows = [chat("a", 1.0, say("", tool_calls=[call]), say("a key", "tool"), say("yes"))]
    (made,) = sft_rows(TrajectoryBatch(rows), min_reward=1).table["completion"].to_pylist()
    assert made[0]["tool_calls"] == [call]
    assert made[2] == say("yes", tool_calls=None)
    other = chat("b", 1.0, say("", tool_calls=["look"]))
    with pytest.raises(InputError, match="differ too much to be one column"):
        sft_rows(TrajectoryBatch([*rows, other]), min_reward=1)


def test_text_that_is_not_known_is_null_and_tokens_that_are_not_known_are_none() -> None:
    tokens_only = [
        Trajectory(id=id, group_id="g", prompt_tokens=[1, 2], response_tokens=[token], reward=reward)
        for id, token, reward in (("a", 8, 0.0), ("b", 9, 1.0))
    ]
    (pair,) = preference_pairs(TrajectoryBatch(tokens_only)).table.to_pylist()
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (None, None, None)
    assert (pair["chosen_input_ids"], pair["rejected_input_ids"]) == ([9], [8])
    text = {"prompt": "q", "group_id": "g"}
    text_only = [
        Trajectory(id="a", response="short", reward=0.0, **text),
        Trajectory(id="b", response="short", reward=1.0, **text),
        Trajectory(id="c", response="long answer", reward=1.0, **text),
        Trajectory(id="d", response="", reward=0.0, **text),
        Trajectory(id="e", response="x", reward=0.0, **text | {"prompt": "another"}),
    ]
    made = preference_pairs(TrajectoryBatch(text_only), max_length=1)
    (pair,) = made.table.to_pylist()
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("q", "long answer", "short")
    assert pair["chosen_input_ids"] == []
    assert made.dropped == {"duplicate": 1, "no response": 1, "prompt differs from its group's": 1}


def test_datasets_loads_them(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    chats = TrajectoryBatch([chat("a", 0.0, say("no")), chat("b", 1.0, say("yes"))])
    plain = TrajectoryBatch([row("a", 0.0), row("b", 1.0)])
    sets = {
        f"{kind}_{form}": made
        for form, rows in (("text", plain), ("chat", chats))
        for kind, made in {
            "dpo": preference_pairs(rows),
            "kto": kto_labels(rows, desirable=1),
            "sft": sft_rows(rows, top=0.5),
        }.items()
    }
    for name, made in sets.items():
        for suffix, builder in ((".parquet", "parquet"), (".jsonl", "json")):
            (tmp_path / f"{name}{suffix}s").mkdir()
            made.write(tmp_path / f"{name}{suffix}s" / f"set{suffix}")
            found = datasets.load_dataset(
                builder,
                data_dir=str(tmp_path / f"{name}{suffix}s"),  # whatever lies beside it is no rows
                split="train",
                cache_dir=str(tmp_path / "cache"),
            )
            assert found.to_list() == made.table.to_pylist(), name


def test_a_trainers_length_counts_the_prompt() -> None:
    rows = [row("a", 1.0, [5, 6, 8]), row("b", 0.0, [5, 7, 8])]  # behind a prompt of two tokens
    for length, found in ((1, []), (3, []), (4, [("a", "b")]), (9, [("a", "b")])):
        assert pairs(*rows, max_length=length) == found, length
