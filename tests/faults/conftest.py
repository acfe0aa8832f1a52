"""Processes that are always reaped, and the two kinds of place a store can be at."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import s3_options  # noqa: F401
from trajstore import TrajectoryStore

ROOT = Path(__file__).resolve().parents[2]
SOAK = os.environ.get("TRAJSTORE_SOAK") == "1"
PATIENCE = 3600.0 if SOAK else 900.0
"""Seconds after which a process counts as hung; nothing else depends on time."""
S3_WHEN_LONG = pytest.mark.parametrize("where", ["disk", "s3"] if SOAK else ["disk"], indirect=True)
"""For what has little to do with the kind of place: the S3 server of the tests is slow."""


@dataclass
class Workers:
    """Starts `python -m tests.faults.workers VERB ARGUMENTS` and leaves none of them behind."""

    folder: Path
    options: Mapping[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, verb: str, **arguments: Any) -> subprocess.Popen[bytes]:
        (self.folder / "tmp").mkdir(exist_ok=True)
        call = {"options": dict(self.options), "patience": PATIENCE, **arguments}
        with (self.folder / "errors.txt").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.workers", verb, json.dumps(call, default=str)],
                cwd=ROOT,
                env=os.environ | {"TMPDIR": str(self.folder / "tmp")},
                stdout=errors,
                stderr=errors,
            )
        self.started.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL; the process must have been alive until then."""
        assert process.poll() is None, self.said()
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
        self.started.remove(process)

    def finish(self, *processes: subprocess.Popen[bytes]) -> None:
        """Waits for these, or all, and expects that each ended well."""
        for process in processes or tuple(self.started):
            assert process.wait(PATIENCE) == 0, self.said()
            self.started.remove(process)

    def said(self) -> str:
        return (self.folder / "errors.txt").read_text(errors="replace")[-4000:]

    def running(self) -> bool:
        return any(process.poll() is None for process in self.started)

    def until(self, condition: Callable[[], Any]) -> None:
        """Waits for something, but not for ever, and not for a process that ended badly."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "nothing happened"
            self.check()
            time.sleep(0.002)

    def check(self) -> None:
        """Fails when a process ended badly."""
        assert all(p.poll() in (None, 0) for p in self.started), self.said()


@dataclass
class Where:
    """A place for a store, the processes there, and how large the quick form is in it."""

    kind: str
    uri: str
    workers: Workers

    def create(self) -> TrajectoryStore:
        return TrajectoryStore.create(self.uri, storage_options=self.workers.options)

    def open(self) -> TrajectoryStore:
        return TrajectoryStore.open(self.uri, storage_options=self.workers.options)

    def count(self, *, disk: int, s3: int, soak: int) -> int:
        return soak if SOAK else disk if self.kind == "disk" else s3


@pytest.fixture(params=["disk", "s3"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Where]:
    if request.param == "disk":
        uri, options = str(tmp_path / "a store"), {}
    else:
        uri, options = f"s3://bucket/{uuid.uuid4().hex}", request.getfixturevalue("s3_options")
    yield from _where(request.param, uri, tmp_path, options)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Where]:
    yield from _where("disk", str(tmp_path / "a store"), tmp_path, {})


def _where(kind: str, uri: str, folder: Path, options: Mapping[str, str]) -> Iterator[Where]:
    workers = Workers(folder, options)
    try:
        yield Where(kind, uri, workers)
    finally:
        for process in workers.started:
            process.kill()  # also ends a stopped one
            process.wait()
