"""The wheel in an environment that has what it requires and no more gives a working `trajstore` command.

In the long form pip downloads all of it into an empty environment, which takes a minute.
"""

import json
import os
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SOAK = os.environ.get("TRAJSTORE_SOAK") == "1"
ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def give_what_is_declared(env: Path) -> None:
    """Links what the installed wheel requires, and what that requires in turn, from where we run."""
    (site,) = env.glob("lib/python*/site-packages")
    seen = {"trajstore"}
    wanted = list(metadata.Distribution.at(next(site.glob("trajstore-*.dist-info"))).requires or [])
    while wanted:
        needed = Requirement(wanted.pop())
        name = canonicalize_name(needed.name)
        if name in seen or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        found = metadata.distribution(name)
        wanted += found.requires or []
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("trajstore-*.whl")
    env = tmp_path / "env"
    if SOAK:
        venv.create(env, with_pip=True)
        pip = [env / "bin" / "python", "-m", "pip"]
        run(*pip, "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    else:
        venv.create(env)
        pip = [sys.executable, "-m", "pip", "--python", env / "bin" / "python"]
        run(*pip, "install", "-q", "--no-compile", "--no-deps", "--no-index", wheel, cwd=tmp_path)
        give_what_is_declared(env)
    python = env / "bin" / "python"
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
