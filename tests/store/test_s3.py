"""The same store on an object store: a real S3 server on this machine."""

import json
import uuid
from pathlib import Path

import pyarrow as pa
import pytest

from trajstore import (
    InputError,
    LengthMismatchError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
    Trajectory,
    TrajectoryStore,
)
from trajstore.codec import normalize
from trajstore.ingest import ingest
from trajstore.ingest.target import Target
from trajstore.query import connect
from trajstore.schema import Column


@pytest.fixture
def uri() -> str:
    return f"s3://bucket/{uuid.uuid4().hex}/with space"


def rows(first: int, count: int) -> list[Trajectory]:
    return [
        Trajectory(id=f"r{i}", tokens=[i, i + 1], prompt_length=1, reward=1.0)
        for i in range(first, first + count)
    ]


def test_the_path_of_a_row_is_the_same(uri: str, s3_options: dict[str, str]) -> None:
    store = TrajectoryStore.create(uri, storage_options=s3_options)
    store.append(rows(0, 5), writer_id="w", batch_no=0)
    assert store.append(rows(0, 5), writer_id="w", batch_no=0).already_in
    store.append(rows(5, 5))
    again = TrajectoryStore.open(uri, storage_options=s3_options)
    assert again.scan().to_trajectories() == [normalize(t) for t in rows(0, 10)]
    assert again.at(1).count() == 5
    assert connect(again).sql("select sum(length) n from trajectories").to_pylist() == [{"n": 20}]
    assert sum(again.column_bytes().values()) > 0
    assert again.uri == uri
    with pytest.raises(InputError, match="is not a folder"):
        _ = again.path


def test_nothing_is_left_of_a_refused_append(uri: str, s3_options: dict[str, str]) -> None:
    store = TrajectoryStore.create(uri, storage_options=s3_options)
    before = store._place.entries()
    with pytest.raises(LengthMismatchError):
        store.append([*rows(0, 3), Trajectory(id="bad", tokens=[1], log_probs=[1.0, 2.0])])
    assert store._place.entries() == before
    commit = store.append(
        [*rows(0, 3), Trajectory(id="bad", tokens=[1], log_probs=[1.0, 2.0])], on_error="quarantine"
    )
    assert (commit.rows, commit.quarantined, len(store.quarantined())) == (3, 1, 1)


def test_a_commit_whose_answer_is_lost_is_known_again(s3_options: dict[str, str]) -> None:
    uri = f"s3://bucket/{uuid.uuid4().hex}/lost-answers"
    with pytest.raises(StoreExistsError):  # its own creation: said, and nothing is lost
        TrajectoryStore.create(uri, storage_options=s3_options)
    store = TrajectoryStore.open(uri, storage_options=s3_options)
    assert store.append(rows(0, 3), writer_id="w", batch_no=0).snapshot == 1
    assert not store.append(rows(3, 3)).already_in
    with store.writer(writer_id="v") as writer:
        writer.add(rows(6, 3))
    assert store.maintenance.compact().files_removed == 3
    assert store.maintenance.delete("id = 'r0'").rows == 1
    assert store.maintenance.add_column(Column("extra", pa.string())) == 6
    assert store.maintenance.restore(2) == 7
    assert not store.append(rows(9, 1)).already_in
    again = TrajectoryStore.open(uri, storage_options=s3_options)
    assert again.scan(columns=["id"]).to_arrow()["id"].to_pylist() == [f"r{i}" for i in (*range(6), 9)]
    assert again.maintenance.fsck() == []


def test_two_handles_commit_in_turn(uri: str, s3_options: dict[str, str]) -> None:
    a = TrajectoryStore.create(uri, storage_options=s3_options)
    b = TrajectoryStore.open(uri, storage_options=s3_options)
    for k in range(4):
        a.append(rows(10 * k, 2), writer_id="a", batch_no=k)
        b.append(rows(10 * k + 5, 2), writer_id="b", batch_no=k)
    assert a.count() == b.count() == 16


def test_what_is_not_there_and_what_is(uri: str, s3_options: dict[str, str]) -> None:
    with pytest.raises(StoreNotFoundError):
        TrajectoryStore.open(uri, storage_options=s3_options)
    TrajectoryStore.create(uri, storage_options=s3_options)
    with pytest.raises(StoreExistsError):
        TrajectoryStore.create(uri, storage_options=s3_options)
    with pytest.raises(InputError, match="scheme 'gs'"):
        TrajectoryStore.open("gs://bucket/x")


def test_a_server_that_is_not_there_is_said(uri: str, s3_options: dict[str, str]) -> None:
    nowhere = s3_options | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    with pytest.raises(StorageError, match="cannot be listed"):
        TrajectoryStore.open(uri, storage_options=nowhere)


def test_import_by_environment_makes_a_store_or_leaves_nothing(
    uri: str, s3_options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_options.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": "a", "tokens": [1, -2]}) + "\n")
    with pytest.raises(InputError, match=r"a.jsonl:1"):
        ingest(path, uri)
    with pytest.raises(StoreNotFoundError):
        TrajectoryStore.open(uri)
    path.write_text(json.dumps({"id": "a", "tokens": [1, 2]}) + "\n")
    assert ingest(path, uri).created
    assert TrajectoryStore.open(uri).count() == 1


def test_a_failed_import_takes_nothing_of_others_with_it(
    uri: str, s3_options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two imports begin to make one store, and the one that fails is not alone there."""
    for name, value in s3_options.items():
        monkeypatch.setenv(name, value)
    slow, quick = Target(uri), Target(uri)
    quick.fill(lambda store: store.append(rows(0, 1)))
    with pytest.raises(StoreExistsError):  # it had looked before the other one made the store
        slow.fill(lambda store: store.append(rows(1, 1)))
    assert TrajectoryStore.open(uri).count() == 1

    another = f"s3://bucket/{uuid.uuid4().hex}"

    def fails(store: TrajectoryStore) -> None:
        TrajectoryStore.open(another).append(rows(2, 1))
        raise InputError("the first rows are bad")

    with pytest.raises(InputError, match="the first rows are bad"):
        Target(another).fill(fails)
    assert TrajectoryStore.open(another).count() == 1
