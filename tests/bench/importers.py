"""Import rates beside a plain read of the same file: what parsing costs to a record batch, and to the disk.

    python tests/bench/importers.py [--rows 1024] [--rounds 5]

CPU time, interleaved rounds in one process, medians. "bare" is orjson.loads of every line, or torch.load
without its safety (weights_only=False, the C unpickler: the faster of the two). Ratios are bare / ours.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import torch

from trajstore.codec import encode
from trajstore.importers import ImportOptions, open_importer
from trajstore.ingest import ingest

PROMPT, RESPONSE = 256, 1024


def rollouts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of about 1,300 tokens, as slime writes them."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        prompt, response = int(rng.integers(64, 2 * PROMPT)), int(rng.integers(256, 2 * RESPONSE))
        made.append(
            {
                "group_index": index // 8,
                "index": index,
                "prompt": "why is the sky blue? " * (prompt // 8),
                "tokens": rng.integers(0, 150_000, prompt + response).tolist(),
                "response": 'because of "Rayleigh" scattering. ' * (response // 10),
                "response_length": response,
                "reward": float(rng.integers(0, 2)),
                "loss_mask": [1] * response,
                "weight_versions": ["7"],
                "rollout_log_probs": (-rng.exponential(0.5, response)).astype(np.float32).tolist(),
                "status": "completed",
                "metadata": {},
            }
        )
    return made


def write_jsonl(path: Path, samples: list[dict[str, Any]]) -> None:
    """trajstore's own lines."""
    with path.open("wb") as out:
        for s in samples:
            row = {
                "id": str(s["index"]),
                "group_id": str(s["group_index"]),
                "prompt": s["prompt"],
                "prompt_length": len(s["tokens"]) - s["response_length"],
                "response": s["response"],
                "response_length": s["response_length"],
                "tokens": s["tokens"],
                "loss_mask": s["loss_mask"],
                "behavior_log_probs": s["rollout_log_probs"],
                "reward": s["reward"],
                "version": 7,
                "status": "completed",
            }
            out.write(orjson.dumps(row) + b"\n")


class DataProto:
    """Pickles as verl's does, in its numpy encoding."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state

    def __setstate__(self, state: Any) -> None:  # what verl does: bytes back to tensors
        self.batch = {
            name: torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)
            for name, (dtype, shape, data) in state[0][2].items()
        }


def write_verl(path: Path, samples: list[dict[str, Any]]) -> None:
    """One padded batch."""
    lengths = [len(s["tokens"]) - s["response_length"] for s in samples]
    rows, left, right = len(samples), max(lengths), max(s["response_length"] for s in samples)
    columns = {name: np.zeros((rows, right), np.int64) for name in ("responses", "response_mask")}
    columns["prompts"] = np.zeros((rows, left), np.int64)
    columns["attention_mask"] = np.zeros((rows, left + right), np.int64)
    floats = {name: np.zeros((rows, right), np.float32) for name in ("rollout_log_probs", "rm_scores")}
    for i, (s, prompt) in enumerate(zip(samples, lengths, strict=True)):
        response = s["response_length"]
        columns["prompts"][i, left - prompt :] = s["tokens"][:prompt]
        columns["responses"][i, :response] = s["tokens"][prompt:]
        columns["response_mask"][i, :response] = 1
        columns["attention_mask"][i, left - prompt : left + response] = 1
        floats["rollout_log_probs"][i, :response] = s["rollout_log_probs"]
        floats["rm_scores"][i, response - 1] = s["reward"]
    columns["input_ids"] = np.concatenate([columns["prompts"], columns["responses"]], 1)
    columns["position_ids"] = np.maximum(columns["attention_mask"].cumsum(1) - 1, 0)
    encoded = {k: (str(v.dtype), v.shape, v.view(np.uint8)) for k, v in {**columns, **floats}.items()}
    uid = np.array([f"00000000-0000-4000-8000-{s['group_index']:012d}" for s in samples], object)
    path.write_bytes(pickle.dumps(DataProto((((rows,), "cpu", encoded), {"uid": uid}, {}))))


def bare_verl(path: Path) -> Any:
    """What verl's own loader does."""
    with path.open("rb") as file:
        return pickle.load(file)


def bare_torch(path: Path) -> Any:
    """The C unpickler, free to run anything."""
    return torch.load(path, weights_only=False)


def bare_lines(path: Path) -> Any:
    """Every line parsed and dropped."""
    with path.open("rb") as file:
        for line in file:
            orjson.loads(line)


def to_batch(path: Path, format: str) -> int:
    """Parsed, checked and laid out, 512 rows at a time; rows."""
    chunk, rows = [], 0
    for item in open_importer(format)(path, ImportOptions()):
        chunk.append(item.trajectory)
        if len(chunk) == 512:
            rows += encode(chunk).num_rows
            chunk = []
    return rows + (encode(chunk).num_rows if chunk else 0)


def to_store(path: Path, format: str, folder: Path) -> None:
    """Durable: files written, synced, committed."""
    store = folder / "store"
    ingest(path, store, format=format)
    shutil.rmtree(store)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call, all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    module = ModuleType("verl.protocol")
    module.DataProto = DataProto  # type: ignore[attr-defined]  # stands where verl would be
    sys.modules |= {"verl": ModuleType("verl"), "verl.protocol": module}
    DataProto.__module__ = "verl.protocol"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = rollouts(asked.rows)
        tokens = sum(len(s["tokens"]) for s in samples)
        write_jsonl(folder / "rows.jsonl", samples)
        torch.save({"rollout_id": 7, "samples": samples}, folder / "7.pt")
        write_verl(folder / "gen_batch.dp", samples)
        del samples
        cases: list[tuple[str, str, str, Callable[[Path], Any], float, float | None]] = [
            ("JSON lines with tokens", "rows.jsonl", "trajstore-jsonl", bare_lines, 0.45, 0.3),
            ("slime .pt (lists)", "7.pt", "slime", bare_torch, 0.35, None),
            ("verl gen_batch.dp (tensors)", "gen_batch.dp", "verl-dataproto", bare_verl, 0.25, None),
        ]
        print(f"{asked.rows:,} rows, {tokens:,} tokens, {asked.rounds} rounds, CPU medians")
        print(f"{'file':30}{'MB':>7}{'bare s':>9}{'batch s':>9}{'ratio':>7}{'asked':>7}"
              f"{'store s':>9}{'ratio':>7}{'asked':>7}{'tokens/s':>12}")  # fmt: skip
        for title, file, format, bare, batch_asked, store_asked in cases:
            path = folder / file
            works: list[Callable[[], object]] = [
                lambda bare=bare, path=path: bare(path),  # type: ignore[misc]  # bound now
                lambda path=path, format=format: to_batch(path, format),  # type: ignore[misc]  # bound now
                lambda path=path, format=format: to_store(path, format, folder),  # type: ignore[misc]  # bound now
            ]
            times = [[seconds(work) for work in works] for _ in range(asked.rounds)]
            base, batch, store = (statistics.median(column) for column in zip(*times, strict=True))
            durable = "-" if store_asked is None else f"{store_asked:.2f}"
            print(
                f"{title:30}{path.stat().st_size / 1e6:7.1f}{base:9.3f}{batch:9.3f}{base / batch:7.2f}"
                f"{batch_asked:7.2f}{store:9.3f}{base / store:7.2f}{durable:>7}{tokens / store:12,.0f}"
            )
        memory(folder, asked.rows)


def memory(folder: Path, rows: int) -> None:
    """Peak memory of a fresh process that imports the same lines once, 4 and 16 times over.

    It grows until a chunk of rows (4 million tokens) and a gathered part of a file (128 MiB) are full, which
    1,024 rows do not do; from there on it stays.
    """
    once = (folder / "rows.jsonl").read_bytes()
    code = (  # not ru_maxrss, in which a child begins with its parent's
        "import re, sys; from trajstore.ingest import ingest; ingest(sys.argv[1], sys.argv[2]); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    for times in (1, 4, 16):
        path = folder / f"x{times}.jsonl"
        with path.open("wb") as out:
            for _ in range(times):
                out.write(once)
        command = [sys.executable, "-c", code, str(path), str(folder / f"store{times}")]
        peak = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        path.unlink()
        print(f"{len(once) * times / 1e6:.0f} MB of lines, {rows * times:,} rows: peak {peak / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
