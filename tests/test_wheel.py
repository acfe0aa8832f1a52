"""The wheel in an environment that has what it requires and no more gives a working `trajstore` command.

In the long form pip downloads all of it into an empty environment, which takes a minute.
"""

import json
import os
import shutil
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


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    env = os.environ | environment
    env.pop("PYTHONPATH", None)  # what is installed is what is tested
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False, env=env
    )
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


def wheel_of(out: Path, **environment: str) -> Path:
    """Built from a copy: a build writes the kernel beside its source, where other tests look for it."""
    source = out / "source"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "_kernel*.so")
    shutil.copytree(ROOT / "trajstore", source / "trajstore", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, source)
    run(*build, cwd=out, **environment)
    (wheel,) = out.glob("trajstore-*.whl")
    return wheel


KERNEL = "from trajstore import layouts; print(layouts.kernel())"


@pytest.mark.slow
def test_a_wheel_is_built_without_a_compiler_and_takes_the_numpy_path(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, CC="/bin/false")
    assert wheel.name == "trajstore-0.1.0-py3-none-any.whl"
    run(sys.executable, "-m", "zipfile", "-e", wheel, tmp_path / "site", cwd=tmp_path)
    # The dependencies are those of this environment; the package is the wheel's, first on the path.
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {KERNEL}"
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == "numpy"


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path)
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
    compiler = shutil.which("cc") is not None
    assert wheel.name.endswith("none-any.whl") is not compiler
    assert run(python, "-c", KERNEL, cwd=tmp_path).strip() == ("c" if compiler else "numpy")
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
