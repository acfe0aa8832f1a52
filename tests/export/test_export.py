"""Each export holds what its format can: it is read as others read it, and imported again."""

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.strategies import same, trajectories
from trajstore import (
    InputError,
    PolicyVersion,
    StoreExistsError,
    Trajectory,
    TrajectoryStatus,
    TrajectoryStore,
    ValidationError,
)
from trajstore.codec import normalize
from trajstore.export import FORMATS, SetOptions, export
from trajstore.ingest import ingest
from trajstore.schema import BY_NAME, Column, list_of
from trajstore.store import disk


def store_of(path: Path, rows: list[Trajectory], **options: Any) -> TrajectoryStore:
    store = TrajectoryStore.create(path, **options)
    if rows:
        store.append(rows)
    return store


def again(out: Path, path: Path, format: str = "auto") -> list[Trajectory]:
    """What an import of an export gives."""
    ingest(out, path, format=format)
    return TrajectoryStore.open(path).scan().to_trajectories()


def rollout(i: int, **more: Any) -> Trajectory:
    """A row as a GRPO run has it; slime and ATIF can hold all of it."""
    size = 3 + i % 3
    fields: dict[str, Any] = {
        "id": f"row-{i}",
        "group_id": f"g_{i // 2}",
        "prompt": f"what is {i // 2}?",
        "response": f"it is {i}",
        "tokens": [5, 6, *range(10, 10 + size)],
        "prompt_length": 2,
        "response_length": size,
        "loss_mask": [0, 0, 1, 0, *[1] * (size - 2)],
        "behavior_log_probs": [0.0, 0.0, -0.25, 0.0, *[-1.5] * (size - 2)],
        "reward": i / 2,
        "version": PolicyVersion(3 + i),
        "status": TrajectoryStatus.COMPLETED,
        "finish_reason": "stop" if i % 2 else "length",
        "terminated": bool(i % 2),
        "metadata": {"task": f"t{i}", "step": 8},
    }
    return Trajectory(**fields | more)


# Everything


@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.generate],  # shrinking writes hundreds of stores
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(trajectories(), min_size=1, max_size=5, unique_by=lambda t: t.id))
def test_jsonl_and_hf_hold_every_row(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Trajectory]
) -> None:
    folder = tmp_path_factory.mktemp("e")
    store = store_of(folder / "s", rows)
    stored = store.scan().to_trajectories()
    for name, out in (("jsonl", folder / "rows.jsonl"), ("hf", folder / "hf")):
        done = export(store.scan(), out, name)
        assert (done.rows, done.left_behind) == (len(rows), {})
        imported = again(out, folder / f"again-{name}", {"jsonl": "trajstore-jsonl", "hf": "auto"}[name])
        for before, after in zip(stored, imported, strict=True):
            for field, value in vars(normalize(before)).items():
                assert same(value, getattr(normalize(after), field)), (name, field)


def test_hf_loads_with_datasets_and_keeps_columns_of_ones_own(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    extra = [Column("entropy", list_of(pa.float32()), role="token"), Column("task", pa.string())]
    store = TrajectoryStore.create(tmp_path / "s", extra=extra)
    table = store_of(tmp_path / "plain", [rollout(0), rollout(1)]).scan().to_arrow()
    names = [f.name for f in table.schema if not BY_NAME[f.name].stamp]
    table = table.select(names).append_column(store.schema.field("task"), pa.array(["x", "y"]))
    entropy = pa.array([[0.5] * n for n in table["length"].to_pylist()], list_of(pa.float32()))
    store.append(table.append_column(store.schema.field("entropy"), entropy))
    done = export(store.scan(), tmp_path / "hf", "hf")
    assert (done.files, done.left_behind) == (1, {})
    loaded = datasets.load_dataset(str(tmp_path / "hf"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["id"][:] == ["row-0", "row-1"]
    assert loaded[1]["tokens"] == rollout(1).tokens
    assert (loaded[0]["task"], loaded[0]["entropy"]) == ("x", [0.5] * 5)
    kept = again(tmp_path / "hf", tmp_path / "again")
    assert [t.metadata["task"] for t in kept if t.metadata] == ["t0", "t1"], "the row's own metadata first"
    assert export(store.scan(), tmp_path / "x.jsonl", "jsonl").left_behind == {"entropy": 2, "task": 2}


def test_shards_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.export.hf.SHARD_TOKENS", 8000)  # of six thousand a batch: two are full
    store = store_of(tmp_path / "s", [rollout(i) for i in range(5000)])
    seen: list[tuple[int, int]] = []
    done = export(store.scan(), tmp_path / "hf", "hf", report=lambda n, total: seen.append((n, total)))
    assert done.files == 3
    assert seen == [(min(n, 5000), 5000) for n in range(0, 6000, 1024)]
    shards = [pq.read_table(p) for p in sorted((tmp_path / "hf" / "data").iterdir())]
    assert [len(shard) for shard in shards] == [2048, 2048, 904]
    read = pa.concat_tables(shards)
    assert read["id"].to_pylist() == [f"row-{i}" for i in range(5000)]


def test_few_rows_are_in_memory_when_they_are_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.export.selection.TOKENS", 12)
    rows = [rollout(i) for i in range(6)]  # of 5, 6, 7, 5, 6 and 7 tokens
    rows.insert(3, rollout(6, tokens=[*range(30)], prompt_length=2, response_length=28, loss_mask=[],
                           behavior_log_probs=[]))  # fmt: skip
    seen: list[int] = []
    scan = store_of(tmp_path / "s", rows).scan()
    export(scan, tmp_path / "out", "jsonl", report=lambda n, total: seen.append(n))
    assert seen == [0, 2, 3, 4, 6, 7]  # 11, 7, 30, 11 and 7 tokens
    assert [t.id for t in again(tmp_path / "out", tmp_path / "a")] == [row.id for row in rows]


# slime


def test_slime_loads_with_weights_only_and_imports_again(tmp_path: Path) -> None:
    size = 4
    rows = [
        rollout(0),
        rollout(1, log_probs=[0.0, 0.0, *[-0.25] * size], advantages=[0.0, 0.0, *[0.5] * size]),
        rollout(2, loss_mask=[0] * 7, action_mask=[0, 0, *[1] * 5]),
        rollout(3, reward=math.nan, group_id=None, loss_mask=[], status=TrajectoryStatus.ABORTED,
                finish_reason="abort", terminated=False),
        rollout(4, version=None, version_span=(2, 6)),
    ]  # fmt: skip
    store = store_of(tmp_path / "s", rows)
    done = export(store.scan(), tmp_path / "out", "slime")
    assert (done.rows, done.files, done.left_behind) == (5, 2, {})
    dump = torch.load(tmp_path / "out" / "rollout_data" / "0.pt", weights_only=True)
    assert dump["rollout_id"] == 0
    first = dump["samples"][0]
    assert first["tokens"] == rows[0].tokens
    assert first["response_length"] == len(first["loss_mask"]) == len(first["rollout_log_probs"]) == 3
    assert [s["status"] for s in dump["samples"]] == [
        "truncated",
        "completed",
        "truncated",
        "aborted",
        "truncated",
    ]
    assert [s["group_index"] for s in dump["samples"]] == [0, 0, 1, None, 2]
    assert [s["weight_versions"] for s in dump["samples"]][3:] == [["6"], ["2", "6"]]
    assert dump["samples"][2]["remove_sample"]
    assert dump["samples"][2]["loss_mask"] == [1] * 5
    after = again(tmp_path / "out", tmp_path / "again")
    fields = (
        *("prompt", "response", "tokens", "prompt_length", "loss_mask", "action_mask", "reward", "status"),
        *(
            "behavior_log_probs",
            "log_probs",
            "advantages",
            "values",
            "returns",
            "finish_reason",
            "terminated",
        ),
    )
    for before, found in zip(store.scan().to_trajectories(), after, strict=True):
        for name in fields:
            assert same(getattr(before, name), getattr(found, name)), name
        assert found.metadata is not None
        assert (found.metadata["id"], found.metadata["metadata"]) == (before.id, before.metadata)
    assert [t.version for t in after[:4]] == [t.version for t in rows[:4]]
    assert after[4].version_span == (2, 6)
    assert after[0].group_id == after[1].group_id != after[2].group_id
    assert after[3].group_id is None


def test_what_slime_cannot_hold_is_refused_or_told(tmp_path: Path) -> None:
    store = store_of(tmp_path / "a", [rollout(0), rollout(1, loss_mask=[1] * 6)])
    with pytest.raises(ValidationError, match=r"'row-1'.*ones on the prompt"):
        export(store.scan(), tmp_path / "out", "slime")
    unknown = replace(rollout(2), prompt_length=0, response_length=0)
    with pytest.raises(ValidationError, match="where the response begins"):
        export(store_of(tmp_path / "b", [unknown]).scan(), tmp_path / "out", "slime")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"], "nothing half-made is left"
    kept = [
        rollout(3, action_mask=[0, 0, 1, 1, 1], status=TrajectoryStatus.GENERATING, token_rewards=[0.0] * 5),
        rollout(4, log_probs=[-0.5] * 6),
    ]
    done = export(store_of(tmp_path / "c", kept).scan(), tmp_path / "out", "slime")
    assert done.left_behind == {"action_mask": 1, "status": 1, "token_rewards": 1, "log_probs": 1}


# Texts


def test_verl_lines_import_again(tmp_path: Path) -> None:
    rows = [
        rollout(0, metadata={"step": 8, "acc": 1, "gts": "42"}),
        rollout(1, reward=math.inf, metadata=None),
        rollout(2, group_id="h", prompt="a\nb", response='"😀"'),
    ]
    store = store_of(tmp_path / "s", rows)
    done = export(store.scan(), tmp_path / "8.jsonl", "verl")
    assert done.left_behind["tokens"] == done.left_behind["behavior_log_probs"] == 3
    assert "reward" not in done.left_behind
    lines = [json.loads(line) for line in (tmp_path / "8.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "input": "what is 0?", "output": "it is 0", "gts": "42", "score": 0.0, "step": 8,
        "request_id": "row-0", "uid": "g_0_0_0", "acc": 1,
    }  # fmt: skip
    assert lines[1]["step"] is None
    after = again(tmp_path / "8.jsonl", tmp_path / "again")
    for before, found in zip(rows, after, strict=True):
        assert found.id.endswith(before.id)
        assert (found.prompt, found.response, found.reward) == (before.prompt, before.response, before.reward)
    assert after[0].group_id == after[1].group_id != after[2].group_id
    twice = store_of(tmp_path / "t", after)
    export(twice.scan(), tmp_path / "9.jsonl", "verl")
    assert (tmp_path / "9.jsonl").read_text() == (tmp_path / "8.jsonl").read_text(), "and out again the same"


def test_trl_completions_import_again(tmp_path: Path) -> None:
    rows = [
        rollout(0, advantages=[0.0, 0.0, 0.5, 9.0, 0.5]),  # the odd one is masked
        rollout(1, advantages=[0.0, 0.0, 1.0, 0.0, 2.0, 1.0]),
        rollout(2, reward=math.nan),
    ]
    store = store_of(tmp_path / "s", rows)
    done = export(store.scan(), tmp_path / "completions_00008.parquet", "trl")
    assert done.left_behind["advantages"] == 1
    table = pq.read_table(tmp_path / "completions_00008.parquet")
    assert table["advantage"].to_pylist() == [0.5, None, None]
    assert table["step"].to_pylist() == [8, 8, 8]
    after = again(tmp_path / "completions_00008.parquet", tmp_path / "again")
    for before, found in zip(rows, after, strict=True):
        assert (found.prompt, found.response) == (before.prompt, before.response)
        assert same(float(found.reward), float(before.reward))
    assert after[0].group_id == after[1].group_id != after[2].group_id


FIXTURES = Path(__file__).parents[1] / "formats"


def test_trl_keeps_a_column_for_each_reward_function(tmp_path: Path) -> None:
    ingest(FIXTURES / "trl", tmp_path / "s")
    store = TrajectoryStore.open(tmp_path / "s")
    out = tmp_path / "completions_00008.parquet"
    done = export(store.scan(), out, "trl")
    written = pq.read_table(FIXTURES / "trl/completions/completions_00008.parquet").to_pydict()
    made = pq.read_table(out).to_pydict()
    assert {name: made[name] for name in written} == written
    assert list(made) == [*written, "id"]
    before = store.scan().to_trajectories()
    for old, new in zip(before, again(out, tmp_path / "again"), strict=True):
        assert new.reward == old.reward
        assert {**new.metadata, "id": ""} == {**old.metadata, "id": ""}
    assert "metadata" not in done.left_behind


def test_trl_rewards_that_are_not_summed_stay_one(tmp_path: Path) -> None:
    named = [
        {"a": 1.0, "b": 0.5},  # their sum
        {"a": 1.0, "b": math.nan},  # b gave nothing
        {"a": 1.0, "b": 0.5},  # weighted
        {"c": 2, "prompt": 1.0},  # a name that is taken
        {"a": "good"},
        {"reward": 3.0},
        None,
    ]
    rewards = [1.5, 1.0, 1.25, 3.0, 7.0, 3.0, 0.25]
    rows = [
        rollout(i, reward=reward, metadata={"step": 8, "rewards": one} if one else None)
        for i, (one, reward) in enumerate(zip(named, rewards, strict=True))
    ]
    out = tmp_path / "completions_00008.parquet"
    done = export(store_of(tmp_path / "s", rows).scan(), out, "trl")
    table = pq.read_table(out)
    assert table.schema.names[3:-2] == ["a", "b", "reward"]
    assert table["reward"].to_pylist() == [None, None, 1.25, 3.0, 7.0, 3.0, 0.25]
    assert table["a"].to_pylist() == [1.0, 1.0, *[None] * 5]
    assert done.left_behind["metadata"] == 3
    after = again(out, tmp_path / "again", "trl")
    assert [row.reward for row in after] == rewards
    assert after[0].metadata["rewards"] == named[0]
    assert same(after[1].metadata["rewards"], named[1])


@pytest.mark.parametrize("format", ["verl", "trl"])
def test_tokens_without_text_are_no_text(tmp_path: Path, format: str) -> None:
    store = store_of(tmp_path / "s", [rollout(0), rollout(1, prompt="", response="")])
    with pytest.raises(ValidationError, match=r"'row-1'.*tokens and no text"):
        export(store.scan(), tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


# ATIF

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is 6 * 7?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": {"a": 6, "b": 7}}}]},
    {"role": "tool", "content": "42", "tool_call_id": "c1"},
    {"role": "assistant", "content": "it is 42"},
]  # fmt: skip


def test_atif_imports_again_with_turns_and_tools(tmp_path: Path) -> None:
    rows = [
        rollout(3, messages=TALK, loss_mask=[0, 0, 1, 0, 1], response="it is 42"),
        rollout(4, loss_mask=[0, 0, 1, 1, 1, 1]),
        rollout(5, messages=TALK, loss_mask=[0, 0, 1, 1, 1, 1, 1]),  # more messages than runs
        rollout(6, tokens=[], prompt_length=0, response_length=0, loss_mask=[], behavior_log_probs=[]),
        rollout(7, loss_mask=[0] * 6, action_mask=[0, 0, 1, 1, 1, 1]),
    ]
    store = store_of(tmp_path / "s", rows)
    done = export(store.scan(columns=None), tmp_path / "out", "atif")
    assert (done.rows, done.files) == (5, 5)
    assert done.left_behind == {"finish_reason": 5, "terminated": 5, "version_id": 5}
    first = json.loads((tmp_path / "out" / "000000" / "agent" / "trajectory.json").read_text())
    assert [step["step_id"] for step in first["steps"]] == [1, 2, 3, 4]
    assert [step["source"] for step in first["steps"]] == ["system", "user", "agent", "agent"]
    assert first["steps"][2]["observation"]["results"] == [{"content": "42", "source_call_id": "c1"}]
    assert first["steps"][3]["metrics"]["prompt_token_ids"] == rows[0].tokens[:4]
    assert first["steps"][3]["metrics"]["completion_token_ids"] == rows[0].tokens[4:]
    after = again(tmp_path / "out", tmp_path / "again")
    stored = store.scan().to_trajectories()
    assert [t.id.rpartition(":")[2] for t in after] == [t.id for t in rows]
    for before, found in zip(stored, after, strict=True):
        for name in ("tokens", "prompt_length", "reward", "behavior_log_probs"):
            assert same(getattr(before, name), getattr(found, name)), (before.id, name)
        assert before.loss_mask == found.loss_mask
        assert found.metadata is not None
        assert found.metadata["extra"]["metadata"] == before.metadata
    assert after[0].messages == TALK
    assert after[4].action_mask == rows[4].action_mask
    assert after[2].metadata is not None
    assert after[2].metadata["extra"]["messages"] == TALK


def test_what_atif_cannot_say_is_counted(tmp_path: Path) -> None:
    rows = [
        rollout(3, loss_mask=[0, 0, 1, 0, 1], action_mask=[0, 0, 1, 1, 1]),
        rollout(6, loss_mask=[0, 0, 1, 0, 0]),
    ]
    done = export(store_of(tmp_path / "s", rows).scan(columns=None), tmp_path / "out", "atif")
    assert (done.left_behind["loss_mask"], done.left_behind["tokens"]) == (1, 1)


# Sets for trainers


def test_sets_are_those_of_offline_and_load_with_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    from trajstore.offline import ILQLDataset, ilql_dataset

    values = {"values": [0.0] * 5, "log_probs": [-1.0] * 5}
    rows = [rollout(6 * i + j, id=f"{i}-{j}", group_id=f"g{i}", reward=float(j),
                    tokens=[5, 6, 10, 11, 12 + j], response_length=3, loss_mask=[0, 0, 1, 1, 1],
                    behavior_log_probs=[], **values)
            for i in range(3) for j in range(3)]  # fmt: skip
    scan = store_of(tmp_path / "s", rows).scan()
    made = {}
    for name, suffix, options in (
        ("ilql", "parquet", SetOptions()), ("ppo", "parquet", SetOptions()), ("dpo", "jsonl", SetOptions()),
        ("kto", "parquet", SetOptions(min_reward=1.0)), ("sft", "parquet", SetOptions(top=0.34)),
    ):  # fmt: skip
        out = tmp_path / f"{name}.{suffix}"
        done = export(scan, out, name, options=options)
        kind = "json" if suffix == "jsonl" else suffix
        loaded = datasets.load_dataset(
            kind, data_files=str(out), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert len(loaded) == done.rows
        made[name] = loaded
    assert len(made["ilql"]) == len(made["ppo"]) == len(made["kto"]) == 9
    table = pq.read_table(tmp_path / "ilql.parquet")
    assert ILQLDataset(table).table.equals(ilql_dataset(scan).table)
    assert made["ppo"][4]["response_tensors"] == [10, 11, 13]
    assert made["ppo"][4]["query_tensors"] == [5, 6]
    assert [(r["chosen_id"], r["rejected_id"]) for r in made["dpo"]] == [
        (f"{i}-2", f"{i}-0") for i in range(3)
    ]
    assert json.loads((tmp_path / ".dpo.jsonl.meta.json").read_text())["kind"] == "dpo"
    assert made["kto"]["label"][:3] == [False, True, True]
    assert made["sft"]["id"][:] == [f"{i}-2" for i in range(3)]
    with pytest.raises(InputError, match="kto needs min_reward"):
        export(scan, tmp_path / "x.parquet", "kto")
    with pytest.raises(InputError, match=r"does not end with \.parquet"):
        export(scan, tmp_path / "x", "ilql")


# Whole or not at all


def test_nothing_is_replaced(tmp_path: Path) -> None:
    scan = store_of(tmp_path / "s", [rollout(0)]).scan()
    (tmp_path / "there").write_text("mine")
    for format in FORMATS:
        with pytest.raises(StoreExistsError):
            export(scan, tmp_path / "there", format)
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(InputError, match="format is 'csv'"):
        export(scan, tmp_path / "x", "csv")
    with pytest.raises(InputError, match="not a local path"):
        export(scan, "s3://bucket/x", "jsonl")


def test_one_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    scan = store_of(tmp_path / "s", [rollout(i) for i in range(3)]).scan()

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    for format in ("jsonl", "hf", "slime", "atif"):
        with pytest.raises(KeyboardInterrupt):
            export(scan, tmp_path / "out", format, report=stop)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]


def test_what_lies_beside_a_set_is_not_replaced_either(tmp_path: Path) -> None:
    scan = store_of(tmp_path / "s", [rollout(i) for i in range(3)]).scan()
    (tmp_path / ".best.jsonl.meta.json").write_text("mine")
    with pytest.raises(StoreExistsError, match=r"^\S+\.best\.jsonl\.meta\.json exists\n"):
        export(scan, tmp_path / "best.jsonl", "sft", options=SetOptions(min_reward=0.5))
    assert (tmp_path / ".best.jsonl.meta.json").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".best.jsonl.meta.json", "s"]
    export(scan, tmp_path / "good.jsonl", "sft", options=SetOptions(min_reward=0.5))
    assert sorted(p.name for p in tmp_path.glob("*good*")) == [".good.jsonl.meta.json", "good.jsonl"]


KILLED = """
import os, signal, sys
from trajstore import TrajectoryStore
from trajstore.export import export
def stop(done, total):
    if done:
        os.kill(os.getpid(), signal.SIGKILL)
export(TrajectoryStore.open(sys.argv[1]).scan(), sys.argv[2], sys.argv[3], report=stop)
"""


@pytest.mark.parametrize("format", ["jsonl", "hf"])
def test_one_that_was_killed_leaves_no_half_and_the_next_sweeps_it(tmp_path: Path, format: str) -> None:
    scan = store_of(tmp_path / "s", [rollout(i) for i in range(3)]).scan()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "s"), str(tmp_path / "out"), format]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.glob(".out-*"))) == 2
    assert export(scan, tmp_path / "out", format).rows == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "s"]


@pytest.mark.parametrize("format", FORMATS)
def test_every_export_is_synced_before_it_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    done: list[tuple[str, str]] = []
    real = disk.sync
    monkeypatch.setattr(disk, "sync", lambda path: (done.append(("sync", path.name)), real(path)))
    move = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda path, to: (done.append(("move", path.name)), move(path, to))[1]
    )
    name = "out.parquet" if FORMATS[format].holds is None else "out"
    rows = [rollout(i, id=f"r{i}", group_id="g", reward=float(i), values=[0.5] * (5 + i)) for i in range(2)]
    scan = store_of(tmp_path / "s", rows).scan()
    done.clear()
    made = export(scan, tmp_path / name, format, options=SetOptions(min_reward=0.5, log_probs="behavior"))
    assert made.files
    synced = [what for kind, what in done[: done.index(("move", name))] if kind == "sync"]
    files = [made.path] if made.path.is_file() else [p for p in made.path.rglob("*") if p.is_file()]
    assert sorted(p.name for p in files) == sorted(n for n in synced if n in {p.name for p in files})
    assert done[-1] == ("sync", tmp_path.name)


def test_an_empty_selection_is_an_empty_file(tmp_path: Path) -> None:
    scan = store_of(tmp_path / "s", [rollout(0)]).scan("reward > 99")
    assert export(scan, tmp_path / "none.jsonl", "jsonl").rows == 0
    assert (tmp_path / "none.jsonl").read_text() == ""
    assert export(scan, tmp_path / "hf", "hf").rows == 0
    assert pq.read_table(tmp_path / "hf" / "data" / "train-00000.parquet").num_rows == 0


@pytest.mark.parametrize("format", [f for f, what in FORMATS.items() if what.holds])
def test_the_account_adds_up(tmp_path: Path, format: str) -> None:
    full = rollout(
        0, messages=TALK, values=[0.5] * 5, token_rewards=[0.0] * 5, bootstrap_value=0.5, source="x",
        generation_time_ms=3.0, parent_id="p", group_size=4, log_probs_version=3, returns=[0.0] * 5,
    )  # fmt: skip
    done = export(store_of(tmp_path / "s", [full]).scan(), tmp_path / "out", format)
    held = FORMATS[format].holds
    assert held is not None
    for name in ("messages", "token_rewards", "bootstrap_value", "source", "generation_time_ms", "parent_id"):
        assert (name in done.left_behind) != (name in held), name
