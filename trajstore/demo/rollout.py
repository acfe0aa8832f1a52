"""Owns a rollout worker: a process that samples from the newest weights and appends; must not train.

Rows of a batch are at different places of their generation. New weights arrive between two decoding
steps: most generations go on under them, some are aborted and continued later.
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from trajstore.demo import task
from trajstore.demo.policy import Policy, load, newest, pad
from trajstore.store import TrajectoryStore
from trajstore.trajectory import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryStatus,
    VersionSegment,
)

GROUP_SIZE = 4
SLOTS = 36
COMMIT_ROWS = 48
DECODE_SECONDS = 0.04
"""A step takes at least this long: real models decode slowly, and new weights must arrive in mid-sentence."""

STEPS_BETWEEN_LOOKS = 3
ABORT_AFTER = 8
ABORT_CHANCE = 0.5
MAX_CONTINUATIONS = 3


@dataclass
class Generation:
    """A response that is being written; index i of the lists belongs to its i-th token."""

    id: str
    group_id: str
    word: str
    prompt: list[int]
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    segments: list[VersionSegment] = field(default_factory=list)
    milliseconds: float = 0.0
    parent: PartialTrajectory | None = None

    @property
    def attempt(self) -> int:
        """How often it has been continued."""
        return 0 if self.parent is None else self.parent.continuation_count + 1

    def add(self, token: int, log_prob: float, version: PolicyVersion, milliseconds: float) -> None:
        """Takes one sampled token and remembers which version it is from."""
        at = len(self.prompt) + len(self.response)
        if self.segments and self.segments[-1].version.version_id == version.version_id:
            self.segments[-1].end = at + 1
        else:
            self.segments.append(VersionSegment(at, at + 1, version))
        self.response.append(token)
        self.log_probs.append(log_prob)
        self.milliseconds += milliseconds

    @property
    def finish_reason(self) -> str | None:
        """Why it is over, None while it is not."""
        if self.response and self.response[-1] == task.EOS:
            return "stop"
        return "length" if len(self.response) >= task.LONGEST_RESPONSE else None

    def row(self) -> Trajectory:
        """What is stored: the finished trajectory, or what there is of an aborted one."""
        finished = self.finish_reason is not None
        rewards = task.token_rewards_of(self.word, self.response)
        fields: dict[str, Any] = {
            "id": self.id,
            "group_id": self.group_id,
            "group_size": GROUP_SIZE,
            "prompt": task.prompt_of(self.word),
            "prompt_tokens": self.prompt,
            "response": task.text_of(self.response),
            "response_tokens": list(self.response),
            "behavior_log_probs": list(self.log_probs),
            "token_rewards": rewards,
            "reward": sum(rewards),
            "version": self.segments[0].version,
            "version_segments": [VersionSegment(s.start, s.end, s.version) for s in self.segments],
            "status": TrajectoryStatus.COMPLETED if finished else TrajectoryStatus.ABORTED,
            "finish_reason": self.finish_reason or "abort",
            "terminated": self.finish_reason == "stop",
            "generation_time_ms": self.milliseconds,
            "metadata": {"task": task.size_of(self.word)},
            "source": "trajstore demo",
        }
        if finished and self.parent is None:
            return Trajectory(**fields)
        partial = PartialTrajectory(**fields, continuation_count=self.attempt)
        partial.start_rollout_id = self.id if self.parent is None else self.parent.start_rollout_id
        partial.parent_id = None if self.parent is None else self.parent.id
        if not finished:
            partial.prepare_continuation()
        return partial


class Rollouts:
    """Generations in flight in the slots of one worker, and those that wait for a slot."""

    def __init__(self, name: str, store: TrajectoryStore, weights: Path, seed: int) -> None:
        self.name = name
        self.store = store
        self.weights = weights
        self.random = random.Random(f"{seed} {name}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(32))
        self.policy = Policy()
        self.version: PolicyVersion | None = None
        self.active: list[Generation] = []
        self.waiting: deque[Generation] = deque()
        self.rows: list[Trajectory] = []
        self.batch_no = 0
        self.made = 0

    def look(self) -> None:
        """Takes newer weights when there are any, and aborts some of the longer generations."""
        found = newest(self.weights)
        if found is None or (self.version is not None and found <= self.version.version_id):
            return
        self.version = load(self.policy, self.weights, found)
        for generation in list(self.active):
            if len(generation.response) >= ABORT_AFTER and self.random.random() < ABORT_CHANCE:
                self._abort(generation)

    def _abort(self, generation: Generation) -> None:
        """Stores what there is, and queues the rest as a new row that goes on from it."""
        if generation.attempt >= MAX_CONTINUATIONS:
            return
        partial = generation.row()
        assert isinstance(partial, PartialTrajectory)
        self.rows.append(partial)
        self.active.remove(generation)
        generation.id, generation.parent = self._id(), partial
        self.waiting.append(generation)

    @torch.no_grad()
    def step(self) -> None:
        """Samples one token for every slot under the weights at hand."""
        assert self.version is not None
        started = time.monotonic()
        self._fill()
        rows = [[*generation.prompt, *generation.response] for generation in self.active]
        last = torch.tensor([len(row) - 1 for row in rows])
        log_probs = self.policy(pad(rows))[torch.arange(len(rows)), last]
        tokens = torch.multinomial(log_probs.exp(), 1, generator=self.generator)
        chosen = log_probs.gather(1, tokens)
        time.sleep(max(0.0, started + DECODE_SECONDS - time.monotonic()))
        milliseconds = 1000 * (time.monotonic() - started)
        for i, generation in enumerate(self.active):
            generation.add(int(tokens[i]), float(chosen[i]), self.version, milliseconds)
        self.rows += [g.row() for g in self.active if g.finish_reason]
        self.active = [g for g in self.active if not g.finish_reason]

    def _fill(self) -> None:
        while len(self.active) < SLOTS:
            if not self.waiting:
                word = task.draw_word(self.random)
                prompt = task.tokens_of(task.prompt_of(word))
                group = f"{self.name}-group-{self.made // GROUP_SIZE:04d}"
                self.waiting += [Generation(self._id(), group, word, prompt) for _ in range(GROUP_SIZE)]
            self.active.append(self.waiting.popleft())

    def _id(self) -> str:
        self.made += 1
        return f"{self.name}-{self.made:05d}"

    def commit(self) -> None:
        """Appends the rows at hand as this writer's next batch."""
        if self.rows:
            self.store.append(self.rows, writer_id=self.name, batch_no=self.batch_no)
            self.batch_no += 1
            self.rows = []

    def stop(self) -> None:
        """Stores what was in flight as aborted, as an engine that is shut down does."""
        self.rows += [generation.row() for generation in self.active]
        self.commit()


def work(name: str, store: Path, weights: Path, seed: int, stop: Event) -> None:
    """What a worker process runs, until it is told to stop or its parent is gone."""
    torch.set_num_threads(1)
    try:
        rollouts = Rollouts(name, TrajectoryStore.open(store), weights, seed)
        while not stop.is_set() and _has_parent():
            rollouts.look()
            for _ in range(STEPS_BETWEEN_LOOKS if rollouts.version else 0):
                rollouts.step()
            if rollouts.version is None:
                time.sleep(0.02)
            if len(rollouts.rows) >= COMMIT_ROWS:
                rollouts.commit()
        if rollouts.version is not None:
            rollouts.stop()
    except Exception:
        failure_path(weights, name).write_text(traceback.format_exc())
        sys.exit(1)


def failure_path(weights: Path, name: str) -> Path:
    """Where a worker that fails leaves its traceback."""
    return weights / f"{name}.failure"


def _has_parent() -> bool:
    parent = parent_process()
    return parent is None or parent.is_alive()
