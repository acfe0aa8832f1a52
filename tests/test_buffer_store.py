"""TrajectoryBuffer over a store: what it writes, what it is when opened again, kill -9 in the middle."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.strategies import same
from tests.test_buffer import grouped, ids, partial, row
from trajstore import (
    CorruptFileError,
    InputError,
    PolicyVersion,
    QueryError,
    TrajectoryBuffer,
    TrajectoryStatus,
    TrajectoryStore,
)
from trajstore.buffer.state import State
from trajstore.codec import normalize
from trajstore.store import files
from trajstore.store.table import Table

ROOT = Path(__file__).resolve().parents[1]
ABORTED = TrajectoryStatus.ABORTED


@pytest.fixture
def store(tmp_path: Path) -> TrajectoryStore:
    return TrajectoryStore.create(tmp_path / "s")


def again(store: TrajectoryStore, **limits: Any) -> TrajectoryBuffer:
    return TrajectoryBuffer(store=TrajectoryStore.open(store.path), **limits)


def everything(buffer: TrajectoryBuffer) -> tuple[Any, ...]:
    rows = buffer._rows
    held = rows.all()
    partials = buffer.get_partials_for_prompts(max_continuations=99)
    return ids(buffer.get_available(9)), rows.times(held).tolist(), str(partials), str(buffer.get_stats())


def test_it_opens_again_as_it_was_at_its_flush(store: TrajectoryStore) -> None:
    limits: dict[str, Any] = {"max_size": 40, "max_staleness": 9, "max_times_sampled": 3, "seed": 5}
    with TrajectoryBuffer(store=store, **limits) as buffer:
        buffer.add_batch(grouped({f"g{i}": 4 for i in range(12)}))
        buffer.add_batch([row(100 + i, i % 4) for i in range(6)])
        buffer.add_batch([partial(200, 2), partial(201, None)])
        (first, _) = buffer.get_partials_for_prompts()
        buffer.add(first.continue_with([7], [-1.0], 3, status=ABORTED))
        for n in (5, 9, 13):
            buffer.sample(n, 9, stratified=True)
        assert buffer.remove_stale(10) > 0
    assert store.count() == 12 * 4 + 6 + 3, "what leaves the buffer stays in the store"
    for _ in range(2):
        with again(store, **limits) as opened:
            assert everything(opened) == everything(buffer)
            for how in ({}, {"stratified": True}, {"weights": "freshness"}):
                assert ids(opened.sample(4, 9, **how)) == ids(buffer.sample(4, 9, **how))
    loaded = TrajectoryBuffer.load(store, **limits)
    assert everything(loaded) == everything(buffer)
    loaded.add(row(999))
    assert store.count() == 57, "a loaded buffer lives in memory"


def test_rows_that_were_committed_but_not_flushed_are_there(store: TrajectoryStore) -> None:
    buffer = TrajectoryBuffer(store=store)
    buffer.add_batch([row(i) for i in range(6)])
    buffer.flush()
    buffer.sample(2, 0)
    buffer.add_batch([row(10), row(11)])
    assert buffer._writer is not None
    buffer._writer.flush()  # as a group commit does in the background
    opened = again(store)
    assert ids(opened.get_available(0)) == ids(buffer.get_available(0))
    assert opened._rows.times(opened._rows.all()).tolist() == [0] * 8, "counts are those of the flush"
    buffer.close()
    opened.close()


def test_what_others_wrote_comes_in_when_it_is_opened(store: TrajectoryStore) -> None:
    store.append([row(i) for i in range(5)])
    with TrajectoryBuffer(store=store, max_staleness=None) as buffer:
        assert len(buffer) == 5
        buffer.add(row(5, 1))
        buffer.remove_stale(9)
        store.append([row(6, 2)])
        buffer.flush()
        buffer.clear()
    with again(store, max_staleness=None) as opened:
        assert ids(opened.get_available(0)) == ["t6"], "later than its record, and never seen by it"


def test_a_full_store_gives_its_newest_rows(store: TrajectoryStore) -> None:
    lost = partial(500)
    store.append([lost, partial(501), partial(501).continue_with([1], [-1.0], 1)])
    store.append(grouped({f"g{i}": 4 for i in range(20)}))
    with TrajectoryBuffer(store=store, max_size=10) as buffer:
        assert ids(buffer.get_available(0)) == [f"t{i}" for i in range(72, 80)]
        assert [t.id for t in buffer.get_partials_for_prompts()] == ["t500"]


def test_rows_of_one_id_are_told_apart(store: TrajectoryStore) -> None:
    with TrajectoryBuffer(2, store=store) as buffer:
        buffer.add_batch([row(1, reward=float(i)) for i in range(4)])
        assert buffer.get_available(0).rewards == [2, 3]
    with again(store, max_size=2) as opened:
        assert opened.get_available(0).rewards == [2, 3]


def test_saving_a_buffer_that_lives_in_memory(store: TrajectoryStore) -> None:
    buffer = TrajectoryBuffer(seed=3)
    buffer.add_batch([row(i, i % 3) for i in range(20)])
    buffer.add_partial(partial(50))
    buffer.sample(7, 2)
    buffer.save(store)
    for opened in (TrajectoryBuffer.load(store), again(store)):
        assert everything(opened) == everything(buffer)
        opened.close()
    assert ids(TrajectoryBuffer.load(store).sample(5, 2)) == ids(buffer.sample(5, 2))
    with pytest.raises(InputError, match="has rows already"):
        buffer.save(store)
    with again(store) as held, pytest.raises(InputError, match="has a store already"):
        held.save(store)


def test_the_state_keeps_one_file(store: TrajectoryStore) -> None:
    with TrajectoryBuffer(store=store) as buffer:
        for i in range(5):
            buffer.add(row(i))
            buffer.flush()
    assert len(list((store.path / "_trajstore" / "buffer").glob("*.parquet"))) == 1
    assert store.maintenance.fsck() == []
    store.maintenance.compact()
    with again(store) as opened:
        assert len(opened) == 5


def test_objects_of_the_engine_are_left_out_warned_of_and_counted(store: TrajectoryStore) -> None:
    rows = [partial(0, kv_cache_ref=object()), partial(1, kv_cache_ref="block"), partial(2, kv_cache_ref=3)]
    with pytest.warns(UserWarning, match="kv_cache_ref of 2 partial") as warned:
        commit = store.append(rows)
    assert len(warned) == 1
    assert commit.cache_refs_left_out == 2
    with pytest.warns(UserWarning, match="kv_cache_ref of 1 partial") as warned, store.writer() as writer:
        writer.add(partial(3, kv_cache_ref=object()))
    assert len(warned) == 1
    with TrajectoryBuffer(store=store) as buffer:
        with pytest.warns(UserWarning, match="kv_cache_ref of 2 partial") as warned:
            buffer.add_batch([partial(i, kv_cache_ref=i) for i in (4, 5)])
        assert len(warned) == 1
        assert buffer.get_partials_for_prompts()[-1].kv_cache_ref == 5
        buffer.flush()
        for add in (buffer.add, buffer.add_partial):
            with pytest.warns(UserWarning, match="kv_cache_ref of 1 partial") as more:
                add(partial(6, kv_cache_ref=6))
            assert [w.filename for w in (*warned, *more)] == [__file__] * 2, "where the verb was called"
            buffer.flush()
    assert [s.cache_refs_left_out for s in store.history()] == [0, 2, 1, 2, 1, 1]
    assert [t.kv_cache_ref for t in store.partials()] == [None, "block", None, None, None, None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrajectoryBuffer().add_partial(partial(0, kv_cache_ref=object()))  # in memory nothing is lost


def test_the_resume_queue_of_a_store(store: TrajectoryStore) -> None:
    assert list(store.partials()) == []
    old, fresh, unknown = partial(0, 1), partial(1, 5), partial(2, None)
    store.append([old, fresh, unknown, row(3), row(4, status=ABORTED)])
    assert ids(store.partials()) == ["t0", "t1", "t2"]
    assert ids(store.partials(PolicyVersion(6), 2)) == ["t1"]
    assert ids(store.partials(6, 5)) == ["t0", "t1"]
    second = fresh.continue_with([5], [-1.0], 6, status=ABORTED)
    store.append([second])
    assert [t.id for t in store.partials()] == ["t0", "t2", second.id]
    assert same(list(store.partials())[-1], normalize(second))
    store.append([second.continue_with([6], [-1.0], 7), partial(0, 2)])
    assert ids(store.partials()) == ["t2", "t0"], "of one id the last row"
    for half in ({"current_version": 3}, {"max_staleness": 3}):
        with pytest.raises(QueryError, match="go together"):
            store.partials(**half)
    lineage = store.scan("start_rollout_id = 't1'").to_trajectories()
    assert [(t.parent_id, t.continuation_count) for t in lineage] == [("t1", 1), (second.id, 2)]


def test_extra_columns_of_a_store(tmp_path: Path) -> None:
    from trajstore.schema import Column, list_of

    entropy = Column("entropy", list_of(pa.float32()), "token")
    store = TrajectoryStore.create(tmp_path / "x", extra=[entropy])
    with TrajectoryBuffer(store=store) as buffer:
        buffer.add(row(0))
        table = store.scan().to_arrow()
        assert table.num_rows == 0
        buffer.flush()
        one = store.scan().to_batch().to_arrow()
        values = pa.array([[0.5] * one["length"][0].as_py()], entropy.type)
        buffer.add_batch(one.set_column(one.schema.get_field_index("entropy"), entropy.field, values))
    with again(store) as opened:
        out = opened.get_available(0).to_tensors(extra=["entropy"])["entropy"].numpy()
        np.testing.assert_array_equal(out, [[np.nan] * 3, [0.5] * 3])


def test_what_was_committed_after_the_last_record_waits_once(store: TrajectoryStore) -> None:
    """A process killed between commit and record leaves both halves of a continuation in one batch."""
    first, second = partial(0), partial(1)
    again_cut = first.continue_with([9], [-1.0], 1, status=ABORTED)
    store.append([first, second, again_cut, second.continue_with([8], [-1.0], 1)])
    opened = again(store)
    assert [t.id for t in opened.get_partials_for_prompts(max_continuations=9)] == ids(store.partials())
    assert ids(store.partials()) == [again_cut.id]
    opened.close()


def test_killed_in_the_middle(store: TrajectoryStore, tmp_path: Path) -> None:
    """kill -9 at random moments: every flushed partial is there, none twice, and none that was continued."""
    progress = tmp_path / "progress.txt"
    progress.touch()
    for number in range(2):
        before = progress.read_text()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.buffer_worker", str(store.path), str(progress), str(number)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        deadline = time.monotonic() + 120
        while progress.read_text().count("\n") < before.count("\n") + 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        flushed = set[str]()
        continued = set[str]()
        for line in progress.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                done = json.loads(line)
                flushed |= set(done["partials"])
                continued |= set(done["continued"])
        opened = again(store)
        waiting = [t.id for t in opened.get_partials_for_prompts(max_continuations=99)]
        assert Counter(waiting) == Counter(dict.fromkeys(waiting, 1))
        assert sorted(waiting) == sorted(ids(store.partials()))
        parents = {t.parent_id for t in store.scan().to_trajectories()}
        assert flushed - parents <= set(waiting)
        assert continued <= parents
        assert not set(waiting) & parents
        counts = Counter(t.id for t in store.scan().to_trajectories())
        assert set(counts.values()) == {1}
        opened.close()


def test_two_buffers_may_save_their_state_at_once(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes last counts; what the other one added came from elsewhere, so it is in."""
    one, two = again(store), again(store)
    plain = Table.swap

    def beaten(self: Table, *args: Any, **options: Any) -> int:
        """The other one is first, between the look at what is there and the commit."""
        monkeypatch.setattr(Table, "swap", plain)
        two.flush()
        return plain(self, *args, **options)

    for number in range(3):
        one.add(row(2 * number))
        two.add(row(2 * number + 1))
        monkeypatch.setattr(Table, "swap", beaten)
        one.flush()
        if number == 0:  # both are there; the other one's was made later
            state = State.of(store)
            assert state is not None
            assert (state.writer_id, len(state.id_hashes), len(state.times_sampled)) == (two._writer_id, 1, 1)
        with again(store) as opened:
            assert sorted(ids(opened.get_available(0))) == [f"t{i}" for i in range(2 * number + 2)]
    one.close()
    two.close()
    assert len(list((store.path / "_trajstore" / "buffer").glob("*.parquet"))) == 1


def test_a_state_that_is_replaced_while_it_is_read_is_read_again(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with again(store) as buffer:
        buffer.add(row(0))
        buffer.flush()
        plain = files.read

        def late(place: Any, file: Any, schema: Any) -> Any:
            monkeypatch.setattr(files, "read", plain)
            buffer.sample(1, 0)
            buffer.flush()
            return plain(place, file, schema)

        monkeypatch.setattr(files, "read", late)
        opened = again(store)
        assert opened._rows.times(opened._rows.all()).tolist() == [1]
        opened.close()
    (state,) = (store.path / "_trajstore" / "buffer").glob("*.parquet")
    state.unlink()
    with pytest.raises(CorruptFileError, match="is gone"):
        again(store)
