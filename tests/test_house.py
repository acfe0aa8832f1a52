"""The house rules that a reader relies on: the root, the size of rooms, and what each says of itself."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "trajstore").rglob("*.py"))
ENTRIES = {
    *(".ci", ".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "constraints.txt"),
    *("notebooks", "pyproject.toml", "schemas", "tests", "trajstore"),
}


def test_the_root_holds_what_was_agreed() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    assert {name.partition("/")[0] for name in done.stdout.splitlines()} <= ENTRIES


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_owns_and_stays_small(path: Path) -> None:
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    if path != ROOT / "trajstore" / "__init__.py":
        assert docstring.startswith("Owns "), "the first sentence says what the module owns"
    assert len(text.splitlines()) <= 420, "split it, or find what does not belong here"
    assert path.name not in ("utils.py", "common.py", "helpers.py", "manager.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_checker_is_told_to_ignore_has_a_reason(path: Path) -> None:
    lines = path.read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        _, told, reason = line.partition("# type: ignore" if "# type: ignore" in line else "# noqa")
        assert not told or "# " in reason or above.lstrip().startswith("# "), line


def test_schemas_are_generated_from_the_code() -> None:
    from trajstore import schema

    schemas = ROOT / "schemas"
    assert (schemas / f"trajectory.v{schema.FORMAT_VERSION}.json").read_text() == schema.to_json()
    assert schema.to_markdown() in (schemas / "README.md").read_text(), "run: make schemas"
