"""Owns the demo's task: spell a word backwards, one character a token; knows no policy and no store."""

from __future__ import annotations

import random
from collections.abc import Sequence

PAD, EOS = 0, 1
_SPECIAL = {PAD: "", EOS: ""}
_CHARACTERS = ":=abcdefghijklmnopqrstuvwxyz"
_TOKEN = {character: len(_SPECIAL) + i for i, character in enumerate(_CHARACTERS)}
_TEXT = _SPECIAL | {token: character for character, token in _TOKEN.items()}

ASK = _TOKEN["="]
"""The token that ends a prompt."""

VOCABULARY = len(_TEXT)
LONGEST_WORD = 40
LONGEST_RESPONSE = 48


def draw_word(random: random.Random, longest: int = LONGEST_WORD) -> str:
    """A word of 2 letters or more: most are short, a few are long, as lengths of real responses are."""
    length = 2 + int(random.expovariate(1 / 9))
    return "".join(random.choices(_CHARACTERS[2:], k=min(length, longest)))


def size_of(word: str) -> str:
    """What kind of task a word is: long ones take longer to write, so their rollouts are staler."""
    return "short words" if len(word) < 7 else "long words" if len(word) < 16 else "very long words"


def prompt_of(word: str) -> str:
    """The prompt that asks for a word backwards."""
    return f"reverse:{word}="


def tokens_of(text: str) -> list[int]:
    """Token ids of a text."""
    return [_TOKEN[character] for character in text]


def text_of(tokens: Sequence[int]) -> str:
    """The text of token ids; the end token has none."""
    return "".join(_TEXT[token] for token in tokens)


def answer_of(word: str) -> list[int]:
    """The right response, with its end token."""
    return [*tokens_of(word[::-1]), EOS]


def token_rewards_of(word: str, response: Sequence[int]) -> list[float]:
    """A reward for each token of the response that is right where it stands; all of them add up to 1 at most.

    The sum is the share of the answer that is right; of a generation that was cut off, so far.
    """
    answer = answer_of(word)
    share = 1 / max(len(answer), len(response))
    return [share * (i < len(answer) and answer[i] == token) for i, token in enumerate(response)]
