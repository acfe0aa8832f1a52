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
    with pytest.raises(ImportFormatError, match=r"c\.pt") as caught:
        ingest(folder, tmp_path / "s")
    assert "1 of the 4 files are in; --on-error skip goes on with the other files" in str(caught.value.hint)
    report = ingest(folder, tmp_path / "t", on_error="skip")
    assert ids(tmp_path / "t") == ["x"]
    assert [Path(where).name for where, _ in report.refused] == ["c.pt"]
    assert [name for name, _ in report.left_out] == ["b.pkl", "notes.txt"]
    assert all("/d/" not in reason for _, reason in [*report.refused, *report.left_out])


OTHERS = {
    "README.md": b"# notes\n",
    "config.yaml": b"lr: 1e-6\n",
    "train.log": b"[2026-01-01 00:00] INFO starting\n",
    "state.npy": b"\x93NUMPY\x01\x00v\x00",
    "model.safetensors": b"\x98\x01\x00\x00\x00\x00\x00\x00{}",
    "code.zip": b"PK\x05\x06" + bytes(18),
    "params.json": b'{"lr": 1e-6}',
}


def test_other_files_of_a_run_do_not_stop_its_import(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "1.jsonl").write_text('{"input": "i", "output": "o", "score": 1.0, "step": 1}\n')
    for name, content in OTHERS.items():
        (folder / name).write_bytes(content)
    report = ingest(folder, tmp_path / "s")
    assert (report.commit.rows, report.refused) == (1, [])
    assert sorted(name for name, _ in report.left_out) == sorted(OTHERS)


@pytest.mark.parametrize(
    ("name", "left_out", "rows"),
    [
        ("hf", {"verl_rl_input.parquet": "is verl-prompts, which is not imported"}, 10),
        ("rllm", {"gateway_traces.db": "is rllm-gateway, which is not imported"}, 4),
        ("prime_rl", {"intellect2.parquet": "is intellect-2, which is not imported"}, 10),
    ],
)
def test_a_folder_names_what_it_takes_and_what_it_does_not(
    tmp_path: Path, name: str, left_out: dict[str, str], rows: int
) -> None:
    report = ingest(FIXTURES / name, tmp_path / "s")
    assert report.commit.rows == rows
    for file, reason in left_out.items():
        assert reason in dict(report.left_out)[file]
    there = {p.relative_to(FIXTURES / name).as_posix() for p in (FIXTURES / name).rglob("*") if p.is_file()}
    assert {f.name for f in report.files} | {n for n, _ in report.left_out} == there


def test_a_damaged_dump_in_a_folder_is_no_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_text('{"id": "x"}\n')
    for name, content in (("b.jsonl", b"\xff\xfe{"), ("c.txt", b'{"id": "y", "tok'), ("d.json", b"[]")):
        (tmp_path / "d" / name).write_bytes(content)
        with pytest.raises(ImportFormatError, match=name):
            ingest(tmp_path / "d", tmp_path / f"s-{name}")
        assert [
            Path(w).name.partition(":")[0]
            for w, _ in ingest(tmp_path / "d", tmp_path / f"t-{name}", on_error="skip").refused
        ] == [name]
        (tmp_path / "d" / name).unlink()


@pytest.mark.parametrize("damaged_first", [True, False])
def test_quarantine_keeps_what_came_before_there_was_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged_first: bool
) -> None:
    monkeypatch.setattr("trajstore.ingest.refusals.AT_ONCE", 2)
    (tmp_path / "d").mkdir()
    bad = ['{"id": "a", "tokens": [1', '{"id": "b", "scor": 1}', '{"id": "c", "tokens": 1}'] * 2
    names = ("a.jsonl", "b.jsonl") if damaged_first else ("b.jsonl", "a.jsonl")
    (tmp_path / "d" / names[0]).write_text("\n".join(['{"id": "x", "tokens": []}', *bad][1:]) + "\n")
    good = ['{"id": "y"}', *bad, '{"id": "z"}']
    (tmp_path / "d" / names[1]).write_text("\n".join(good) + "\n")
    for _ in range(2):  # the second adds nothing
        report = ingest(tmp_path / "d", tmp_path / "s", format="trajstore-jsonl", on_error="quarantine")
        assert len(report.refused) >= 8
        set_aside = TrajectoryStore.open(tmp_path / "s").quarantined().to_pylist()
        assert len(set_aside) == 12
        unread = {row["id"] for row in set_aside if row["id"] != "c"}
        assert unread <= {where for where, _ in report.refused}
        assert len(unread) == 8
        assert ids(tmp_path / "s") == ["y", "z"]


def test_quarantine_of_nothing_but_bad_records_makes_the_store(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "a", "scor": 1}\n{"id": "b", "tokens": [-1]}\n')
    report = ingest(path, tmp_path / "s", format="trajstore-jsonl", on_error="quarantine")
    assert (report.nothing, report.created, report.commit.rows) == (True, True, 0)
    assert len(TrajectoryStore.open(tmp_path / "s").quarantined()) == 2
    (tmp_path / "c.jsonl").write_text('{"id": 1')
    report = ingest(tmp_path / "c.jsonl", tmp_path / "t", on_error="quarantine")
    assert [(where, reason[:8]) for where, reason in report.refused] == [
        (f"{tmp_path}/c.jsonl:1", "not JSON")
    ]
    (kept,) = TrajectoryStore.open(tmp_path / "t").quarantined().to_pylist()
    assert kept["id"] == f"{tmp_path}/c.jsonl:1"
    skipped = ingest(tmp_path / "c.jsonl", tmp_path / "u", on_error="skip")
    assert (skipped.nothing, skipped.created, (tmp_path / "u").exists()) == (True, False, False)


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
    assert len(list(tmp_path.glob(".s-*.making*"))) == (0 if before else 2)
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


@pytest.mark.parametrize("column", ["tokens", "prompt_tokens", "response_tokens", "loss_mask", "log_probs"])
def test_a_number_where_a_list_belongs_is_a_bad_record(tmp_path: Path, column: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"id": "a", "{column}": 5}}\n{{"id": "b", "{column}": null}}\n')
    with pytest.raises(ImportFormatError, match=f"a.jsonl:1: column '{column}': found 5, expected a list"):
        ingest(path, tmp_path / "s")
    report = ingest(path, tmp_path / "s", on_error="skip")
    assert ([where for where, _ in report.refused], ids(tmp_path / "s")) == ([f"{path}:1"], ["b"])
