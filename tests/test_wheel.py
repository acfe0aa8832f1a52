"""`pip install` of the wheel into an empty environment gives a working `trajstore` command."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("trajstore-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "-c",
        ROOT / "constraints.txt",
        wheel,
        cwd=tmp_path,
    )
    trajstore = tmp_path / "env" / "bin" / "trajstore"
    assert run(trajstore, "--version", cwd=tmp_path).strip() == "0.1.0"
    row = {"id": "a", "tokens": [1, 2, 3], "prompt_length": 1, "response_length": 2, "reward": 0.5}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    run(trajstore, "import", "rows.jsonl", "store", cwd=tmp_path)
    query = "select id, length, reward from trajectories"
    found = json.loads(run(trajstore, "sql", "store", query, "--json", cwd=tmp_path))
    assert found == [{"id": "a", "length": 3, "reward": 0.5}]
    code = (
        "from trajstore import TrajectoryStore; from trajstore.loader import TrajectoryLoader;"
        "print(next(iter(TrajectoryLoader(TrajectoryStore.open('store').scan(), batch_size=1)))['input_ids'])"
    )
    assert run(python, "-c", code, cwd=tmp_path).strip() == "tensor([[1, 2, 3]])"
