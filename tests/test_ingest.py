"""One file becomes one commit, or nothing; a large one several, which are continued."""

import gzip
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

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


FIXTURES = Path(__file__).parent / "formats"


def ids(store: Path) -> list[str]:
    return [t.id for t in TrajectoryStore.open(store).scan().to_trajectories()]


def test_a_folder_becomes_a_commit_a_file(tmp_path: Path) -> None:
    report = ingest(FIXTURES / "slime", tmp_path / "s")
    assert [(f.name, f.format, f.rows) for f in report.files] == [
        ("rollout_data/8.pt", "slime", 4),
        ("rollout_data/eval_8.pt", "slime", 1),
    ]
    assert report.left_out == [("train_data/8.pt", "joined into the rollouts it belongs to")]
    assert report.commit.rows == 5
    assert report.format == "slime"
    assert "has 'samples'" in report.why or "'samples' that have" in report.why
    assert len(set(ids(tmp_path / "s"))) == 5


def test_the_same_import_again_adds_nothing(tmp_path: Path) -> None:
    first = ingest(FIXTURES / "verl", tmp_path / "s")
    again = ingest(FIXTURES / "verl", tmp_path / "s")
    assert (first.commit.rows, again.commit.rows) == (20, 0)
    assert [f.already_in for f in again.files] == [True] * 5
    assert not again.created
    assert again.commit.snapshot == first.commit.snapshot


def test_ids_of_two_runs_with_the_same_file_names_differ(tmp_path: Path) -> None:
    for run in ("a", "b"):
        lines = [{"input": run, "output": "x", "score": 1.0, "step": 1}] * 2
        (tmp_path / run).mkdir()
        (tmp_path / run / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ingest(tmp_path / run / "1.jsonl", tmp_path / "s")
    assert len(set(ids(tmp_path / "s"))) == 4


def test_two_files_of_one_content_are_two_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "d" / name).write_text('{"input": "i", "output": "o", "score": 1.0, "step": 1}\n')
    report = ingest(tmp_path / "d", tmp_path / "s")
    assert [f.rows for f in report.files] == [1, 1]
    assert len(set(ids(tmp_path / "s"))) == 2
    assert ingest(tmp_path / "d", tmp_path / "s").commit.rows == 0


BAD = [
    '{"id": "a", "tokens": [1, 2]}',
    '{"id": "b", "tokens": [1, -2]}',  # breaks the contract
    '{"id": "c", "tokens": [1',  # is not JSON
    '{"id": "d", "scor": 1}',  # is no trajectory
    '{"id": "e", "tokens": [3]}',
]


@pytest.mark.parametrize("on_error", ["skip", "quarantine"])
def test_bad_records_are_named_counted_and_passed_over(tmp_path: Path, on_error: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(BAD) + "\n")
    report = ingest(path, tmp_path / "s", on_error=on_error)
    assert ids(tmp_path / "s") == ["a", "e"]
    named = sorted((where.rpartition("/")[2], reason) for where, reason in report.refused)
    assert [where for where, _ in named] == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    for (_, reason), part in zip(named, ["-2 at index 1", "not JSON", "unknown field 'scor'"], strict=True):
        assert part in reason
    set_aside = TrajectoryStore.open(tmp_path / "s").quarantined().to_pylist()
    assert len(set_aside) == (3 if on_error == "quarantine" else 0)
    if set_aside:
        assert {json.loads(row["trajectory"])["id"] for row in set_aside if "unknown" in row["reason"]} == {
            "d"
        }
    again = ingest(path, tmp_path / "s", on_error=on_error)
    assert again.commit.rows == 0
    assert len(TrajectoryStore.open(tmp_path / "s").quarantined()) == len(set_aside)


def test_stop_is_the_default_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(BAD))
    with pytest.raises(ImportFormatError, match=r"a.jsonl:"):
        ingest(tmp_path / "a.jsonl", tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_refused_file_of_a_folder_is_named_and_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"id": "x"}\n')
    (folder / "b.pkl").write_bytes(pickle.dumps(os.system))
    (folder / "c.pt").write_bytes((FIXTURES / "slime/rollout_data/8.pt").read_bytes()[:900])
    (folder / "notes.txt").write_text("remember the milk\n")
    with pytest.raises(ImportFormatError, match=r"c\.pt"):
        ingest(folder, tmp_path / "s")
    report = ingest(folder, tmp_path / "t", on_error="skip")
    assert ids(tmp_path / "t") == ["x"]
    assert sorted(Path(where).name for where, _ in report.refused) == ["c.pt", "notes.txt"]
    assert [name for name, _ in report.left_out] == ["b.pkl"]


def test_what_came_before_a_break_stays_when_bad_records_are_skipped(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"id": f"r{i * 7919 % 99991}", "reward": i / 7}) + "\n" for i in range(9000))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode())[:-20_000])
    report = ingest(path, tmp_path / "s", on_error="skip")
    assert 0 < report.commit.rows < 9000
    assert "damaged" in report.refused[-1][1]


def test_several_commits_of_one_file_and_a_bad_record_far_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajstore.ingest.COMMIT_ROWS", 10)
    path = write(tmp_path / "a.jsonl", 35, tokens=[-1], prompt_length=0)
    with pytest.raises(ImportFormatError, match=r"a.jsonl:35: column 'tokens'") as caught:
        ingest(path, tmp_path / "s")
    assert "the 3 batches before it are in (30 rows now)" in str(caught.value.hint)
    report = ingest(path, tmp_path / "s", on_error="skip")
    assert (report.commit.rows, report.files[0].batches) == (4, 4)
    assert ids(tmp_path / "s") == [f"r{i}" for i in range(34)]


KILLED = """
import os, signal, sys
from trajstore import ingest as ingesting
ingesting.COMMIT_ROWS = 10
def report(progress):
    if progress.rows == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
ingesting.ingest(sys.argv[1], sys.argv[2], report=report)
"""


@pytest.mark.parametrize("rows", [5, 10, 11, 27])
def test_a_killed_import_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    path, store = write(tmp_path / "a.jsonl", 35), tmp_path / "s"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(store), str(rows)], check=False)
    assert done.returncode == -signal.SIGKILL
    before = TrajectoryStore.open(store).count() if store.exists() else 0
    assert before == (rows - 1) // 10 * 10
    assert len(list(tmp_path.glob(".s-*.importing*"))) == (0 if before else 2)
    monkeypatch.setattr("trajstore.ingest.COMMIT_ROWS", 10)
    report = ingest(path, store)
    assert report.commit.rows == 35 - before
    assert ids(store) == [f"r{i}" for i in range(35)]
    assert ingest(path, store).commit.rows == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "s"]


def test_what_does_not_belong_is_told(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.json").write_text('{"strange": 1}')
    (tmp_path / "d" / "b.json").write_text('{"stranger": 1}')
    with pytest.raises(ImportFormatError, match=r"no file in it can be imported: a.json: .*not recognised"):
        ingest(tmp_path / "d", tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("tokens", 1.5, "1.5 at index 280"),
        ("tokens", 2**40, "1099511627776 at index 280"),
        ("loss_mask", 2, "2 at index 280"),
        ("behavior_log_probs", None, "None at index 280"),
        ("behavior_log_probs", 1e300, "1e\\+300 at index 280"),
    ],
)
def test_what_is_wrong_in_a_long_list_is_named(tmp_path: Path, column: str, value: Any, reason: str) -> None:
    row: dict[str, Any] = {"id": "a", "prompt_length": 0, "response_length": 300}
    row |= {"tokens": [7] * 300, "loss_mask": [1] * 300, "behavior_log_probs": [-0.25] * 300}
    (tmp_path / "good.jsonl").write_text(json.dumps(row))
    ingest(tmp_path / "good.jsonl", tmp_path / "s")
    (found,) = TrajectoryStore.open(tmp_path / "s").scan().to_trajectories()
    assert (list(found.tokens), list(found.behavior_log_probs)) == ([7] * 300, [-0.25] * 300)
    row[column][280] = value
    (tmp_path / "bad.jsonl").write_text(json.dumps(row))
    with pytest.raises(ImportFormatError, match=f"column '{column}': .*{reason}"):
        ingest(tmp_path / "bad.jsonl", tmp_path / "s")
