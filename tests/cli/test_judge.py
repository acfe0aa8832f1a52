"""doctor, plan and report in the shell: what they print, and their exit codes."""

import json
import math
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from trajstore import PolicyVersion, Trajectory, TrajectoryStatus, TrajectoryStore
from trajstore.cli.app import app
from trajstore.errors import InputError


def row(i: int, **fields: object) -> Trajectory:
    return Trajectory(
        **{
            "id": f"r{i}",
            "group_id": f"g{i // 4}",
            "prompt_tokens": [1, i // 4],
            "response_tokens": [i] * (1 + i % 9),
            "behavior_log_probs": [-1.0] * (1 + i % 9),
            "reward": float(i % 2),
            "version": PolicyVersion(i // 8),
            "status": TrajectoryStatus.COMPLETED,
            "source": "[hard]" if i < 8 else "easy",
            **fields,
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    TrajectoryStore.create(tmp_path / "s").append([row(i) for i in range(32)])
    return tmp_path / "s"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def add(store: Path, *rows: Trajectory) -> None:
    TrajectoryStore.open(store).append(rows)


def test_doctor_has_nothing_to_say_of_sound_rows(store: Path) -> None:
    done = run("doctor", store)
    assert (done.exit_code, done.output) == (0, "nothing found that a trainer should know\n")
    assert json.loads(run("doctor", store, "--json").output) == []


def test_doctor_exits_as_linters_do(store: Path) -> None:
    add(
        store,
        row(40),
        row(41, finish_reason="length"),
        row(42),
        row(43, tokens_retokenized=True, behavior_log_probs=[]),
    )
    done = run("doctor", store)
    assert done.exit_code == 0, "warnings are no failure"
    assert run("doctor", store, "--strict").exit_code == 1
    assert "warning 1 row: token ids come from re-tokenising text" in done.output
    assert "[retokenized]" in done.output
    assert "rows r43" in done.output
    add(store, row(44, reward=math.nan), row(45), row(46), row(47))
    done = run("doctor", store)
    assert done.exit_code == 1
    assert done.output.index("error") < done.output.index("warning") < done.output.index("note")
    found = json.loads(run("doctor", store, "--json").output)
    assert found[0]["check"] == "nan-reward"
    assert found[0]["ids"] == ["r44"]
    assert run("doctor", store, "--snapshot", "1").exit_code == 0


def test_doctor_says_what_it_counts_from(store: Path) -> None:
    assert "24 rows: newer than the current version 0, by 3 at most" in run("doctor", store, "--at", 0).output


def test_plan_compares_choices_and_names_who_starves(store: Path) -> None:
    done = run(
        "plan",
        store,
        "--max-staleness",
        1,
        "--max-staleness",
        3,
        "--group",
        4,
        "--max-tokens",
        64,
        "--buckets",
        2,
    )
    assert done.exit_code == 0, done.output
    assert "16 of 32" in done.output
    assert "32 of 32" in done.output
    assert "warning max_staleness 1, max_tokens 64: nothing is left of [hard]: 8 stale\n" in done.output, (
        "and not twice, for each size of bucket"
    )
    found = json.loads(
        run("plan", store, "--max-staleness", 1, "--max-staleness", 3, "--batch-size", 8, "--json").output
    )
    assert [f["max_staleness"] for f in found] == [1, 3]
    assert [f["kept"] for f in found] == [16, 32]
    assert [f["batches"] for f in found] == [2, 4]
    assert [f["starved"] for f in found] == [["[hard]"], []]
    assert found[0]["dropped"] == {"stale": 16}
    assert {t["task"]: t["kept"] for t in found[0]["by_task"]} == {"[hard]": 0, "easy": 16}


def test_plan_without_options_and_with_bad_ones(store: Path) -> None:
    assert "32 of 32" in run("plan", store).output
    assert run("plan", store, "--max-staleness", -1).exit_code != 0
    assert run("plan", store, "--batch-size", 0).exit_code != 0
    assert run("plan", store, "--by", "tokens").exit_code != 0


def test_plan_compares_rows_and_tokens_and_says_what_a_step_is(store: Path) -> None:
    done = run("plan", store, "--max-tokens", 64, "--batch-size", 8, "--ranks", 2, "--log-probs")
    assert done.exit_code == 0, done.output
    head, *_ = (line for line in done.output.splitlines() if "kept" in line)
    for title in ("max_tokens", "batch_size", "steps", "tokens/step"):
        assert title in head
    assert "max_staleness" not in head
    lines = [line for line in done.output.splitlines() if "32 of 32" in line]
    tokens = sum(2 + 1 + i % 9 for i in range(32))
    cells = [cell.strip() for cell in lines[1].split("│")]
    assert cells[1] == "8"
    assert cells[3:5] == ["32 of 32", "4"]
    assert cells[-3:-1] == ["2", f"{tokens / 2:,.0f}"]


def test_a_store_without_rows_or_tokens_is_called_so(tmp_path: Path) -> None:
    store = tmp_path / "s"
    TrajectoryStore.create(store)
    assert run("doctor", store).output == "there are no rows\n"
    assert json.loads(run("doctor", store, "--json").output) == []
    assert "warning there are no rows" in run("plan", store).output
    add(store, Trajectory(prompt="p", response="r", status=TrajectoryStatus.COMPLETED))
    done = run("plan", store)
    assert done.exit_code == 0
    assert "warning no row has tokens" in done.output
    assert "0.0%" not in done.output, "nothing is padded, and nothing is not"


@pytest.mark.parametrize("verb", ["doctor", "plan", "report"])
def test_a_version_beyond_64_bits_and_a_key_of_no_row_are_refused(
    store: Path, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add(store, row(40, metadata={"task": "x", "level": 3}))
    done = run(verb, store, "--at", 2**63)
    assert isinstance(done.exception, InputError)
    assert f"policy version is {2**63}, expected a whole number of 64 bits" in str(done.exception)
    done = run(verb, store, "--by", "metadata.tsk")
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == "no row has metadata.tsk\n  hint: keys of the metadata: level, task"
    assert not (tmp_path / "report.html").exists()


def test_report_says_where_it_cannot_write(store: Path, tmp_path: Path) -> None:
    for out, message in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.html", f"no folder {tmp_path}")):
        done = run("report", store, "-o", out)
        assert isinstance(done.exception, InputError)
        assert message in str(done.exception)


def test_report_writes_one_page(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "page.html"
    out.parent.mkdir()
    done = run("report", store, "-o", out, "--at", 5)
    assert done.exit_code == 0, done.output
    assert f"wrote {out}" in done.output
    text = out.read_text()
    assert text.startswith("<!doctype html>")
    assert "version gaps are counted from version 5" in text


def test_report_says_what_is_missing(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "altair", None)
    for name in ("bundle", "charts", "sections"):
        monkeypatch.delitem(sys.modules, f"trajstore.report.{name}", raising=False)
        monkeypatch.delattr(f"trajstore.report.{name}", raising=False)
    done = run("report", store, "-o", tmp_path / "x.html")
    assert done.exit_code == 1
    assert "a report needs altair" in str(done.exception)
    assert not (tmp_path / "x.html").exists()
