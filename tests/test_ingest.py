"""One file becomes one commit, or nothing."""

import itertools
import json
import threading
from pathlib import Path

import pytest

from trajstore import ImportFormatError, StoreExistsError, TrajectoryStore
from trajstore.ingest import Progress, ingest


def write(path: Path, count: int, **last: object) -> Path:
    rows = [{"id": f"r{i}", "tokens": [i, i + 1], "prompt_length": 1} for i in range(count)]
    rows[-1] |= last  # type: ignore[arg-type]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_one_import_is_one_commit_and_reports_progress(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 5000)
    seen: list[Progress] = []
    report = ingest(path, tmp_path / "s", report=lambda p: seen.append(Progress(**vars(p))))
    assert (report.created, report.commit.rows, report.tokens) == (True, 5000, 10_000)
    assert [s.snapshot for s in TrajectoryStore.open(tmp_path / "s").history()] == [0, 1]
    assert len(seen) == 5000
    assert seen[-1].bytes_read == seen[-1].total_bytes == path.stat().st_size
    assert all(a.bytes_read <= b.bytes_read for a, b in itertools.pairwise(seen))


def test_a_bad_last_row_of_many_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 5000, log_probs=[1.0, 2.0, 3.0])
    with pytest.raises(ImportFormatError, match=r"a.jsonl:5000: column 'log_probs': has 3 values"):
        ingest(path, tmp_path / "s")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_interrupted_import_leaves_nothing(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.rows == 4500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(write(tmp_path / "a.jsonl", 5000), tmp_path / "deep" / "s", report=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_two_imports_that_make_one_store_do_not_mix(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 50)
    barrier = threading.Barrier(2)

    def meet(progress: Progress) -> None:
        if progress.rows == 25:
            barrier.wait(timeout=300)

    outcomes: list[object] = []

    def run() -> None:
        try:
            outcomes.append(ingest(path, tmp_path / "s", report=meet))
        except StoreExistsError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(o, StoreExistsError) for o in outcomes) == 1
    assert TrajectoryStore.open(tmp_path / "s").count() == 50
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "s"]


def test_an_empty_folder_becomes_the_store(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    assert ingest(write(tmp_path / "a.jsonl", 2), tmp_path / "s").created
    assert TrajectoryStore.open(tmp_path / "s").count() == 2


def test_nulls_as_nan_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 2, behavior_log_probs=[-1.0, None])
    with pytest.raises(
        ImportFormatError, match=r"a.jsonl:2: column 'behavior_log_probs': found None at index 1"
    ):
        ingest(path, tmp_path / "s")
    assert ingest(path, tmp_path / "s", nulls=True).commit.not_finite == {"behavior_log_probs": 1}
