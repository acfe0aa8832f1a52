"""Owns the logger of TRL's GRPO trainer: completions as they are scored, and which of them each step took.

TRL hands neither to its callbacks, so two of the trainer's own methods are wrapped, on this trainer only.
Needs `trl`; nothing of it is changed or copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from trajstore.errors import InputError
from trajstore.hooks.logger import TrajectoryLogger, opened
from trajstore.store import TrajectoryStore
from trajstore.trajectory import PolicyVersion

_ROW = "trajstore_row"
_GENERATE, _PREPARE = "_generate_and_score_completions", "_prepare_inputs"


class GRPOLogger(TrainerCallback):
    """A callback that writes a GRPO run into a store.

        callback = GRPOLogger("run.store")
        trainer = GRPOTrainer(..., callbacks=[callback])
        callback.watch(trainer)
        trainer.train()

    A row is a completion of the training set: its ids, texts, group (the completions of one prompt), reward
    (with the trainer's weights; each function's own in the metadata), advantage, loss mask (tool output left
    out) and policy version, which is the optimizer step that generated it. `behavior_log_probs` are the
    engine's, where it gave any (vLLM); `log_probs` those that the trainer computed before its first step on
    the rows, where it did. What TRL does not compute stays null. The training ledger says which rows each
    step took, so `trajstore.replay.replay(store, step=...)` gives them again.

    Args:
        to: a store, or the path of one, which is made when there is none.
        source: name of the run, for the column `source`.
    """

    def __init__(self, to: TrajectoryStore | str | Path, *, source: str = "trl-grpo") -> None:
        self._store = to if isinstance(to, TrajectoryStore) else opened(to)
        self._logger = TrajectoryLogger(self._store, source=source)
        self._trainer: Any = None
        self._run = ""
        self._generated = 0
        self._ids: list[str] = []
        self._taken: list[list[str]] = []

    def watch(self, trainer: Any) -> None:
        """Begins to log what a trainer generates.

        Raises:
            InputError: it has no such methods: it is no GRPOTrainer, or of another version of TRL.
        """
        for name in (_GENERATE, _PREPARE, "_logs"):
            if not hasattr(trainer, name):
                raise InputError(
                    f"a {type(trainer).__name__} has no {name}", hint="this hook is written for trl 1.x"
                )
        self._trainer = trainer
        generate, prepare = getattr(trainer, _GENERATE), getattr(trainer, _PREPARE)
        # One name on all ranks, so that a group that is spread over them is one group.
        (self._run,) = broadcast_object_list([f"{np.random.SeedSequence().entropy:032x}"[:12]])

        def generating(inputs: Any) -> Any:
            made = generate(inputs)
            if trainer.model.training:
                self._log(inputs, made)
            return made

        def preparing(batch: Any) -> Any:
            inputs = prepare(batch)
            if trainer.model.training:
                self._taken.append([self._ids[i] for i in inputs[_ROW].tolist()])
            return inputs

        setattr(trainer, _GENERATE, generating)
        setattr(trainer, _PREPARE, preparing)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes which rows the step took, a micro-batch after the other."""
        rank = self._trainer.accelerator.process_index if self._trainer else 0
        for number, ids in enumerate(self._taken):
            self._logger.trained(state.global_step, ids, rank=rank, micro_batch=number)
        self._taken.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes durable what was logged; training may go on later."""
        self._logger.flush()

    def close(self) -> None:
        """Ends the writing; the interpreter's exit does so, too."""
        self._logger.close()

    def _log(self, inputs: Any, made: dict[str, Any]) -> None:
        trainer = self._trainer
        count, rank = len(inputs), trainer.accelerator.process_index
        first = rank * count  # of this process in what is gathered
        step, size = trainer.state.global_step, trainer.num_generations
        rewards = _rewards(trainer, first, count)
        weights = trainer.reward_weights.cpu().numpy().astype(np.float64)
        scored = ~np.isnan(rewards).all(1)
        total = np.where(scored, np.nansum(rewards * weights, axis=1), np.nan)
        mask, ended = _sampled(trainer, made)
        loss = made["completion_mask"] * made.get("tool_mask", 1)
        prompts = [row["prompt"] for row in inputs]
        text = trainer.processing_class.batch_decode
        log_probs = made.get("old_per_token_logps")
        answers = [ids[keep] for ids, keep in zip(made["completion_ids"], mask, strict=True)]
        names = [f"{self._run}/{self._generated}/{first + i}" for i in range(count)]
        self._ids = self._logger.log(
            made["completion_ids"],
            response_mask=mask,
            prompts=made["prompt_ids"],
            prompt_mask=made["prompt_mask"],
            ids=names,
            group_id=[f"{self._run}/{self._generated}/{(first + i) // size}" for i in range(count)],
            group_size=size,
            prompt=[p if isinstance(p, str) else "" for p in prompts],
            response=text(answers, skip_special_tokens=True),
            messages=[p if isinstance(p, list) else None for p in prompts],
            reward=total,
            advantages=made["advantages"],
            loss_mask=loss,
            log_probs=log_probs,
            log_probs_version=None if log_probs is None else step,
            behavior_log_probs=made.get("sampling_per_token_logps"),
            version=PolicyVersion(step, step=step),
            terminated=ended,
            finish_reason=["stop" if end else "length" for end in ended],
            metadata=[
                {"step": step, "rewards": dict(zip(trainer.reward_func_names, row, strict=True))}
                for row in rewards.tolist()
            ],
        )
        self._generated += 1
        made[_ROW] = torch.arange(count)  # TRL shuffles and splits it with the rest


def _rewards(trainer: Any, first: int, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[B, F] what each reward function gave this process's rows; NaN where it gave nothing."""
    total = count * trainer.accelerator.num_processes
    columns = [list(trainer._logs["rewards"][name])[-total:] for name in trainer.reward_func_names]
    return np.array(columns, np.float64).T[first : first + count]


def _sampled(trainer: Any, made: dict[str, Any]) -> tuple[torch.Tensor, list[bool]]:
    """[B, R] which of the completions are tokens, and whether each ended by itself.

    A truncated completion may have its mask zeroed (mask_truncated_completions): it does not end with the end
    token, so it reaches to the last id that is no padding.
    """
    ids, mask = made["completion_ids"], made["completion_mask"].bool()
    words = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)  # of a processor
    behind = (ids != words.pad_token_id).flip(1).cumsum(1).flip(1) > 0  # this id or a later one is no padding
    mask = torch.where(mask.any(1, keepdim=True), mask, behind)
    ends = torch.as_tensor(list(trainer.eos_token_ids), device=ids.device)
    lengths = mask.sum(1).clamp(min=1)
    last = ids.gather(1, (lengths - 1).unsqueeze(1))
    return mask, torch.isin(last, ends).squeeze(1).tolist()
