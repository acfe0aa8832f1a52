"""Owns the demo's course: a store, a trainer, its worker processes, and what is left behind when it fails."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trajstore.demo import rollout, show
from trajstore.demo.offline import ilql_epoch
from trajstore.demo.policy import Policy
from trajstore.demo.train import VERSIONS, Trainer, Update, store_log_probs
from trajstore.errors import TrajstoreError
from trajstore.store import TrajectoryStore
from trajstore.trajectory import PolicyVersion

WORKERS = 2
STOP_SECONDS = 900.0  # only a worker that hangs takes so long, whatever the machine
ROWS_OF_NEWEST = 48

Report = Callable[[Update], None]


@dataclass(frozen=True)
class Run:
    """What a run leaves beside its store.

    Attributes:
        version: the newest policy version.
        policy: its weights.
        updates: what the trainer did, in order.
    """

    version: PolicyVersion
    policy: Policy
    updates: list[Update]


def run_demo(store_path: Path, *, seed: int = 0, console: Console, weights: Path | None = None) -> None:
    """Runs a small asynchronous RL training into a new store, then prints what one can ask of it.

    Args:
        store_path: where to make the store; a run that fails removes it again.
        seed: of the weights, the words and the samples. Which version a token is from is a matter of
            time, so two runs are alike and not the same.
        console: where the tables go.
        weights: an existing folder that keeps the weights of every version; None keeps none.

    Raises:
        StoreExistsError: there is something at the path.
        TrajstoreError: a worker failed, or wrote nothing for a long time.
    """
    made = not store_path.exists()
    store = TrajectoryStore.create(store_path)
    with _emptied_on_failure(store_path, made=made), _one_thread():
        console.print(
            f"A small policy learns to write words backwards: {WORKERS} processes sample from its newest "
            f"weights and append to {store_path}, one trains on what it reads from there.",
            markup=False,
            highlight=False,
        )
        with tempfile.TemporaryDirectory(prefix="trajstore-demo-") as temporary, _progress() as report:
            run = train(store, weights or Path(temporary), seed=seed, report=report)
        recomputed = store_log_probs(store, run.policy, run.version)
        epoch = ilql_epoch(store.scan("status = 'completed'"), run.policy, seed)
    show.everything(console, store, run.version.version_id, run.updates, seed, recomputed, epoch)


def train(store: TrajectoryStore, weights: Path, *, seed: int, report: Report) -> Run:
    """Trains through all versions while worker processes sample; they are gone when this returns."""
    context = multiprocessing.get_context("spawn")  # never fork: the store and torch hold threads
    stop = context.Event()
    names = [f"worker-{i}" for i in range(WORKERS)]
    workers = {
        name: context.Process(target=rollout.work, args=(name, store.path, weights, seed, stop), daemon=True)
        for name in names
    }
    trainer = Trainer(weights, seed)
    try:
        with _interrupts_ignored():
            for worker in workers.values():
                worker.start()
        trainer.warm_up()
        updates = []
        while trainer.version.version_id < VERSIONS - 1:
            updates.append(trainer.update(store, lambda: _check(workers, weights)))
            report(updates[-1])
        _see_newest(store, trainer.version, lambda: _check(workers, weights))
        stop.set()
        _join(workers, weights)
    finally:
        for worker in workers.values():
            if worker.is_alive():
                worker.kill()
                worker.join()
    return Run(trainer.version, trainer.policy, updates)


def _see_newest(store: TrajectoryStore, version: PolicyVersion, check: Callable[[], None]) -> None:
    """Lets each worker write some rows under the last version, which nothing is trained on."""
    deadline = time.monotonic() + STOP_SECONDS
    newest = f"version_id = {version.version_id} and status = 'completed'"
    while True:
        rows = Counter(store.scan(newest, columns=["writer_id"]).to_arrow()["writer_id"].to_pylist())
        if len(rows) == WORKERS and min(rows.values()) >= ROWS_OF_NEWEST // WORKERS:
            return
        check()
        if time.monotonic() > deadline:
            raise TrajstoreError("the workers did not take the newest weights")
        time.sleep(0.3)


def _check(workers: Mapping[str, BaseProcess], weights: Path) -> None:
    for name, worker in workers.items():
        if worker.exitcode is not None:
            raise _failure(name, worker, weights)


def _join(workers: Mapping[str, BaseProcess], weights: Path) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    for name, worker in workers.items():
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.exitcode != 0:
            raise _failure(name, worker, weights)


def _failure(name: str, worker: BaseProcess, weights: Path) -> TrajstoreError:
    said = rollout.failure_path(weights, name)
    trace = said.read_text() if said.exists() else ""
    how = "did not stop" if worker.exitcode is None else f"ended with exit code {worker.exitcode}"
    last = f": {trace.strip().splitlines()[-1]}" if trace else ""
    error = TrajstoreError(f"{name} {how}{last}")
    error.add_note(trace)  # for --debug
    return error


@contextmanager
def _emptied_on_failure(store_path: Path, *, made: bool) -> Iterator[None]:
    """Takes a half-written store away again, and its folder if it was not there before."""
    try:
        yield
    except BaseException:  # Ctrl-C as well
        shutil.rmtree(store_path, ignore_errors=True)
        if not made:
            store_path.mkdir()
        raise


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started in here never see Ctrl-C, not even while they import: we end them ourselves."""
    if threading.current_thread() is not threading.main_thread():  # only that one may say so
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several processes share the cores: a thread for each core in each of them only gets in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar on stderr while it trains; nothing when stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("version {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.fields[rows]:,} rows, mean reward {task.fields[reward]:.2f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=VERSIONS - 1, rows=0, reward=0.0)
        yield lambda update: bar.update(task, advance=1, rows=update.seen, reward=update.reward)
