"""The handle: create, open, append, count, history, at, quarantine; and many processes at once."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from trajstore import (
    ConflictError,
    FormatVersionError,
    InputError,
    LengthMismatchError,
    PartialTrajectory,
    PolicyVersion,
    QueryError,
    SchemaError,
    StoreExistsError,
    StoreNotFoundError,
    Trajectory,
    TrajectoryBatch,
    TrajectoryStatus,
    TrajectoryStore,
    ValidationError,
)
from trajstore.codec import normalize
from trajstore.schema import Column, list_of


def rollout(i: int, version: int = 0, **more: object) -> Trajectory:
    length = 3 + i % 4
    return Trajectory(
        id=f"row-{i}",
        group_id=f"group-{i // 4}",
        prompt_tokens=[1, 2],
        response_tokens=list(range(length)),
        behavior_log_probs=[-0.5] * length,
        reward=float(i),
        version=PolicyVersion(version),
        status=TrajectoryStatus.COMPLETED,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    return TrajectoryStore.create(tmp_path / "store")


def test_append_then_scan_gives_the_same_trajectories_in_order(store: TrajectoryStore) -> None:
    given = [rollout(i, version=9 - i % 5) for i in range(20)]
    commit = store.append(given[:15])
    store.append(given[15:])
    assert (commit.snapshot, commit.rows, commit.already_in) == (1, 15, False)
    assert commit.bytes == sum(f.stat().st_size for f in store.path.glob("part-*")) - sum(
        f.bytes for f in store._table.files() if f.snapshot == 2
    )
    assert store.scan().to_trajectories() == [normalize(t) for t in given]
    assert store.count() == 20


def test_order_of_arrival_survives_the_version_order_inside_files(store: TrajectoryStore) -> None:
    store.append([rollout(i, version=i * 7 % 5) for i in range(10)])
    stored = store._table.files()[0]
    raw = pa.parquet.read_table(store.path / stored.name)
    assert raw["oldest_version_id"].to_pylist() == sorted(raw["oldest_version_id"].to_pylist())
    assert store.scan(columns=["id"]).to_arrow()["id"].to_pylist() == [f"row-{i}" for i in range(10)]


def test_partial_trajectories_come_back_as_such(store: TrajectoryStore) -> None:
    partial = PartialTrajectory(
        id="p", tokens=[1, 2, 3], prompt_length=1, status=TrajectoryStatus.ABORTED, start_rollout_id="p",
        continuation_count=2, continuation_prompt="go on", kv_cache_ref="cache-7",
    )  # fmt: skip
    store.append([partial, rollout(1)])
    back = store.scan().to_trajectories()
    assert back == [normalize(partial), normalize(rollout(1))]
    assert isinstance(back[0], PartialTrajectory)
    assert not isinstance(back[1], PartialTrajectory)


def test_nothing_is_committed_when_one_row_is_bad(store: TrajectoryStore) -> None:
    store.append([rollout(0)])
    files = sorted(store.path.rglob("*"))
    bad = rollout(2, log_probs=[-1.0])
    with pytest.raises(
        LengthMismatchError, match=r"trajectory 1 \(id 'row-2'\), column 'log_probs'"
    ) as error:
        store.append([rollout(1), bad, rollout(3)])
    assert error.value.row == 1
    assert sorted(store.path.rglob("*")) == files
    assert store.count() == 1
    store.append([rollout(1)])
    assert store.count() == 2


def test_a_bad_row_in_a_later_chunk_leaves_no_file(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.store.append.CHUNK_ROWS", 4)
    monkeypatch.setattr("trajstore.store.append.FILE_BYTES", 1)
    monkeypatch.setattr("trajstore.store.files.GATHER_ROWS", 1)
    rows = [rollout(i) for i in range(10)]
    rows[9].loss_mask = [1]
    with pytest.raises(ValidationError, match="trajectory 9"):
        store.append(iter(rows))
    assert not list(store.path.glob("part-*"))
    assert store.append(iter(rows[:9])).rows == 9
    assert len(list(store.path.glob("part-*.parquet"))) == 3
    assert [t.id for t in store.scan().to_trajectories()] == [f"row-{i}" for i in range(9)]


def test_a_bad_row_in_a_later_chunk_of_arrow_data_is_named_by_its_place(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.store.append.CHUNK_ROWS", 4)
    table = TrajectoryBatch([rollout(i) for i in range(10)]).to_arrow()
    lengths = table["length"].to_pylist()
    lengths[9] += 1
    at = table.schema.get_field_index("length")
    table = table.set_column(at, table.schema.field(at), pa.array(lengths, table.schema.field(at).type))
    with pytest.raises(ValidationError, match=r"trajectory 9 \(id 'row-9'\)") as caught:
        store.append(table)
    assert caught.value.row == 9
    assert not list(store.path.glob("part-*"))


def test_quarantine_commits_the_good_rows_and_keeps_the_bad_with_reasons(store: TrajectoryStore) -> None:
    rows = [rollout(i) for i in range(9)]
    rows[2].behavior_log_probs = [-1.0, None, -1.0, -1.0, -1.0]  # type: ignore[list-item]
    rows[7].tokens = [1, 2**31]
    commit = store.append(rows, on_error="quarantine")
    assert (commit.rows, commit.quarantined) == (7, 2)
    assert [t.id for t in store.scan().to_trajectories()] == [f"row-{i}" for i in (0, 1, 3, 4, 5, 6, 8)]
    kept = store.quarantined().to_pylist()
    assert [(k["row"], k["id"], k["column"]) for k in kept] == [
        (2, "row-2", "behavior_log_probs"),
        (7, "row-7", "tokens"),
    ]
    assert "None at index 1" in kept[0]["reason"]
    assert json.loads(kept[1]["trajectory"])["tokens"] == [1, 2**31]
    assert Trajectory.from_dict(json.loads(kept[1]["trajectory"])).id == "row-7"


def test_quarantine_of_every_row_commits_nothing_but_the_writers_number(store: TrajectoryStore) -> None:
    bad = [Trajectory(id="x", tokens=[-1])]
    assert store.append(bad, on_error="quarantine").rows == 0
    assert store.snapshot == 1
    store.append(bad, on_error="quarantine", writer_id="w", batch_no=0)
    resent = store.append(bad, on_error="quarantine", writer_id="w", batch_no=0)
    assert resent.already_in
    assert len(store.quarantined()) == 2
    assert store.count() == 0


def test_a_resent_batch_adds_nothing_and_a_gap_is_refused(store: TrajectoryStore) -> None:
    first = store.append([rollout(0)], writer_id="w", batch_no=0)
    again = TrajectoryStore.open(store.path).append([rollout(0)], writer_id="w", batch_no=0)
    assert (first.already_in, again.already_in, again.rows) == (False, True, 0)
    with pytest.raises(ConflictError, match="the next one is 1"):
        store.append([rollout(1)], writer_id="w", batch_no=2)
    with pytest.raises(InputError, match="go together"):
        store.append([rollout(1)], writer_id="w")
    assert store.count() == 1
    assert len(list(store.path.glob("part-*"))) == 1


def test_rows_without_an_id_get_the_same_one_when_resent(tmp_path: Path) -> None:
    ids = []
    for name in ("a", "b"):
        store = TrajectoryStore.create(tmp_path / name)
        store.append([Trajectory(tokens=[1]), Trajectory(tokens=[2])], writer_id="w", batch_no=0)
        ids.append(store.scan(columns=["id"]).to_arrow()["id"].to_pylist())
    assert ids[0] == ids[1]
    assert len({*ids[0], ""}) == 3


def test_history_and_at(store: TrajectoryStore) -> None:
    store.append([rollout(0)])
    scan = store.scan()
    store.append([rollout(1), rollout(2)], writer_id="w", batch_no=0)
    history = store.history()
    assert [(s.snapshot, s.operation, s.rows) for s in history] == [
        (0, "create", 0),
        (1, "append", 1),
        (2, "append", 2),
    ]
    assert history[2].writer_id == "w"
    assert [store.at(i).count() for i in range(3)] == [0, 1, 3]
    assert scan.count() == 1
    assert [t.id for t in scan.to_trajectories()] == ["row-0"]
    with pytest.raises(QueryError, match="no snapshot 9"):
        store.at(9)
    with pytest.raises(InputError, match="pinned"):
        store.at(1).append([rollout(5)])
    assert store.at(1).scan().count() == 1


def test_append_of_what_a_scan_gave_loses_nothing(store: TrajectoryStore, tmp_path: Path) -> None:
    store.append([rollout(i) for i in range(5)])
    other = TrajectoryStore.create(tmp_path / "other")
    other.append(store.scan().to_batch())
    other.append(store.scan().to_arrow())
    other.append(TrajectoryBatch([rollout(i) for i in range(5)]))
    assert other.scan().to_trajectories() == store.scan().to_trajectories() * 3


def test_arrow_rows_with_a_bad_value_are_refused_by_position(store: TrajectoryStore) -> None:
    table = TrajectoryBatch([rollout(i) for i in range(3)]).to_arrow()
    wrong = table.set_column(
        table.schema.get_field_index("length"), table.schema.field("length"), pa.array([5, 6, 70], pa.int32())
    )
    with pytest.raises(ValidationError, match=r"trajectory 2 \(id 'row-2'\), column 'length'"):
        store.append(wrong)
    assert store.count() == 0


def test_extra_columns_are_declared_stored_and_checked(tmp_path: Path) -> None:
    entropy = Column("entropy", list_of(pa.float32()), "token", pad=-1.0)
    store = TrajectoryStore.create(tmp_path / "s", extra=[entropy, Column("task", pa.string())])
    table = TrajectoryBatch([rollout(0), rollout(1)]).to_arrow()
    with_entropy = table.append_column(
        entropy.field, pa.array([[0.5] * 5, None], entropy.type)
    ).append_column(pa.field("task", pa.string()), pa.array(["math", None]))
    store.append(with_entropy)
    store.append([rollout(2)])
    reopened = TrajectoryStore.open(store.path)
    assert [c.name for c in reopened.extra] == ["entropy", "task"]
    assert reopened.extra[0].pad == -1.0
    assert reopened.scan().to_arrow()["entropy"].to_pylist() == [[0.5] * 5, None, None]
    short = table.append_column(entropy.field, pa.array([[0.5] * 4, None], entropy.type))
    with pytest.raises(LengthMismatchError, match="'entropy': has 4 values, expected 5"):
        store.append(short)
    with pytest.raises(SchemaError, match="already there"):
        TrajectoryStore.create(tmp_path / "t", extra=[Column("reward", pa.float64())])
    tensors = reopened.scan().to_batch().to_tensors(extra=["entropy"])
    assert tensors["entropy"][0].tolist()[:5] == [0.5] * 5
    assert tensors["entropy"][0].tolist()[5:] == [-1.0] * (tensors["entropy"].shape[1] - 5)


def test_not_finite_values_are_counted_by_row(store: TrajectoryStore) -> None:
    rows = [rollout(0), rollout(1), rollout(2)]
    rows[0].behavior_log_probs = [float("nan"), -1.0, float("-inf")]
    rows[1].reward = float("nan")
    assert store.append(rows).not_finite == {"behavior_log_probs": 1, "reward": 1}


def test_open_and_create_refuse_what_is_not_theirs(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="there is no store at"):
        TrajectoryStore.open(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for name in ("file", "full"):
        with pytest.raises(StoreExistsError, match="already holds something else"):
            TrajectoryStore.create(tmp_path / name)
    TrajectoryStore.create(tmp_path / "s")
    with pytest.raises(StoreExistsError, match="already holds a store"):
        TrajectoryStore.create(tmp_path / "s")


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("trajstore.store.table.FORMAT_VERSION", 2)
        TrajectoryStore.create(tmp_path / "s")
    with pytest.raises(FormatVersionError, match="has format version 2; this trajstore reads up to 1"):
        TrajectoryStore.open(tmp_path / "s")


def test_a_delta_table_of_someone_else_is_refused(tmp_path: Path) -> None:
    import deltalake

    deltalake.write_deltalake(str(tmp_path / "t"), pa.table({"x": [1]}))
    with pytest.raises(StoreNotFoundError, match="trajstore did not write it"):
        TrajectoryStore.open(tmp_path / "t")


@pytest.mark.parametrize("name", ["with space", "täglich ☃", "a[1]", "50% off#1?", "name=value"])
def test_paths_of_any_kind(tmp_path: Path, name: str) -> None:
    store = TrajectoryStore.create(tmp_path / name)
    store.append([rollout(0)])
    assert TrajectoryStore.open(tmp_path / name).scan().to_trajectories() == [normalize(rollout(0))]


def test_importing_trajstore_is_light() -> None:
    heavy = ["torch", "polars", "duckdb", "tokenizers", "typer"]
    code = f"import sys, trajstore; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_face() -> None:
    import trajstore

    assert trajstore.__all__ == sorted(trajstore.__all__)
    assert all(hasattr(trajstore, name) for name in trajstore.__all__)
