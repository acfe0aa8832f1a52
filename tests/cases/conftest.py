"""The inputs of the cases, by id."""

import json
from pathlib import Path
from typing import Any

import pytest

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent / "cases.jsonl").read_text().splitlines())
}


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Any:
    """The input of the case that the test is named after."""
    return CASES[request.node.name.split("_")[1]]["input"]
