"""The shell verbs that give rows out."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from trajstore import PolicyVersion, Trajectory, TrajectoryStatus, TrajectoryStore
from trajstore.export import FORMATS


@pytest.fixture
def run(trajstore: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    store = TrajectoryStore.create(tmp_path / "air")
    for i, version in enumerate((3, 1, 2)):
        store.append(
            [Trajectory(
                id="abc"[i], group_id="g", prompt="p", response="r" * (i + 1), tokens=[1, 2, 3 + i],
                prompt_length=1, response_length=2, version=PolicyVersion(version), reward=float(i),
                status=TrajectoryStatus.COMPLETED,
            )]
        )  # fmt: skip
    store.record_training_step(5, ["c", "a"])

    return trajstore


def ids(text: str) -> list[str]:
    return [json.loads(line)["id"] for line in text.splitlines()]


def test_replay_writes_lines_that_import_again(run: Run, tmp_path: Path) -> None:
    assert ids(run("replay", "air", "--by", "version", "--to", "jsonl")[1]) == ["b", "c", "a"]
    assert ids(run("replay", "air", "--by", "ingest", "--where", "reward > 0")[1]) == ["b", "c"]
    assert ids(run("replay", "air", "--by", "step")[1]) == ["c", "a"]
    assert ids(run("replay", "air", "--snapshot", "2")[1]) == ["b", "a"]
    assert run("replay", "air", "--step", "5", "-o", "step.jsonl") == (0, "", "")
    assert ids((tmp_path / "step.jsonl").read_text()) == ["c", "a"]
    code, _, err = run("replay", "air", "--step", "5", "-o", "step.jsonl")
    assert (code, "exists" in err) == (2, True)
    code, _, err = run("replay", "air", "--step", "6")
    assert (code, "no step 6" in err) == (2, True)
    assert run("replay", "air", "--step", "5", "--where", "reward > 0")[0] == 2
    code, _, err = run("replay", "air", "--step", "5", "--by", "ingest")
    assert (code, "--by does not go with --step" in err) == (2, True)
    assert ids(run("replay", "air")[1]) == ["b", "c", "a"]
    assert run("import", "step.jsonl", "again")[0] == 0
    assert ids(run("replay", "again", "--by", "ingest")[1]) == ["c", "a"]


def test_a_replay_that_breaks_off_leaves_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def write(row: Trajectory) -> str:
        if written:
            raise KeyboardInterrupt
        written.append(row.id)
        return "{}"

    monkeypatch.setattr("trajstore.cli.outward.write_line", write)
    assert run("replay", "air", "-o", "all.jsonl")[0] == 130
    assert written
    assert sorted(p.name for p in tmp_path.iterdir()) == ["air"]


def test_export_says_what_it_made_and_what_has_no_place(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("export", "air", "out/8.jsonl", "--as", "verl", "--where", "reward > 0")
    assert code == 0
    assert out.startswith("wrote out/8.jsonl: 2 rows as verl, ")
    assert "verl has no place for tokens (2 rows), version_id (2 rows)" in out
    code, _, err = run("export", "air", "out/8.jsonl", "--as", "verl")
    assert (code, "exists" in err) == (2, True)
    code, out, _ = run("export", "air", "best.parquet", "--as", "sft", "--top", "0.4", "--json")
    told = json.loads(out)
    assert (told["format"], told["rows"], told["dropped"]) == ("sft", 1, {"not among the best": 2})
    assert (
        "left out 2: not among the best" in run("export", "air", "b.jsonl", "--as", "sft", "--top", "0.4")[1]
    )
    code, _, err = run("export", "air", "x.csv", "--as", "csv")
    assert (code, "format is 'csv'" in err) == (2, True)
    assert run("export", "air", "x.parquet", "--as", "kto")[0] == 2
    assert not (tmp_path / "x.parquet").exists()


def test_help_names_every_format(run: Run) -> None:
    code, out, _ = run("export", "--help")
    assert code == 0
    assert all(name in out for name in FORMATS)
