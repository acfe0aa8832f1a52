"""Theme: types that drift between rows, files and appends (cases S*)."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from trajstore import ImportFormatError, SchemaError, Trajectory, TrajectoryBatch, TrajectoryStore
from trajstore.export import export
from trajstore.ingest import ingest
from trajstore.schema import BY_NAME


def rows(shard: list[dict[str, Any]], first: int) -> list[Trajectory]:
    return [
        Trajectory(
            id=str(first + i),
            response_tokens=[1] * len(r["lp"]),
            behavior_log_probs=r["lp"],
            reward=r["r"],
        )
        for i, r in enumerate(shard)
    ]


def lines(path: Path, *items: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.mark.parametrize("turned", [False, True])
def test_S02_integers_first_and_floats_later_lose_nothing(case: Any, tmp_path: Path, turned: bool) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    shards = case["shards"][:: -1 if turned else 1]
    for k, shard in enumerate(shards):
        store.append(rows(shard, 10 * k))
    found = [(t.reward, t.behavior_log_probs) for t in store.scan().to_trajectories()]
    expected = [(float(r["r"]), [float(x) for x in r["lp"]]) for shard in shards for r in shard]
    assert found == expected
    (tmp_path / "d").mkdir()
    for k, shard in enumerate(shards):  # the same as files, whose JSON has integers first
        lines(
            tmp_path / "d" / f"{k}.jsonl",
            *(
                {
                    "id": f"{k}-{i}",
                    "response_tokens": [1] * len(r["lp"]),
                    "behavior_log_probs": r["lp"],
                    "reward": r["r"],
                }
                for i, r in enumerate(shard)
            ),
        )
    ingest(tmp_path / "d", tmp_path / "t")
    read = TrajectoryStore.open(tmp_path / "t").scan().to_trajectories()
    assert [(t.reward, t.behavior_log_probs) for t in read] == expected


def test_S03_appending_floats_never_truncates(case: Any, tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append(rows(case["table_first"], 0))
    store.append(rows(case["append"], 10))
    last = store.scan().to_trajectories()[-1]
    assert (last.reward, last.behavior_log_probs) == (0.7, case["append"][0]["lp"])
    table = TrajectoryBatch(rows(case["append"], 20)).to_arrow()
    tokens = table.set_column(
        table.schema.get_field_index("tokens"), "tokens", pa.array([[0.5, 1.5]], pa.list_(pa.float64()))
    )
    with pytest.raises(SchemaError, match="tokens"):
        store.append(tokens)
    whole = table.set_column(table.schema.get_field_index("reward"), "reward", pa.array([2], pa.int64()))
    store.append(whole)
    assert store.scan().to_trajectories()[-1].reward == 2.0
    huge = table.set_column(
        table.schema.get_field_index("values"),
        "values",
        pa.array([[1e300, 0.0]], pa.list_(pa.field("element", pa.float64(), False))),
    )
    with pytest.raises(SchemaError, match="does not fit float"):
        store.append(huge)
    for name, wrong in (("terminated", pa.array([2])), ("response", pa.array([5]))):
        with pytest.raises(SchemaError, match=name):
            store.append(table.set_column(table.schema.get_field_index(name), name, wrong))
    assert store.count() == 4
    assert BY_NAME["reward"].type == pa.float64()


def test_S05_metadata_comes_back_exactly(case: Any, tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append([Trajectory(id=str(i), metadata=r["metadata"]) for i, r in enumerate(case["rows"])])
    assert [t.metadata for t in store.scan().to_trajectories()] == [r["metadata"] for r in case["rows"]]


def test_S06_types_are_kept_row_by_row(case: Any, tmp_path: Path) -> None:
    case["rows"].append({"messages": [{"role": "assistant", "tool_calls": []}]})  # content is missing
    path = lines(tmp_path / "a.jsonl", *({"id": str(i)} | r for i, r in enumerate(case["rows"])))
    ingest(path, tmp_path / "s", format="trajstore-jsonl")
    back = TrajectoryStore.open(tmp_path / "s").scan().to_trajectories()
    assert [t.metadata for t in back[:4]] == [r["metadata"] for r in case["rows"][:4]]
    assert [t.messages for t in back[4:]] == [r["messages"] for r in case["rows"][4:]]
    assert [m[0].get("content", "missing") for m in (t.messages for t in back[4:])] == [None, "", "missing"]


def test_S07_pythons_json_dialect_is_read_and_written_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rewards = ["NaN", "-Infinity", "1e400", "0.5"]
    text = [
        f'{{"id": "{i}", "reward": {r}, "metadata": {{"n": 9007199254740993}}}}'
        for i, r in enumerate(rewards)
    ]
    path.write_text("\n".join(text) + "\n")
    report = ingest(path, tmp_path / "s", format="trajstore-jsonl")
    assert report.commit.not_finite == {"reward": 3}
    assert report.no_reward_at == [f"{path}:{line}" for line in (1, 2, 3)]
    store = TrajectoryStore.open(tmp_path / "s")
    back = store.scan().to_trajectories()
    assert math.isnan(back[0].reward)
    assert [t.reward for t in back[1:]] == [-math.inf, math.inf, 0.5]
    assert all(t.metadata == {"n": 9007199254740993} for t in back)
    export(store.scan(), tmp_path / "b.jsonl", "jsonl")
    ingest(tmp_path / "b.jsonl", tmp_path / "t", format="trajstore-jsonl")
    twice = TrajectoryStore.open(tmp_path / "t").scan().to_trajectories()
    assert str(twice) == str(back)
    path.write_text('{"id": "a", "id": "b"}\n')
    with pytest.raises(ImportFormatError, match=r"a.jsonl:1: .*'id'"):
        ingest(path, tmp_path / "u", format="trajstore-jsonl")


def test_S09_a_field_that_is_null_for_thousands_of_lines(tmp_path: Path) -> None:
    nulls = (
        {"id": str(i), "source": None, "metadata": {"note": None, "pad": "x" * 300}} for i in range(5000)
    )
    (tmp_path / "d").mkdir()
    lines(tmp_path / "d" / "a.jsonl", *nulls, {"id": "5000", "source": "hi", "metadata": {"note": "hi"}})
    lines(tmp_path / "d" / "b.jsonl", *({"id": f"b{i}", "metadata": {"note": []}} for i in range(10)))
    assert ingest(tmp_path / "d", tmp_path / "s").commit.rows == 5011
    found = TrajectoryStore.open(tmp_path / "s").scan(where="id = '5000' or id = 'b3'").to_trajectories()
    assert [(t.source, t.metadata) for t in found] == [("hi", {"note": "hi"}), (None, {"note": []})]
