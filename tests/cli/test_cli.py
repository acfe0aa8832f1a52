"""The shell as a user meets it: what it prints, what it exits with, and what it leaves behind."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from trajstore import TrajectoryStore

ROOT = Path(__file__).resolve().parents[2]
AIRLINE = ROOT.parent / "shared" / "data" / "tau_bench_airline.json"


@pytest.fixture
def run(trajstore: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    return trajstore


def row(i: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"row-{i}",
        "group_id": f"g{i // 2}",
        "prompt_tokens": [1, 2],
        "response_tokens": [3, 4, 5],
        "behavior_log_probs": [-0.5, -0.25, -1.0],
        "reward": i / 2,
        "version": {"version_id": i, "timestamp": 0.0, "step": 0},
        "status": "completed",
    } | more


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(r) + "\n" for r in rows)


def tree(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha1(p.read_bytes()).hexdigest() for p in files}


def test_import_makes_a_store_then_appends(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(row(0), row(1)))
    code, out, _ = run("import", "a.jsonl", "s")
    assert code == 0
    assert "format trajstore-jsonl" in out
    assert "made s: 2 rows, 10 tokens" in out
    code, out, _ = run("import", "a.jsonl", "s", "--format", "trajstore-jsonl")
    assert code == 0
    assert "appended to s: 2 rows" in out
    assert "snapshot 2" in out
    assert TrajectoryStore.open(tmp_path / "s").count() == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "s"]


def test_import_as_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(row(0), row(1, reward=float("nan"))))
    code, out, _ = run("import", "a.jsonl", "deep/er/s", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["rows"], found["created"], found["snapshot"]) == (2, True, 1)
    assert found["not_finite"] == {"reward": 1}


def test_quarantine_names_lines_and_counts(run: Run, tmp_path: Path) -> None:
    bad = row(1, behavior_log_probs=[-1.0])
    (tmp_path / "a.jsonl").write_text(lines(row(0), bad, row(2)))
    code, out, _ = run("import", "a.jsonl", "s", "--on-error", "quarantine")
    assert code == 0
    assert "quarantined 1 record in s" in out
    assert "a.jsonl:2: has 1 values, expected 5 (tokens) or 3 (response)" in out
    store = TrajectoryStore.open(tmp_path / "s")
    assert (store.count(), len(store.quarantined())) == (2, 1)


@pytest.mark.parametrize("on_error", ["stop", "skip", "quarantine"])
def test_an_import_of_nothing_is_no_success(run: Run, tmp_path: Path, on_error: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "scor": 1}\n{"id": 1\n')
    asked = ("--format", "trajstore-jsonl", "--on-error", on_error)
    code, out, err = run("import", "bad.jsonl", "s", *asked)
    assert code == 2
    if on_error == "stop":
        assert "error: bad.jsonl:1: " in err
    else:
        assert "nothing was imported: every record was refused" in out
        assert "  bad.jsonl:1: trajectory 'a': unknown field 'scor'" in out
        assert "  bad.jsonl:2: not JSON" in out
    assert (tmp_path / "s").exists() == (on_error == "quarantine")
    (tmp_path / "bad.jsonl").write_text('{"id": "a"}\n{"id": 1\n')
    code, out, _ = run("import", "bad.jsonl", "s", *asked)
    assert code == (2 if on_error == "stop" else 0)
    if on_error != "stop":
        assert "1 record" in out
        code, out, _ = run("import", "bad.jsonl", "s", *asked)  # all that can be is in already
        assert (code, "1 of 1 files were in already" in out) == (0, True)
    code, out, _ = run("import", "--help")
    assert "2 when nothing could be imported" in " ".join(out.split())


def test_import_of_a_folder_tells_what_was_left_out(run: Run, tmp_path: Path) -> None:
    for folder in range(3):
        (tmp_path / "d" / str(folder)).mkdir(parents=True)
        (tmp_path / "d" / str(folder) / "a.jsonl").write_text(lines(row(folder)))
        (tmp_path / "d" / str(folder) / "metadata.json").write_text("{}")
    for name in range(12):
        (tmp_path / "d" / f"{name}.json").write_text(json.dumps({f"k{name}": 1}))
    code, out, _ = run("import", "d", "s")
    assert code == 0
    assert "format trajstore-jsonl: 3 files (d/0/a.jsonl:1 has only" in out
    assert "left out 0.json: format not recognised: found keys 'k0'" in out
    assert "left out 3 files more, for other reasons" in out or "left out 5 files more" in out
    found = json.loads(run("import", "d", "s2", "--json")[1])
    assert len(found["left_out"]) == 15
    assert {"name": "1/metadata.json", "reason": "describes a run"} in found["left_out"]


BAD_FILES = {
    "empty": ("", "no records in it"),
    "truncated": (lines(row(0)) + '{"id": "x", "tokens": [1, 2', ":2: not JSON"),
    "nan_tokens": (lines(row(0), row(1, prompt_tokens=[1, float("nan")])), ":2:"),
    "big_token": (lines(row(0), row(1, prompt_tokens=[1, 2**31])), "2147483648 at index 1"),
    "short_log_probs": (lines(row(0), row(1, behavior_log_probs=[-1.0, -2.0])), "has 2 values, expected 5"),
    "unknown_field": (lines(row(0), row(1, surprise=1)), "surprise"),
    "bad_status": (lines(row(0), row(1, status="done")), "status"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("new", [True, False], ids=["new store", "old store"])
def test_bad_files_are_refused_and_leave_nothing(run: Run, tmp_path: Path, name: str, new: bool) -> None:
    text, expected = BAD_FILES[name]
    (tmp_path / "bad.jsonl").write_text(text)
    if not new:
        (tmp_path / "good.jsonl").write_text(lines(row(7)))
        assert run("import", "good.jsonl", "s")[0] == 0
    before = tree(tmp_path)
    code, out, err = run("import", "bad.jsonl", "s", "--format", "trajstore-jsonl")
    assert code == 2
    assert out == ""
    assert expected in err
    assert "bad.jsonl" in err
    check_error_form(err)
    assert tree(tmp_path) == before
    assert (tmp_path / "s").exists() != new


def check_error_form(err: str) -> None:
    first, *rest = err.splitlines()
    assert first.startswith("error: ")
    assert len(rest) == 1
    assert rest[0].startswith("hint: ")


def _missing(tmp_path: Path) -> list[str]:
    return ["import", "nowhere.jsonl", "s"]


def _folder(tmp_path: Path) -> list[str]:
    (tmp_path / "folder").mkdir()
    return ["import", "folder", "s"]


def _unknown_format(tmp_path: Path) -> list[str]:
    (tmp_path / "a.jsonl").write_text(lines(row(0)))
    return ["import", "a.jsonl", "s", "--format", "verl2"]


def _undetected(tmp_path: Path) -> list[str]:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    return ["import", "a.jsonl", "s"]


def _no_store(tmp_path: Path) -> list[str]:
    return ["info", "s"]


def _no_store_sql(tmp_path: Path) -> list[str]:
    return ["sql", "s", "select 1"]


def _no_store_sample(tmp_path: Path) -> list[str]:
    return ["sample", "s"]


def _not_a_store(tmp_path: Path) -> list[str]:
    (tmp_path / "a.jsonl").write_text(lines(row(0)))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "x").write_text("x")
    return ["import", "a.jsonl", "t"]


def _store_exists(tmp_path: Path) -> list[str]:
    TrajectoryStore.create(tmp_path / "t")
    return ["demo", "t"]


def _newer(tmp_path: Path) -> list[str]:
    (tmp_path / "a.jsonl").write_text(lines(row(0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trajstore.store.table.FORMAT_VERSION", 99)
        TrajectoryStore.create(tmp_path / "t")
    return ["import", "a.jsonl", "t"]


def _bad_sql(tmp_path: Path) -> list[str]:
    TrajectoryStore.create(tmp_path / "t")
    return ["sql", "t", "select nothing from trajectories"]


def _bad_where(tmp_path: Path) -> list[str]:
    TrajectoryStore.create(tmp_path / "t")
    return ["sample", "t", "--where", "tokens = 3"]


def _gap_without_version(tmp_path: Path) -> list[str]:
    TrajectoryStore.create(tmp_path / "t")
    return ["sample", "t", "--by", "version_gap"]


def _no_snapshot(tmp_path: Path) -> list[str]:
    TrajectoryStore.create(tmp_path / "t")
    return ["info", "t", "--snapshot", "8"]


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (_missing, "nowhere.jsonl"),
        (_folder, "folder"),
        (_unknown_format, "unknown format 'verl2'"),
        (_undetected, "a.jsonl"),
        (_no_store, "there is no store at s"),
        (_no_store_sql, "there is no store at s"),
        (_no_store_sample, "there is no store at s"),
        (_not_a_store, "is not a store"),
        (_store_exists, "already holds a store"),
        (_newer, "has format version 99; this trajstore reads up to 1"),
        (_bad_sql, '"nothing" not found'),
        (_bad_where, "'tokens' is a list"),
        (_gap_without_version, "needs the current policy version"),
        (_no_snapshot, "no snapshot 8"),
    ],
)
def test_bad_input_is_one_line_a_hint_and_exit_2(
    run: Run, tmp_path: Path, prepare: Callable[[Path], list[str]], expected: str
) -> None:
    arguments = prepare(tmp_path)
    before = tree(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert expected in err
    check_error_form(err)
    assert tree(tmp_path) == before
    assert not (tmp_path / "s").exists()


def test_usage_errors_exit_2_too(run: Run) -> None:
    assert run("import")[0] == 2
    assert run("sample", "s", "-n", "-1")[0] == 2
    assert run("nonsense")[0] == 2


def test_debug_shows_the_traceback(run: Run) -> None:
    with pytest.raises(FileNotFoundError):
        run("--debug", "info", "nowhere")
    assert run("info", "nowhere")[0] == 2


def test_damage_exits_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(row(0)))
    run("import", "a.jsonl", "s")
    next((tmp_path / "s").glob("part-*")).write_bytes(b"x")
    code, _, err = run("info", "s")
    assert code == 1
    assert "part-" in err


def test_info(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(*(row(i) for i in range(4))))
    run("import", "a.jsonl", "s")
    code, out, _ = run("info", "s", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["rows"], found["tokens"], found["groups"], found["snapshots"]) == (4, 20, 2, 2)
    assert found["policy versions"] == "0 to 3"
    assert found["mean reward"] == 0.75
    assert found["status"] == {"completed": 4}
    assert found["bytes"] == sum(found["column bytes"].values())
    assert found["bytes per token"] == round(found["bytes"] / 20, 3)
    text = run("info", "s")[1]
    for expected in ("rows", "bytes per token", "snapshots", "behavior_log_probs", "4 completed"):
        assert expected in text
    assert json.loads(run("info", "s", "--snapshot", "0", "--json")[1])["rows"] == 0


def test_sql(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(row(0), row(1, reward=float("nan"), group_id="[x]")))
    run("import", "a.jsonl", "s")
    query = "select id, version_gap, sum(length) over () n, reward from trajectories order by id"
    code, out, _ = run("sql", "s", query, "--json", "--at", "5")
    assert code == 0
    assert json.loads(out) == [
        {"id": "row-0", "version_gap": 5, "n": 10, "reward": 0.0},
        {"id": "row-1", "version_gap": 4, "n": 10, "reward": "NaN"},
    ]
    _, out, _ = run("sql", "s", "select group_id, reward from trajectories order by id")
    assert "[x]" in out
    assert "nan" in out
    assert json.loads(run("sql", "s", "select 1 a, 2 a", "--json")[1]) == [{"a": 1, "a_1": 2}]
    assert json.loads(run("sql", "s", "select 1 where false", "--json")[1]) == []
    assert json.loads(run("sql", "s", "select 'ab'::blob b", "--json")[1]) == [{"b": "6162"}]
    code, _, err = run("sql", "s", "select 'infinity'::date")
    assert code == 2
    assert "a value cannot be shown" in err


def test_sample_is_the_same_for_one_seed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(*(row(i) for i in range(40))))
    run("import", "a.jsonl", "s")
    arguments = (
        "sample",
        "s",
        "-n",
        "6",
        "--by",
        "version_gap",
        "--at",
        "40",
        "--max-staleness",
        "20",
        "--json",
    )
    first, again = json.loads(run(*arguments)[1]), json.loads(run(*arguments)[1])
    assert first == again
    assert len(first) == 6
    assert all(0 < r["version_gap"] <= 20 for r in first)
    assert json.loads(run(*arguments, "--seed", "1")[1]) != first
    assert "row-" in run("sample", "s", "-n", "2")[1]
    assert "reward > 99: 40 rows in, 0 out" in run("sample", "s", "--where", "reward > 99")[1]


def test_looking_after_a_store(run: Run, tmp_path: Path) -> None:
    for blank in range(3):  # the same bytes again would be the same import
        (tmp_path / "a.jsonl").write_text(lines(*(row(i) for i in range(4))) + "\n" * blank)
        run("import", "a.jsonl", "s")
    assert "joined 3 files into 1, snapshot 4" in run("compact", "s")[1]
    assert "deleted 3 rows" in run("delete", "s", "--where", "id = 'row-2'")[1]
    assert json.loads(run("delete", "s", "--at", "4", "--max-staleness", "3", "--json")[1])["rows"] == 3
    assert "before" in run("tag", "s", "before", "--snapshot", "1")[1]
    assert json.loads(run("tag", "s", "--json")[1]) == {"before": 1}
    found = json.loads(run("history", "s", "--json")[1])
    assert [h["operation"] for h in found] == ["create", *["append"] * 3, "compact", "delete", "remove_stale"]
    assert found[1]["tags"] == "before"
    assert "remove_stale" in run("history", "s")[1]
    assert json.loads(run("info", "s", "--snapshot", "before", "--json")[1])["rows"] == 4
    assert "would remove 4 files" in run("vacuum", "s", "--hours", "0", "--force")[1]
    assert run("vacuum", "s", "--hours", "1", "--run")[0] == 2
    assert (
        len(json.loads(run("vacuum", "s", "--hours", "0", "--force", "--run", "--json")[1])["removed"]) == 4
    )
    code, out, _ = run("fsck", "s")
    assert code == 0
    assert "id 'row-1'" in out
    assert "as it was at snapshot 1" in run("restore", "s", "before")[1]
    code, out, _ = run("fsck", "s")
    assert (code, out) == (0, "s: every file and every row is as it should be\n")
    next(p for p in (tmp_path / "s").glob("part-*") if p.name in _live(tmp_path / "s")).write_bytes(b"x")
    assert run("fsck", "s")[0] == 1
    assert json.loads(run("fsck", "s", "--json")[1])[0]["level"] == "error"


def _live(store: Path) -> set[str]:
    return {Path(name).name for name in TrajectoryStore.open(store).scan().data_files()}


@pytest.mark.parametrize(
    "arguments", [[], ["--where", "true", "--max-staleness", "1"], ["--max-staleness", "1"]]
)
def test_delete_wants_to_know_which_rows(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    TrajectoryStore.create(tmp_path / "s")
    code, _, err = run("delete", "s", *arguments)
    assert code == 2
    check_error_form(err)


VERBS = [
    *("import", "info", "sql", "sample", "demo", "history", "tag"),
    *("fsck", "compact", "delete", "vacuum", "restore"),
    *("doctor", "plan", "report"),
]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(run: Run, verb: str) -> None:
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert f"Example: trajstore {verb}" in " ".join(out.split())


def script(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    trajstore = Path(sys.executable).with_name("trajstore")
    return subprocess.run(
        [str(trajstore), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def test_pipes_get_whole_lines_without_colour(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(row(0, prompt="long " * 60)))
    run("import", "a.jsonl", "s")
    done = script("sql", "s", "select prompt, id from trajectories", cwd=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert ("long " * 60).strip() in done.stdout
    failed = script("info", "nowhere", cwd=tmp_path)
    assert failed.returncode == 2
    assert "\x1b" not in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_closed_pipe_is_no_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(*(row(i) for i in range(50))))
    run("import", "a.jsonl", "s")
    trajstore = Path(sys.executable).with_name("trajstore")
    query = "select * from range(5000)"
    done = subprocess.run(
        f"'{trajstore}' sql s '{query}' | head -n 2",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not AIRLINE.exists(), reason="the tau-bench runs are not beside this checkout")
def test_the_airline_runs(run: Run) -> None:
    code, out, _ = run("import", str(AIRLINE), "air", "--format", "messages")
    assert code == 0
    assert "200 rows" in out
    query = "select count(*) n, avg(reward) r, count(distinct group_id) g from trajectories"
    code, out, _ = run("sql", "air", query, "--json")
    assert json.loads(out) == [{"n": 200, "r": 0.42, "g": 50}]


def test_sample_explains_what_each_gate_dropped(run: Run, tmp_path: Path) -> None:
    rows = [row(i, source="hard" if i < 4 else "easy") for i in range(12)]
    (tmp_path / "a.jsonl").write_text(lines(*rows))
    run("import", "a.jsonl", "s")
    gate = ("sample", "s", "-n", "3", "--by", "group_id", "--at", "11", "--max-staleness", "7", "--explain")
    code, out, _ = run(*gate)
    assert code == 0
    assert "dropped all 4 rows of source 'hard'" in out
    assert "4 to 7 tokens" in out
    found = json.loads(run(*gate, "--json")[1])
    tasks = {r["value"]: r["rows_out"] for r in found["gates"] if r["part"] == "task" and r["step"] == 0}
    assert tasks == {"easy": 8, "hard": 0}
    assert "group_id 'g0'" in run(*gate, "--task", "group_id")[1]
    assert "nan" not in run(*gate, "--where", "false")[1], "no row has no mean length"


def test_sample_takes_a_frameworks_numbers_weights_groups_and_uses(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(*(row(i) for i in range(12))))
    run("import", "a.jsonl", "s")
    at = ("--at", "11", "--max-staleness", "1", "--json")

    def drawn(*options: str) -> list[str]:
        return [r["id"] for r in json.loads(run("sample", "s", "-n", "9", *options)[1])]

    assert drawn(*at) == ["row-10", "row-11"]
    assert drawn(*at, "--convention", "verl") == ["row-11"]
    assert drawn(*at, "--convention", "prime-rl") == ["row-9", "row-10", "row-11"]
    assert len(drawn("--at", "11", "--weights", "freshness", "--json")) == 9
    assert run("sample", "s", "--weights", "freshness")[0] == 2
    groups = drawn("-n", "2", "--whole-groups", "--json")
    assert len(groups) == 4
    TrajectoryStore.open("s").record_training_step(0, [f"row-{i}" for i in range(11)])
    assert drawn("--max-times", "1", "--json") == ["row-11"]
