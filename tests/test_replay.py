"""Replay gives the rows of a run again: by version, by arrival, by training step, and into a buffer."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore import (
    InputError,
    PolicyVersion,
    QueryError,
    Trajectory,
    TrajectoryBuffer,
    TrajectoryStatus,
    TrajectoryStore,
    VersionSegment,
)
from trajstore.loader import TrajectoryLoader
from trajstore.replay import WINDOW, replay


def row(id: str, *versions: int, length: int = 3, **more: object) -> Trajectory:
    """A row whose response was sampled under these versions, one after the other."""
    segments = [
        VersionSegment(2 + i * length, 2 + (i + 1) * length, PolicyVersion(v)) for i, v in enumerate(versions)
    ]
    size = length * max(len(versions), 1)
    return Trajectory(
        id=id,
        tokens=list(range(2 + size)),
        prompt_length=2,
        response_length=size,
        behavior_log_probs=[-0.5 * i for i in range(size)],
        version_segments=segments,
        version=PolicyVersion(versions[0]) if versions else None,
        reward=float(len(id)),
        status=TrajectoryStatus.COMPLETED,
        **more,  # type: ignore[arg-type]
    )


def filled(path: Path, *commits: list[Trajectory]) -> TrajectoryStore:
    store = TrajectoryStore.create(path)
    for rows in commits:
        store.append(rows)
    return store


def ids(batch: object) -> list[str]:
    return [t.id for t in batch]  # type: ignore[attr-defined]


COMMITS = st.lists(
    st.lists(st.lists(st.integers(0, 5), max_size=2).map(sorted), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


@settings(max_examples=6, deadline=None)
@given(COMMITS, st.integers(1, 4))
def test_orders_are_those_of_a_plain_sort(
    tmp_path_factory: pytest.TempPathFactory, commits: list[list[list[int]]], batch_size: int
) -> None:
    rows = [
        [row(f"{c}-{i}", *versions) for i, versions in enumerate(commit)] for c, commit in enumerate(commits)
    ]
    store = filled(tmp_path_factory.mktemp("s") / "s", *rows)
    arrived = [t for commit in rows for t in commit]
    newest = {t.id: max((s.version.version_id for s in t.version_segments), default=None) for t in arrived}
    wanted = sorted(arrived, key=lambda t: np.inf if newest[t.id] is None else newest[t.id])
    store.maintenance.compact()
    for by, order in (("version", wanted), ("ingest", arrived)):
        run = replay(store, by=by, batch_size=batch_size)  # type: ignore[call-overload]
        moments = list(run)
        assert [t.id for m in moments for t in m.batch] == [t.id for t in order]
        assert run.num_rows == len(order) == sum(len(m.batch) for m in moments)
        assert len(moments) == len(run)
        assert all(1 <= len(m.batch) <= batch_size for m in moments)
        seen: list[int] = []
        for m in moments:
            if by == "version":
                assert {newest[t.id] for t in m.batch} == {m.at}
            seen += [v for t in m.batch if (v := newest[t.id]) is not None]
            assert m.current_version == max(seen, default=None)
        assert ids(run.scan.to_batch()) == [t.id for t in order]


def test_by_ingest_goes_commit_by_commit(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", [row("a", 3), row("b", 1)], [row("c", 2)], [row("d", 1)])
    seen = [(m.at, ids(m.batch), m.current_version) for m in replay(store, by="ingest")]
    assert seen == [(1, ["a", "b"], 3), (2, ["c"], 3), (3, ["d"], 3)]
    store.maintenance.compact()
    assert [(m.at, ids(m.batch), m.current_version) for m in replay(store, by="ingest")] == seen


def test_where_and_snapshot_narrow_a_replay(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", [row("a", 3), row("bb", 1)], [row("cc", 2)])
    assert [ids(m.batch) for m in replay(store, where="reward > 1")] == [["bb"], ["cc"]]
    assert [ids(m.batch) for m in replay(store.at(1))] == [["bb"], ["a"]]
    assert list(replay(store, where="reward > 9")) == []


def trained(store: TrajectoryStore, step: int, names: list[str], **where: int) -> pa.Table:
    """Records a step as a trainer does, and gives the rows it read."""
    everything = store.scan().to_arrow()
    place = {id: i for i, id in enumerate(everything["id"].to_pylist())}
    store.record_training_step(step, names, **where)
    return everything.take([place[name] for name in names])


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_a_step_gives_what_was_trained_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = TrajectoryStore.create(tmp_path_factory.mktemp("s") / "s")
    there: list[str] = []
    read: dict[tuple[int, int, int], pa.Table] = {}
    for step in range(data.draw(st.integers(1, 4))):
        fresh = [f"{step}-{i}" for i in range(data.draw(st.integers(1, 5)))]
        store.append([row(id, step) for id in fresh])
        there += fresh
        for rank in range(data.draw(st.integers(1, 2))):
            for micro in range(data.draw(st.integers(0, 2))):
                names = data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=6))
                read[step, rank, micro] = trained(store, step, names, rank=rank, micro_batch=micro)
        upkeep = data.draw(st.sampled_from(["nothing", "compact", "update", "delete"]))
        if upkeep == "compact":
            store.maintenance.compact()
        elif upkeep == "update":
            store.maintenance.update(there[:1], {"reward": [float(step) + 0.25]})
        elif upkeep == "delete":
            store.maintenance.delete(f"id = '{there.pop(0)}'")
            if not there:
                store.append([row(f"again-{step}", step)])
                there.append(f"again-{step}")
    moments = list(replay(store, by="step"))
    assert [(m.at, m.rank, m.micro_batch) for m in moments] == sorted(read)
    for m in moments:
        assert m.at is not None
        assert m.batch.to_arrow().combine_chunks() == read[m.at, m.rank, m.micro_batch].combine_chunks()
    for step in {key[0] for key in read}:
        parts = [read[key] for key in sorted(read) if key[0] == step]
        assert (
            replay(store, step=step).to_arrow().combine_chunks() == pa.concat_tables(parts).combine_chunks()
        )


def test_a_step_survives_upkeep_and_a_vacuum(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", [row("a", 1), row("b", 1)], [row("c", 2)])
    wanted = trained(store, 1200, ["c", "a", "c"])
    store.maintenance.update(["a"], {"reward": [9.0]})
    store.maintenance.delete("id = 'c'")
    store.maintenance.compact()
    store.maintenance.vacuum(0, force=True)
    assert ids(store.scan().to_batch()) == ["a", "b"]
    got = replay(store, step=1200)
    assert ids(got) == ["c", "a", "c"]
    assert got.to_arrow().combine_chunks() == wanted.combine_chunks()


def test_ranks_of_a_step(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", [row("a", 1), row("b", 1), row("c", 1)])
    store.record_training_step(7, ["c"], rank=1)
    store.record_training_step(7, ["b", "a"], rank=0, micro_batch=1)
    store.record_training_step(7, ["a"], rank=0)
    assert ids(replay(store, step=7)) == ["a", "b", "a", "c"]
    assert ids(replay(store, step=7, rank=0)) == ["a", "b", "a"]
    assert ids(replay(store, by="step").scan.to_batch()) == ["a", "b", "a", "c"]


def test_what_cannot_be_replayed_says_so(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", [row("a", 1), row("twice", 1)], [row("twice", 2)])
    with pytest.raises(QueryError, match="has no step 3"):
        replay(store, step=3)
    store.record_training_step(3, ["a", "gone"])
    with pytest.raises(QueryError, match="no row has the id 'gone'"):
        replay(store, step=3)
    store.record_training_step(4, ["a", "twice"])
    with pytest.raises(QueryError, match="'twice' is on several rows"):
        replay(store, step=4)
    with pytest.raises(QueryError, match="has no step 9") as told:
        replay(store, step=9)
    assert "3 to 4" in str(told.value)
    with pytest.raises(QueryError, match="has no step 4 of rank 5"):
        replay(store, step=4, rank=5)
    for wrong in ({"by": "time"}, {"batch_size": 0}, {"rank": 1}, {"by": "step", "where": "reward > 0"}):
        with pytest.raises(QueryError):
            replay(store, **wrong)  # type: ignore[call-overload]
    with pytest.raises(QueryError, match="neither by nor where"):
        replay(store, step=3, where="reward > 0")  # type: ignore[call-overload]
    store.append([row("b", 3)])
    store.record_training_step(5, ["b"])
    with pytest.raises(InputError, match="2 snapshots"):
        _ = replay(store, by="step").scan
    assert len(replay(store.at(2), by="step")) == 2, "a pinned store knows the steps up to its snapshot"


@pytest.mark.parametrize("by", ["version", "ingest"])
def test_a_buffer_draws_again_what_it_drew_live(tmp_path: Path, by: str) -> None:
    rng = np.random.default_rng(3)
    store = TrajectoryStore.create(tmp_path / "s")
    live = TrajectoryBuffer(max_size=40, max_staleness=2, max_times_sampled=3, seed=11)
    drawn, stats = [], []
    for version in range(8):
        rows = [
            row(f"{version}-{i}", *sorted({max(0, version - int(rng.integers(0, 4))), version}))
            for i in range(12)
        ]
        store.append(rows)
        live.add_batch(rows)
        drawn.append(ids(live.sample(6, version, stratified=True)))
        live.remove_stale(version)
        stats.append(live.get_stats(version))
    for batch_size in (5, WINDOW):
        again = TrajectoryBuffer(max_size=40, max_staleness=2, max_times_sampled=3, seed=11)
        seen = []
        for n, version in enumerate(replay(store, by=by, batch_size=batch_size).into(again)):  # type: ignore[call-overload]
            assert version == n
            seen.append(ids(again.sample(6, version, stratified=True)))
            again.remove_stale(version)
            assert again.get_stats(version) == pytest.approx(stats[n])
        assert seen == drawn


def test_tensors_are_those_of_the_loader(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", *[[row(f"{v}-{i}", v, length=1 + i) for i in range(4)] for v in (2, 0, 1)])
    run = replay(store, batch_size=4)
    for layout in ("padded", "packed", "prompt_response", "nested"):
        loaded = list(TrajectoryLoader(run.scan, batch_size=4, layout=layout, prefetch=0))
        replayed = list(run.tensors(layout))
        assert [b.pop("at") for b in replayed] == [0, 1, 2]
        assert len(loaded) == len(replayed) == 3
        for a, b in zip(loaded, replayed, strict=True):
            assert a.keys() == b.keys()
            for name, value in a.items():
                if isinstance(value, torch.Tensor):
                    left, right = (t.values() if t.is_nested else t for t in (value, b[name]))
                    np.testing.assert_array_equal(left.numpy(), right.numpy())
                else:
                    assert value == b[name]
    with pytest.raises(InputError, match="layout"):
        next(run.tensors("square"))


def test_tensors_of_steps_are_their_micro_batches(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", [row("a", 1), row("b", 1)])
    store.record_training_step(1, ["b", "a"])
    store.append([row("c", 2)])
    store.record_training_step(2, ["c", "c", "b"])
    seen = [(batch["at"], batch["ids"]) for batch in replay(store, by="step").tensors()]
    assert seen == [(1, ["b", "a"]), (2, ["c", "c", "b"])]


def test_moments_of_many_steps_are_read_in_windows(tmp_path: Path) -> None:
    many = WINDOW + 300
    store = filled(tmp_path / "s", [row(str(i), 1, length=1) for i in range(many)])
    order = np.random.default_rng(0).permutation(many)
    for step, part in enumerate(np.array_split(order, 9)):
        store.record_training_step(step, [str(i) for i in part])
    moments = list(replay(store, by="step"))
    assert [m.at for m in moments] == list(range(9))
    assert [id for m in moments for id in ids(m.batch)] == [str(i) for i in order]
