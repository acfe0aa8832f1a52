"""A column cache of its own for every run of the tests, and for the processes they start."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def column_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("TRAJSTORE_CACHE")
    os.environ["TRAJSTORE_CACHE"] = str(tmp_path_factory.mktemp("column-cache"))
    yield
    if before is None:
        del os.environ["TRAJSTORE_CACHE"]
    else:
        os.environ["TRAJSTORE_CACHE"] = before
