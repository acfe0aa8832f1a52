"""Theme: other people's files (cases A07, A09, A10, X01, and the files in cases/files)."""

import base64
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore import ImportFormatError, Trajectory, TrajectoryBatch, TrajectoryStore, ValidationError
from trajstore.importers import ImportOptions, detect, open_importer
from trajstore.importers.turns import Call, merge
from trajstore.ingest import ingest

FILES = Path(__file__).parent / "files"


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def imported(path: Path) -> list[Trajectory]:
    items = open_importer("auto")(path, ImportOptions())
    return list(TrajectoryBatch([item.trajectory for item in items]))


def test_A07_ids_are_the_truth_and_text_never_overwrites_them(case: Any, tmp_path: Path) -> None:
    row = {
        "traj_id": "t",
        "step": 0,
        "prompt_ids": [],
        "completion_ids": case["response_ids"],
        "completion_logprobs": case["logprobs"],
        "text": case["text"],
    }
    again = row | {"step": 1, "prompt_ids": case["reencode_of_text"], "completion_ids": [7]}
    again["completion_logprobs"] = [-0.5]
    path = lines(tmp_path / "steps.jsonl", row, again)
    words = tmp_path / "bytes.tiktoken"
    words.write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    ingest(path, tmp_path / "s", tokenizer=words)  # a tokenizer is for rows without ids
    first, second = TrajectoryStore.open(tmp_path / "s").scan().to_trajectories()
    assert list(first.tokens) == case["response_ids"]
    np.testing.assert_allclose(first.behavior_log_probs, case["logprobs"], rtol=1e-6)
    assert not first.tokens_retokenized
    assert list(second.tokens) == [*case["reencode_of_text"], 7]  # equal text, other ids: another sequence


def test_A09_a_turn_joins_the_longest_sequence_that_its_prompt_begins_with(case: Any) -> None:
    first, second = merge(Call(step["prompt"], step["completion"]) for step in case["steps"])
    assert (first.tokens, first.action_mask) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
    assert (second.tokens, second.action_mask) == ([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 1, 1, 1, 1, 1, 0, 1])


def test_A10_a_token_that_was_not_sampled_gets_no_log_prob(case: Any, tmp_path: Path) -> None:
    sample = {
        "index": 0,
        "tokens": [1, *case["response_ids"]],
        "response_length": 3,
        "reward": 1.0,
        "loss_mask": case["loss_mask"],
        "rollout_log_probs": case["logprobs"],
    }
    path = tmp_path / "7.json"
    path.write_text(json.dumps({"rollout_id": 7, "samples": [sample]}))
    with pytest.raises(
        ImportFormatError, match=r"samples\[0\]: column 'behavior_log_probs': .*None at index 2"
    ):
        ingest(path, tmp_path / "s")
    report = ingest(path, tmp_path / "s", nulls=True)  # on request NaN, never 0.0
    assert report.commit.not_finite == {"behavior_log_probs": 1}
    (row,) = TrajectoryStore.open(tmp_path / "s").scan().to_trajectories()
    assert math.isnan(row.behavior_log_probs[-1])
    sample["rollout_log_probs"] = [-0.1, -0.2, 0.0]
    path.write_text(json.dumps({"rollout_id": 7, "samples": [sample]}))
    assert ingest(path, tmp_path / "t").commit.rows == 1


def test_X01_a_dump_cannot_run_code(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Touches:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'marker'}",)

    sample = {"index": 0, "tokens": [1, 2], "response_length": 1, "response": "x", "reward": 1.0}
    numpy = sample | {"tokens": np.array([1, 2]), "reward": np.float32(1.0)}
    for name, kind in (("plain", sample), ("numpy", numpy)):
        torch.save({"rollout_id": 1, "samples": [kind]}, tmp_path / f"{name}.pt")
        (row,) = imported(tmp_path / f"{name}.pt")
        assert (list(row.tokens), row.reward) == ([1, 2], 1.0)
    torch.save({"rollout_id": 1, "samples": [sample | {"extra": Touches()}]}, tmp_path / "hostile.pt")
    with pytest.raises(ImportFormatError, match=r"hostile\.pt: refused: it names posix\.system"):
        ingest(tmp_path / "hostile.pt", tmp_path / "s")
    np.save(tmp_path / "objects.npy", np.array([Touches()], object), allow_pickle=True)
    with pytest.raises(ImportFormatError):
        ingest(tmp_path / "objects.npy", tmp_path / "s")
    assert not (tmp_path / "marker").exists()
    torch.load(tmp_path / "hostile.pt", weights_only=False)
    assert (tmp_path / "marker").exists(), "else the file above shows nothing"


@pytest.mark.parametrize(
    ("name", "format", "rows"),
    [
        ("verl_40.jsonl", "verl-jsonl", 12),
        ("slime_rollout_7.json", "slime", None),
        ("trl_completions/completions_00012.parquet", "trl", None),
        ("trl_completions/completions_00013.parquet", "trl", None),
        ("openrlhf/out.jsonl0", "openrlhf", 5),
        ("openrlhf/out.jsonl1", "openrlhf", None),
        ("chat_tools.jsonl", "messages", None),
        ("preference_pairs.jsonl", "preference", 14),
        ("agent_steps.jsonl", "agent-steps", 4),
        ("areal_batch.json", "areal-batch", 3),
    ],
)
def test_files_import(name: str, format: str, rows: int | None) -> None:
    assert detect(FILES / name).format == format
    found = imported(FILES / name)
    assert len(found) == rows if rows is not None else found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("partial_events.jsonl", "format not recognised: found keys 'traj_id', 'seq'"),
        ("bom_crlf.jsonl", "format not recognised: found keys 'traj_id', 'response_ids'"),
        ("shards_drift/000.parquet", "format not recognised: found keys"),
        ("lists_edge.arrow", "a file of kind arrow"),
    ],
)
def test_files_that_are_no_dump_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ImportFormatError, match=reason):
        detect(FILES / name)


def test_a_padded_batch_has_exact_versions() -> None:
    first, second, third = imported(FILES / "areal_batch.json")
    assert [(s.start, s.end, s.version.version_id) for s in first.version_segments] == [(3, 5, 3), (5, 6, 4)]
    assert first.version_known == "exact"
    assert list(first.tokens) == [2, 8, 9, 5, 6, 2]  # the pad id inside stays
    assert (second.prompt_length, second.response_length) == (2, 7)
    assert list(third.loss_mask) == [0, 1]


def test_slime_as_json_keeps_lists_of_versions_apart() -> None:
    first, second = imported(FILES / "slime_rollout_7.json")[:2]
    assert (first.version_known, second.version_known) == ("exact", "list")
    assert second.version_span == (2, 6)
    assert (second.finish_reason, second.terminated) == ("length", False)
    with pytest.raises(ValidationError):
        second.get_version_gap(7)
