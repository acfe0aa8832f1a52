"""The command line, called in this process as the script calls it."""

import sys
from collections.abc import Callable

import pytest

from trajstore.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trajstore(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Takes words, gives the exit code, what was printed, and what was said on stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trajstore", *words])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call
