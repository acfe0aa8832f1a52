"""Owns the tests of folders made aside: whole or not there, and nothing of a killed maker stays."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trajstore.errors import StoreExistsError
from trajstore.store.aside import made_aside, sweep_aside

DIES = """
import os, signal, sys
from pathlib import Path
from trajstore.store.aside import made_aside
with made_aside(Path(sys.argv[1])) as aside:
    (aside / "deep").mkdir(parents=True)
    (aside / "deep" / "part").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_there_when_it_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with made_aside(folder) as aside:
        aside.mkdir()
        (aside / "part").touch()
        assert not folder.exists()
    assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == [
        "runs", "runs/a", "runs/a/part",
    ]  # fmt: skip


def _fail(folder: Path) -> None:
    with made_aside(folder) as aside:
        aside.mkdir()
        raise RuntimeError


def _race(folder: Path) -> None:
    with made_aside(folder) as aside:
        aside.mkdir()
        folder.write_text("another's")


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        _fail(tmp_path / "a")
    with pytest.raises(StoreExistsError, match="appeared"):
        _race(tmp_path / "b")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("b", "another's")]


@pytest.mark.parametrize("name", ["a", "a [1]*?", "%41 ä"])
def test_what_a_killed_maker_left_is_swept_and_nothing_else(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    done = subprocess.run([sys.executable, "-c", DIES, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    left = {p.name for p in tmp_path.iterdir()}
    assert len(left) == 2
    (tmp_path / f".{name}-notes.making").touch()
    with made_aside(folder) as alive:
        alive.mkdir()
        sweep_aside(tmp_path / "other")
        assert left < {p.name for p in tmp_path.iterdir()}
        sweep_aside(folder)
        assert left.isdisjoint(p.name for p in tmp_path.iterdir())
        assert alive.exists()
    assert {p.name for p in tmp_path.iterdir()} == {name, f".{name}-notes.making"}
