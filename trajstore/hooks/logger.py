"""Owns TrajectoryLogger, which any training loop calls with its own arrays; must not know any framework.

Axis letters: B rows of a batch, P and R the padded widths of prompts and responses.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trajstore.buffer import TrajectoryBuffer
from trajstore.codec import encode
from trajstore.errors import InputError, LengthMismatchError, StoreExistsError, StoreNotFoundError
from trajstore.importers.rows import segments
from trajstore.schema import TOKEN_FLOATS, TOKEN_MASKS
from trajstore.store import TrajectoryStore
from trajstore.trajectory import PolicyVersion, Trajectory, TrajectoryStatus

Array = NDArray[Any]
Arrays = Any
"""[B, W] of a numpy array or torch tensor (any device, bf16 too), or B sequences of their own lengths."""

PER_TOKEN = (*(name for name in TOKEN_MASKS if name != "attention_mask"), *TOKEN_FLOATS)
"""Fields that have a value for each response token."""

_OWN = ("id", "tokens", "prompt_tokens", "response_tokens", "prompt_length", "response_length", "version")
_ONE_EACH = frozenset(f.name for f in fields(Trajectory)) - {
    *PER_TOKEN, *_OWN, "attention_mask", "version_segments", "version_span", "version_known",
}  # fmt: skip


class TrajectoryLogger:
    """Writes what a loop rolled out, and notes what it trained on.

    Rows are checked at once, so a bad one is an error where it was made; they are committed in the background
    and are durable after `flush`, `trained` or `close`, and at the interpreter's exit. A killed process loses
    only what was not flushed. An error of a commit surfaces at the next call. Each process of a distributed
    run has a logger of its own; they write to one store.

    Args:
        to: a store, or the path of one, which is made when there is none; or a TrajectoryBuffer.
        source: name of the run, for the column `source`.
        max_rows, max_age: commit when so many rows have come, or the oldest has waited so many seconds.
    """

    def __init__(
        self,
        to: TrajectoryStore | TrajectoryBuffer | str | Path,
        *,
        source: str | None = None,
        max_rows: int = 1024,
        max_age: float = 1.0,
    ) -> None:
        self._source = source
        self._buffer = to if isinstance(to, TrajectoryBuffer) else None
        self._store: TrajectoryStore | None = None
        if not isinstance(to, TrajectoryBuffer):
            self._store = to if isinstance(to, TrajectoryStore) else opened(to)
            self._writer = self._store.writer(max_rows=max_rows, max_age=max_age)

    def log(
        self,
        responses: Arrays,
        *,
        prompts: Arrays = None,
        response_mask: Arrays = None,
        prompt_mask: Arrays = None,
        version: Any = None,
        ids: Sequence[str] | None = None,
        **columns: Any,
    ) -> list[str]:
        """Logs B rows and returns their ids.

        Args:
            responses: [B, R] token ids, or B sequences.
            prompts: [B, P] token ids, or B sequences; none = the rows have no prompt.
            response_mask, prompt_mask: [B, R] and [B, P], 1 = a token, 0 = padding, on whichever side. Padded
                arrays need them; nothing is guessed from a pad id.
            version: the policy version that sampled the rows: an int or a PolicyVersion for all, [B] for
                each, or [B, R] for each token, -1 where none did: that is their action_mask unless given.
            ids: names of the rows; fresh ones unless given.
            columns: other fields of Trajectory. Per-token ones (`loss_mask`, `behavior_log_probs`, ...) are
                [B, R] as the responses are, or [B]: one value for all tokens of a row. The others
                (`reward`, `group_id`, `prompt` and `response` for texts, `terminated`, `metadata`, ...) are
                B values, or one for all. `status` is COMPLETED unless given.

        Raises:
            InputError: there is no such field; a mask is missing.
            LengthMismatchError: an array has not as many rows, or not as many values a row.
            ValidationError: a row breaks the contract of the row.
        """
        answered = _Cut("responses", responses, response_mask)
        count = len(answered)
        asked = None if prompts is None else _Cut("prompts", prompts, prompt_mask, count)
        unknown = sorted(columns.keys() - _ONE_EACH - set(PER_TOKEN))
        if unknown:
            raise InputError(
                f"there is no field {unknown[0]!r} to log", hint=f"fields: {', '.join(sorted(_ONE_EACH))}"
            )
        each = {name: _each(name, value, count) for name, value in columns.items() if name in _ONE_EACH}
        tokens = {
            name: answered.like(name, columns[name]) for name in PER_TOKEN if columns.get(name) is not None
        }
        versions = _versions(version, answered, asked)
        names = [str(uuid.uuid4()) for _ in range(count)] if ids is None else list(ids)
        if len(names) != count:
            raise LengthMismatchError(f"there are {len(names)} ids for {count} rows")
        rows = []
        for i in range(count):
            row: dict[str, Any] = {"status": TrajectoryStatus.COMPLETED, "source": self._source}
            row |= {name: values[i] for name, values in each.items()}
            row |= {name: values[i] for name, values in tokens.items()}
            prompt = np.zeros(0, np.int64) if asked is None else asked.rows[i]
            response = answered.rows[i]
            rows.append(
                Trajectory(
                    id=names[i],
                    tokens=np.concatenate([prompt, response]),
                    prompt_length=len(prompt),
                    response_length=len(response),
                    **(versions[i] | row),
                )
            )
        if self._buffer is not None:
            self._buffer.add_batch(rows)
        else:
            self._writer.put(encode(rows))
        return names

    def trained(self, step: int, ids: Sequence[str], *, rank: int = 0, micro_batch: int = 0) -> None:
        """Notes in the training ledger which rows a step trained on; what was logged is durable then.

        `trajstore.replay.replay(store, step=...)` gives these rows again.

        Raises:
            InputError: the logger writes to a buffer.
        """
        if self._store is None:
            raise InputError("a buffer has no training ledger", hint="log to its store, and record there")
        self.flush()
        self._store.record_training_step(step, ids, rank=rank, micro_batch=micro_batch)

    def flush(self) -> None:
        """Returns when what was logged is durable; a buffer without a store has nothing to wait for.

        Raises:
            TrajstoreError: what a commit failed with.
        """
        if self._buffer is None:
            self._writer.flush()
        elif self._buffer.has_store:
            self._buffer.flush()

    def close(self) -> None:
        """Flushes and ends the writing; a buffer stays open, as it was made by others."""
        if self._buffer is None:
            self._writer.close()
        else:
            self.flush()

    def __enter__(self) -> TrajectoryLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def opened(path: str | Path) -> TrajectoryStore:
    """The store at a path, made when there is none; several processes may ask at once."""
    try:
        return TrajectoryStore.open(path)
    except StoreNotFoundError:
        with suppress(StoreExistsError):  # another process was first
            return TrajectoryStore.create(path)
        return TrajectoryStore.open(path)


class _Cut:
    """Rows of a padded array without their padding.

    Attributes:
        rows: B arrays of token ids.
    """

    def __init__(self, name: str, given: Arrays, mask: Arrays, count: int | None = None) -> None:
        self.mask: Array | None = None
        if mask is not None:
            array, self.mask = _rectangle(name, given), _rectangle(f"{name} mask", mask).astype(np.bool_)
            if array.shape != self.mask.shape:
                raise LengthMismatchError(f"{name} are {array.shape}, and their mask is {self.mask.shape}")
            self.rows = [row[keep] for row, keep in zip(array, self.mask, strict=True)]
        elif not isinstance(given, list | tuple):
            raise InputError(
                f"{name} are a padded array of shape {tuple(given.shape)} without a mask",
                hint=f"give {name[:-1]}_mask (all ones when there is no padding), or a list of rows",
            )
        else:
            self.rows = [_array(row) for row in given]
        if count is not None and len(self.rows) != count:
            raise LengthMismatchError(f"there are {len(self.rows)} {name} for {count} rows")

    def __len__(self) -> int:
        return len(self.rows)

    def like(self, name: str, given: Arrays) -> list[Array]:
        """Values that lie as these rows do, or one for all tokens of a row."""
        values: Any = given if isinstance(given, list | tuple) else _array(given)
        if len(values) != len(self):
            raise LengthMismatchError(f"there are {len(values)} rows of it for {len(self)}", column=name)
        made = []
        for i, (value, row) in enumerate(zip(values, self.rows, strict=True)):
            one = _array(value)
            if one.ndim and self.mask is not None and len(one) == self.mask.shape[1]:
                one = one[self.mask[i]]
            if one.ndim and len(one) != len(row):
                raise LengthMismatchError(
                    f"it has {len(one)} values for {len(row)} tokens", row=i, column=name
                )
            made.append(one if one.ndim else np.full(len(row), one))
        return made


def _array(value: Any) -> Array:
    if hasattr(value, "detach"):  # torch, which need not be here
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        return value.numpy()  # type: ignore[no-any-return]  # torch is untyped here
    return np.asarray(value)


def _rectangle(name: str, value: Any) -> Array:
    if not isinstance(value, list | tuple):
        return _array(value)
    rows = [_array(row) for row in value]
    if len({len(row) for row in rows}) > 1:
        raise LengthMismatchError(f"{name}: rows of a padded array are of one length")
    return np.stack(rows) if rows else np.zeros((0, 0), np.int64)


def _each(name: str, value: Any, count: int) -> Sequence[Any]:
    """One value a row."""
    if hasattr(value, "detach") or isinstance(value, np.ndarray):
        array = _array(value)
        value = list(array.tolist()) if array.ndim else [array.item()] * count
    if name == "messages" and isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = [value] * count
    if not isinstance(value, list | tuple):
        value = [value] * count
    if len(value) != count:
        raise LengthMismatchError(f"there are {len(value)} values for {count} rows", column=name)
    return tuple(value)


def _versions(version: Any, answered: _Cut, asked: _Cut | None) -> list[dict[str, Any]]:
    """Version fields of each row."""
    count = len(answered)
    if version is None:
        return [{}] * count
    if isinstance(version, int | np.integer):
        version = PolicyVersion(int(version))
    if isinstance(version, PolicyVersion):
        return [{"version": version}] * count
    if not isinstance(version, list | tuple):
        version = list(_array(version))
    if all(np.ndim(v) == 0 for v in version):
        return [{"version": PolicyVersion(int(v))} for v in _each("version", version, count)]
    made = []
    for i, values in enumerate(answered.like("version", version)):
        runs = segments(values, 0 if asked is None else len(asked.rows[i]))
        said: dict[str, Any] = {"version_segments": runs, "version": runs[0].version} if runs else {}
        made.append(said | {"action_mask": (np.asarray(values) >= 0).astype(np.int8)})
    return made
