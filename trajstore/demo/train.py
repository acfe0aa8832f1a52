"""Owns the demo's trainer: reads fresh groups back from the store, updates the policy, publishes versions.

Axis letters: B rows of a batch, T tokens of the longest row.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from trajstore.demo import task
from trajstore.demo.policy import Adam, Policy, log_probs_of, pad, publish
from trajstore.demo.rollout import GROUP_SIZE
from trajstore.errors import TrajstoreError
from trajstore.loader import TrajectoryLoader
from trajstore.query import fresh
from trajstore.store import Scan, TrajectoryStore
from trajstore.trajectory import PolicyVersion

VERSIONS = 11
GROUPS_PER_UPDATE = 48
MAX_STALENESS = 3
BATCH_ROWS = 32
EPOCHS = 2
WARM_UP_STEPS = 400
WARM_UP_LOSS = 1.7
"""Nats a token, smoothed. From about here every seed earns enough to learn by reward, and has far to go."""

WARM_UP_LONGEST = 12
LARGEST_RATIO = 2.0
PUSH_AWAY = 0.2
STALL_SECONDS = 900.0  # only workers that hang write nothing for so long, whatever the machine
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Update:
    """One update of the policy, from the version of that number to the next.

    Attributes:
        version: the trainer's version before it.
        rows: trajectories it was made from.
        reward: their mean reward.
        gaps: how many of them were how many versions old.
        seen: rows in the store by then.
    """

    version: int
    rows: int
    reward: float
    gaps: Counter[int]
    seen: int


class Trainer:
    """The policy that learns, and the groups it has learnt from."""

    def __init__(self, weights: Path, seed: int) -> None:
        self.weights = weights
        self.seed = seed
        self.used: set[str] = set()
        self.steps = 0
        self.version = PolicyVersion()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = Policy()
        self.optimizer = Adam(self.policy, rate=2e-3)

    def warm_up(self) -> None:
        """A little supervised training on short words, so that something earns a reward; then version 0."""
        words = random.Random(self.seed)
        optimizer = Adam(self.policy, rate=3e-3)
        smoothed = math.log(task.VOCABULARY)
        for _ in range(WARM_UP_STEPS):
            drawn = [task.draw_word(words, WARM_UP_LONGEST) for _ in range(BATCH_ROWS)]
            prompts = [task.tokens_of(task.prompt_of(word)) for word in drawn]
            tokens = pad([p + task.answer_of(word) for p, word in zip(prompts, drawn, strict=True)])
            starts = torch.tensor([len(prompt) for prompt in prompts])
            answers = (torch.arange(tokens.shape[1]) >= starts[:, None]) & (tokens != task.PAD)
            loss = -log_probs_of(self.policy, tokens)[answers].mean()
            self._descend(optimizer, loss)
            smoothed = 0.8 * smoothed + 0.2 * loss.item()
            if smoothed < WARM_UP_LOSS:
                break
        publish(self.policy, self.weights, self._stamp(0))

    def update(self, store: TrajectoryStore, check: Callable[[], None]) -> Update:
        """Waits for enough fresh groups, trains on them, and publishes the next version.

        Args:
            store: where the workers write.
            check: called while waiting; raises when a worker has failed.

        Raises:
            TrajstoreError: no rows came for a long time.
        """
        now = self.version.version_id
        rows, scan = self._wait(store, check)
        # Group-relative advantage (GRPO), with a reward for each token: better than its group is good.
        baseline = dict(rows.select("id", pl.col("reward").mean().over("group_id")).iter_rows())
        loader = TrajectoryLoader(
            scan,
            batch_size=BATCH_ROWS,
            shuffle=True,
            seed=self.seed + now,
            bucket_window=2,
            extra=("token_rewards",),
        )
        for _ in range(EPOCHS):
            for batch in loader:
                self._descend(self.optimizer, self._loss(batch, baseline))
                self.steps += 1
        self.used.update(rows["group_id"])
        publish(self.policy, self.weights, self._stamp(now + 1))
        gaps = Counter((now - rows["oldest_version_id"]).to_list())
        reward = sum(rows["reward"]) / len(rows)
        return Update(now, len(rows), reward, gaps, store.count())

    def _wait(self, store: TrajectoryStore, check: Callable[[], None]) -> tuple[pl.DataFrame, Scan]:
        """The newest groups that are complete, fresh and not used yet, as soon as there are enough."""
        seen, since = -1, time.monotonic()
        while True:
            check()
            if store.count() > seen:
                seen, since = store.count(), time.monotonic()
                gate = fresh(at=self.version, max_staleness=MAX_STALENESS)
                finished = store.scan(where=gate).filter("status = 'completed'")
                rows = finished.columns(["id", "group_id", "reward", "oldest_version_id"]).to_polars()
                members = Counter(rows["group_id"].to_list())
                whole = [g for g in members if members[g] == GROUP_SIZE and g not in self.used]
                if len(whole) >= GROUPS_PER_UPDATE:
                    chosen = pl.col("group_id").is_in(whole[-GROUPS_PER_UPDATE:])
                    return rows.filter(chosen), finished.filter(chosen)
            if time.monotonic() - since > STALL_SECONDS:
                raise TrajstoreError(f"the workers wrote nothing for {STALL_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def _loss(self, batch: dict[str, Any], baseline: dict[str, float]) -> Tensor:
        """Policy gradient with truncated importance ratios: the rows were sampled by older policies."""
        log_probs = log_probs_of(self.policy, batch["input_ids"])
        ratio = (log_probs - batch["behavior_log_probs"]).exp().clamp(max=LARGEST_RATIO).detach()
        right = (batch["token_rewards"] > 0).float()
        advantage = right - torch.tensor([baseline[id] for id in batch["ids"]])[:, None]
        # Pushing down what was wrong says little about what is right, and a small policy forgets by it.
        advantage = torch.where(advantage < 0, PUSH_AWAY * advantage, advantage)
        mask = batch["loss_mask"] > 0
        gain: Tensor = (ratio * advantage * log_probs)[mask].mean()
        return -gain

    def _descend(self, optimizer: Adam, loss: Tensor) -> None:
        self.policy.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        optimizer.step()

    def _stamp(self, version_id: int) -> PolicyVersion:
        self.version = PolicyVersion(version_id, time.time(), self.steps)
        return self.version


def store_log_probs(store: TrajectoryStore, policy: Policy, version: PolicyVersion) -> int:
    """Recomputes log-probs of finished rows under these weights, and stores them beside the behavior ones.

    Returns:
        Number of rows.
    """
    ids: list[str] = []
    log_probs: list[list[float]] = []
    finished = store.scan("status = 'completed'")
    with torch.no_grad():
        for batch in TrajectoryLoader(finished, batch_size=2 * BATCH_ROWS, bucket_window=8):
            lengths = batch["attention_mask"].sum(1).tolist()
            rows = log_probs_of(policy, batch["input_ids"]).tolist()
            ids += batch["ids"]
            log_probs += [row[:length] for row, length in zip(rows, lengths, strict=True)]
    versions = [version.version_id] * len(ids)
    store.maintenance.update(ids, {"log_probs": log_probs, "log_probs_version": versions})
    return len(ids)
