"""What the processes of these tests do, and what the rows they write must look like afterwards."""

import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from trajstore import Trajectory, TrajectoryStore, TrajstoreError
from trajstore.store import append as append_module
from trajstore.store import files
from trajstore.store.table import Table

KEPT, DOOMED = 5, 2
"""Rows of a batch that stay, and rows that maintainers delete."""


def batch(writer: str, number: int) -> list[Trajectory]:
    """Batch `number` of a writer: the ids say of which batch a row is, the tokens which row."""
    return [
        Trajectory(
            id=f"{writer}/{number}/{'keep' if j < KEPT else 'drop'}{j}",
            tokens=[number, j, 7],
            prompt_length=1,
            reward=1.0 if j < KEPT else -1.0,
        )
        for j in range(KEPT + DOOMED)
    ]


def batches_in(store: TrajectoryStore) -> dict[str, int]:
    """How many batches of each writer a store holds; every one of them whole, once, in order and unharmed."""
    rows = store.scan(columns=["id", "tokens"]).to_arrow()
    found: dict[str, dict[int, Counter[str]]] = defaultdict(dict)
    order: dict[str, list[int]] = defaultdict(list)
    for name, tokens in zip(rows["id"].to_pylist(), rows["tokens"].to_pylist(), strict=True):
        writer, number, which = name.split("/")
        assert tokens == [int(number), int(which[4:]), 7], name
        found[writer].setdefault(int(number), Counter())[which] += 1
        order[writer].append(int(number))
    keep = {f"keep{j}": 1 for j in range(KEPT)}
    drop = {f"drop{j}": 1 for j in range(KEPT, KEPT + DOOMED)}
    for writer, numbers in found.items():
        assert sorted(numbers) == list(range(len(numbers))), f"{writer} has lost a batch: {sorted(numbers)}"
        assert order[writer] == sorted(order[writer]), f"{writer} is out of order"
        for number, rows_of in numbers.items():
            assert rows_of in (keep, keep | drop), f"batch {number} of {writer}: {rows_of}"
    return {writer: len(numbers) for writer, numbers in found.items()}


def _durably(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    with aside.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    aside.replace(path)


def write(
    store: TrajectoryStore,
    *,
    writer: str,
    progress: str,
    batches: int | None = None,
    stop: str = "",
    die: str = "",
    patience: float,
) -> None:
    """Appends batches from where the progress file says, which is written after each append returned."""
    note, end = Path(progress), time.monotonic() + patience
    number = int(note.read_text()) if note.exists() else 0
    if die:
        _POINTS[die](lambda: os.kill(os.getpid(), signal.SIGKILL))
    _durably(note.with_suffix(".ready"), str(os.getpid()))
    while (number < batches) if batches is not None else not Path(stop).exists():
        assert time.monotonic() < end
        done = store.append(batch(writer, number), writer_id=writer, batch_no=number)
        if done.already_in:
            with note.with_suffix(".resent").open("a") as out:
                out.write(f"{number}\n")
        time.sleep(random.uniform(0, 0.02))  # here a kill makes a resend
        number += 1
        _durably(note, str(number))


def _while_writing(act: Callable[[], None]) -> None:
    def close(self: files.FileWriter) -> None:
        self._sink.flush()
        act()

    files.FileWriter.close = close  # type: ignore[assignment,method-assign]


def _before_commit(act: Callable[[], None]) -> None:
    commit = Table.commit

    def patched(self: Table, *args: Any, **named: Any) -> int | None:
        act()
        return commit(self, *args, **named)

    Table.commit = patched  # type: ignore[method-assign]


def _after_commit(act: Callable[[], None]) -> None:
    commit = Table.commit

    def patched(self: Table, *args: Any, **named: Any) -> int | None:
        commit(self, *args, **named)
        act()
        return None

    Table.commit = patched  # type: ignore[method-assign]


_POINTS = {"writing": _while_writing, "written": _before_commit, "committed": _after_commit}


def maintain(store: TrajectoryStore, *, stop: str, verbs: list[str], ready: str, patience: float) -> None:
    """Compacts, deletes and updates until told to stop."""
    end = time.monotonic() + patience
    _durably(Path(ready), str(os.getpid()))
    while not Path(stop).exists():
        assert time.monotonic() < end
        if "compact" in verbs:
            store.maintenance.compact()
        if "delete" in verbs:
            store.maintenance.delete("reward = -1")
        if "update" in verbs:
            ids = store.scan("reward > 0", columns=["id"]).to_arrow()["id"].to_pylist()
            some = random.sample(ids, min(3, len(ids)))
            if some:
                store.maintenance.update(some, {"advantages": [[0.5] * 3] * len(some)})
        if "vacuum" in verbs:
            assert store.maintenance.vacuum(1, force=True) == []


def stopped(store: TrajectoryStore, *, writer: str, answer: str, **_: Any) -> None:
    """Stops itself between its file and its commit; then says what came of the append, and appends again."""
    commit, seen = Table.commit, []

    def patched(self: Table, *args: Any, **named: Any) -> int | None:
        if not seen:
            seen.append(1)
            os.kill(os.getpid(), signal.SIGSTOP)
        return commit(self, *args, **named)

    Table.commit = patched  # type: ignore[method-assign]
    try:
        store.append(batch(writer, 0), writer_id=writer, batch_no=0)
        said = "committed"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    store.append(batch(writer, 0), writer_id=writer, batch_no=0)
    _durably(Path(answer), said)


def stopped_compaction(store: TrajectoryStore, *, answer: str, **_: Any) -> None:
    """Compacts, and stops itself once between the new file and the commit."""
    swap, seen = Table.swap, []

    def patched(self: Table, *args: Any, **named: Any) -> int:
        if not seen:
            seen.append(1)
            os.kill(os.getpid(), signal.SIGSTOP)
        return swap(self, *args, **named)

    Table.swap = patched  # type: ignore[method-assign]
    try:
        store.maintenance.compact()
        said = "compacted"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    _durably(Path(answer), said)


def create(
    uri: str, *, options: Mapping[str, str], rounds: int, me: int, folder: str, patience: float
) -> None:
    """Creates a store in every round, at the moment the others do."""
    end = time.monotonic() + patience
    for number in range(rounds):
        Path(folder, f"ready-{number}-{me}").touch()
        while not Path(folder, f"go-{number}").exists():
            assert time.monotonic() < end
        try:
            TrajectoryStore.create(f"{uri}-{number}", storage_options=options)
            said = "created"
        except TrajstoreError as error:
            said = type(error).__name__
        _durably(Path(folder, f"said-{number}-{me}"), said)


def small(store: TrajectoryStore, *, limit: int, answer: str, **_: Any) -> None:
    """Appends where no file may grow past a limit, then without one."""
    store.append(batch("w", 0), writer_id="w", batch_no=0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, soft[1]))
    try:
        store.append(batch("w", 1), writer_id="w", batch_no=1)
        said = "committed"
    except (TrajstoreError, OSError) as error:
        said = f"refused: {type(error).__name__}: {error}"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    left = sorted(p.name for p in store.path.glob("*.tmp"))
    count = store.count()
    store.append(batch("w", 1), writer_id="w", batch_no=1)
    _durably(Path(answer), json.dumps({"said": said, "left": left, "count": count}))


def yesterday(store: TrajectoryStore, *, writer: str, progress: str, batches: int, patience: float) -> None:
    """Writes with a clock that is a day behind."""
    real = time.time
    time.time = lambda: real() - 86400

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(days=1)

    append_module.datetime = Behind  # type: ignore[misc]
    write(store, writer=writer, progress=progress, batches=batches, patience=patience)


def fork(store: TrajectoryStore, *, answer: str, patience: float) -> None:
    """Forks with an open store; the child tries to use it, then the parent does."""
    store.append(batch("w", 0), writer_id="w", batch_no=0)
    outcome = {}
    for verb, use in {
        "count": store.count,
        "append": lambda: store.append(batch("child", 0), writer_id="child", batch_no=0),
    }.items():
        child = os.fork()
        if child == 0:
            try:
                use()
                said = "worked"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            _durably(Path(f"{answer}-{verb}"), said)
            os._exit(0)
        end = time.monotonic() + patience
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                _durably(Path(f"{answer}-{verb}"), "hung")
                break
            time.sleep(0.01)
        outcome[verb] = Path(f"{answer}-{verb}").read_text()
    store.append(batch("w", 1), writer_id="w", batch_no=1)
    _durably(Path(answer), json.dumps(outcome))


def main(verb: str, arguments: dict[str, Any]) -> None:
    if verb == "create":
        create(**arguments)
        return
    store = TrajectoryStore.open(arguments.pop("uri"), storage_options=arguments.pop("options"))
    verbs: dict[str, Callable[..., None]] = {
        "write": write,
        "maintain": maintain,
        "stopped": stopped,
        "stopped_compaction": stopped_compaction,
        "small": small,
        "yesterday": yesterday,
        "fork": fork,
    }
    verbs[verb](store, **arguments)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
