"""The README does what it says: its Python runs, and its shell sessions print what it shows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
SHARED = ROOT.parent / "shared"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_python_blocks_run(tmp_path: Path) -> None:
    code = "\n".join(blocks("python"))  # one walk in parts: a later one goes on from the earlier ones
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ILQLDataset(400 causal rows" in done.stdout
    assert done.stdout.splitlines()[-1] == "10 gaps; 0 rows at snapshot 0"


@pytest.mark.skipif(not SHARED.exists(), reason="the files the session reads are not beside this checkout")
def test_console_blocks_print_what_they_show(tmp_path: Path) -> None:
    (tmp_path / "shared").symlink_to(SHARED)
    here = tmp_path / "here"
    here.mkdir()
    sessions = re.findall(
        r"^\$ (trajstore .*)\n((?:(?!\$ ).*\n)*)", "\n".join(blocks("console")), re.MULTILINE
    )
    assert len(sessions) == 4
    for command, shown in sessions:
        program, *arguments = shlex.split(command)
        script = Path(sys.executable).with_name(program)
        done = subprocess.run([script, *arguments], cwd=here, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed = [line.rstrip() for line in done.stdout.splitlines()]
        for line in shown.strip().splitlines():
            # Sizes differ by some bytes from run to run: ids and times are fresh.
            assert re.sub(r"[\d.]+ KiB", "KiB", line.rstrip()) in [
                re.sub(r"[\d.]+ KiB", "KiB", p) for p in printed
            ]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+) ", TEXT)) <= targets
    assert {"demo", "test", "lint", "bench"} <= targets
