"""`trajstore cache`: what it lists and what it frees."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from trajstore import Trajectory, TrajectoryStore


@pytest.fixture
def run(trajstore: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("TRAJSTORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    return partial(trajstore, "cache")


def listed(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, _ = run("ls", *arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_it_lists_and_frees(run: Run, tmp_path: Path) -> None:
    assert listed(run)["files"] == []
    for name in ("one", "two"):
        store = TrajectoryStore.create(tmp_path / name)
        store.append([Trajectory(id=name, prompt_tokens=[1], response_tokens=[2])])
        store.scan().rows(["tokens"])
    both, one = listed(run), listed(run, "one")
    assert [len(both["files"]), len(one["files"])] == [2, 1]
    assert both["bytes"] == sum(p.stat().st_size for p in (tmp_path / "cache").rglob("*.arrow"))
    assert one["files"][0]["columns"] == 1
    code, out, _ = run("ls")
    assert code == 0
    assert all(file["data_file"] in out for file in both["files"])
    code, out, _ = run("rm", "one")
    assert (code, f"freed {one['bytes']:,} bytes" in out) == (0, True)
    assert listed(run)["files"] == listed(run, "two")["files"] != []
    code, out, _ = run("rm", "--all", "--json")
    assert (code, json.loads(out)["freed"]) == (0, both["bytes"] - one["bytes"])
    assert listed(run)["bytes"] == 0


@pytest.mark.parametrize("arguments", [["rm"], ["rm", "one", "--all"], ["ls", "nowhere"], ["rm", "nowhere"]])
def test_bad_input_is_said(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "error" in err.lower()
