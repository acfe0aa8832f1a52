"""Owns the tests of the table of formats and of telling one from another."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trajstore.errors import ImportFormatError
from trajstore.importers import FORMATS, ImportOptions, detect, messages, open_importer, trajstore_jsonl
from trajstore.importers.trajstore_jsonl import write_line
from trajstore.trajectory import PartialTrajectory, Trajectory

Lines = Callable[..., Path]
TALK = [{"role": "user", "content": "hi"}]


def test_names() -> None:
    assert {"messages", "trajstore-jsonl", "verl-dataproto", "slime", "atif"} <= set(FORMATS)
    assert open_importer("messages") is messages.read
    assert open_importer("trajstore-jsonl") is trajstore_jsonl.read


def test_unknown_format() -> None:
    with pytest.raises(ImportFormatError) as caught:
        open_importer("x")
    assert caught.value.message.startswith("unknown format 'x'; known: auto, agent-steps, areal")


@pytest.mark.parametrize(
    ("record", "name", "reason"),
    [
        ({"messages": TALK, "reward": 1}, "messages", "messages under 'messages'"),
        ({"traj": [], "task_id": 0}, "messages", "messages under 'traj'"),
        ({"conversation": TALK}, "messages", "messages under 'conversation'"),
        ({"messages": TALK, "tokens": 532, "model": "m"}, "messages", "messages under 'messages'"),
        ({"messages": TALK, "tokens": []}, "trajstore-jsonl", "only fields of Trajectory"),
        ({"messages": TALK, "version_segments": []}, "trajstore-jsonl", "only fields of Trajectory"),
        ({"prompt": "a", "response": "b", "reward": 1}, "trajstore-jsonl", "only fields of Trajectory"),
        ({"messages": None, "id": "x"}, "trajstore-jsonl", "only fields of Trajectory"),
        ({"continuation_count": 1}, "trajstore-jsonl", "only fields of Trajectory"),
    ],
)
def test_detect(lines: Lines, record: dict[str, Any], name: str, reason: str) -> None:
    path = lines(record, "never looked at")
    assert detect(path)[0] == name
    assert detect(path)[1].startswith(f"{path}:1 has ")
    assert reason in detect(path)[1]


@pytest.mark.parametrize("row", [Trajectory(messages=TALK), PartialTrajectory(messages=TALK), Trajectory()])
def test_our_own_lines_are_ours(tmp_path: Path, row: Trajectory) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(write_line(row))
    assert detect(path)[0] == "trajstore-jsonl"
    assert [i.trajectory for i in open_importer("auto")(path, ImportOptions())] == [row]


def test_auto_reads_each_file_by_its_own_first_record(lines: Lines) -> None:
    read = open_importer("auto")
    (chat,) = read(lines({"messages": TALK, "reward": 1}, name="a.jsonl"), ImportOptions())
    (own,) = read(lines({"id": "x"}, name="b.jsonl"), ImportOptions())
    assert chat.trajectory.source == "messages:a.jsonl"
    assert own.trajectory == Trajectory(id="x")


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"inputs": "a", "outputs": "b"}, "found keys 'inputs', 'outputs'"),
        ({"id": "a", "scor": 1}, "found keys 'id', 'scor' (of which 'scor' is no field of Trajectory)"),
        ({"messages": TALK, "tokens": [1], "x": 1}, "(of which 'x' is no field of Trajectory)"),
        ({f"k{i}": i for i in range(10)}, "'k7' and 2 more"),
        ({}, "found an object without keys"),
        ("text", "found text 'text'"),
    ],
)
def test_what_is_not_recognised_is_told(lines: Lines, record: Any, found: str) -> None:
    path = lines(record)
    with pytest.raises(ImportFormatError) as caught:
        detect(path)
    assert caught.value.message.startswith(f"{path}:1: format not recognised: ")
    assert found in caught.value.message
    assert "trajstore formats" in str(caught.value.hint)


def test_detect_passes_on_faults_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ImportFormatError, match="no such file"):
        detect(tmp_path / "gone.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ImportFormatError, match="no records in it"):
        detect(tmp_path / "empty.jsonl")


def test_importers_load_no_arrow_and_no_tokenizer_library() -> None:
    code = (
        "import sys, trajstore.errors, trajstore.trajectory\n"
        "before = set(sys.modules)\n"
        "import trajstore.importers\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new & {'pyarrow', 'torch', 'tokenizers', 'tiktoken', 'deltalake', 'msgspec'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
