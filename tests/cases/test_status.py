"""STATUS.md is what the tests say, and no test names a case that is not there."""

import json
import re

from tests.cases.status import FOLDER, status


def test_status_is_current() -> None:
    assert (FOLDER / "STATUS.md").read_text() == status(), "run: python tests/cases/status.py"


def test_every_named_case_exists() -> None:
    cases = {json.loads(line)["id"] for line in (FOLDER / "cases.jsonl").read_text().splitlines()}
    for path in FOLDER.glob("test_*.py"):
        assert set(re.findall(r"^def test_([A-Z]\d\d)_", path.read_text(), re.MULTILINE)) <= cases
