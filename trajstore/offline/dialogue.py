"""Owns trlX's dialogues (strings, or prompts and outputs in turn) as trajectories; knows no Arrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trajstore.errors import InputError, ValidationError
from trajstore.trajectory import Trajectory, TrajectoryStatus


@dataclass(frozen=True)
class Turns:
    """How text becomes tokens, as in trlX.

    Attributes:
        encode: text → ids, without special tokens; each turn is encoded on its own.
        eos: text of the end-of-sequence token. It is put behind the last turn unless that ends with it; turns
            before it get nothing.
        bos: id put in front of a dialogue that is one bare string.
    """

    encode: Callable[[str], Sequence[int]]
    eos: str
    bos: int


def dialogue_trajectories(
    samples: Sequence[str | Sequence[str]], rewards: Sequence[float], turns: Turns
) -> list[Trajectory]:
    """trlX's `samples` and `rewards` as rows for a store: outputs have a loss mask of 1.

    They are `terminated`: a dialogue is a whole episode to trlX.

    Args:
        samples: each a string (an output without a prompt), or prompt, output, prompt, output, ...
        rewards: return of each sample.
        turns: how text becomes tokens.

    Raises:
        InputError: there are more or fewer rewards than samples.
        ValidationError: a dialogue has an odd number of phrases.
    """
    if len(samples) != len(rewards):
        raise InputError(f"there are {len(rewards)} rewards for {len(samples)} samples")
    return [_one(i, sample, float(rewards[i]), turns) for i, sample in enumerate(samples)]


def _one(i: int, sample: str | Sequence[str], reward: float, turns: Turns) -> Trajectory:
    phrases = ["", sample] if isinstance(sample, str) else list(sample)
    if len(phrases) % 2 or not phrases:
        raise ValidationError(
            f"the dialogue has {len(phrases)} phrases, expected an even number: prompt, output, ...", row=i
        )
    if not phrases[-1].endswith(turns.eos):
        phrases[-1] += turns.eos
    tokens = [list(turns.encode(phrase)) for phrase in phrases]
    if isinstance(sample, str):
        tokens[0] = [turns.bos]
    mask = [k % 2 for k, ids in enumerate(tokens) for _ in ids]
    prompt = len(tokens[0])
    flat = [token for ids in tokens for token in ids]
    return Trajectory(
        prompt=phrases[0],
        response="".join(phrases[1:]),
        tokens=flat,
        prompt_length=prompt,
        response_length=len(flat) - prompt,
        loss_mask=mask,
        reward=reward,
        terminated=True,
        status=TrajectoryStatus.COMPLETED,
    )
