"""Owns turning text into token ids with a tokenizer file; knows no file of trajectories and no network.

Text is never parsed for control tokens: a user who types `<|im_end|>` gets the ids of those characters. The
control token itself comes from `Tokenizer.special` alone.
"""

from __future__ import annotations

import base64
import binascii
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from trajstore.errors import ImportFormatError, InputError

# Split patterns, from tiktoken 0.14.0, tiktoken_ext/openai_public.py, cl100k_base() and o200k_base(). They
# are written down because those functions download their vocabulary when called.
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"""
    r"""|\s*[\r\n]|\s+(?!\S)|\s"""
)
_O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_CACHED_TEXTS = 512  # system prompts, headers and tool results repeat from row to row
_LONGEST_CACHED = 1 << 16  # characters; with the number of texts it bounds the cache to tens of megabytes
_HINT = "give a Hugging Face tokenizer.json, the folder of a model that has one, or a NAME.tiktoken file"


class Tokenizer:
    """Text to token ids.

    Attributes:
        name: the file's name.
    """

    def __init__(
        self, name: str, encode: Callable[[str], Sequence[int]], specials: Mapping[str, int]
    ) -> None:
        self.name = name
        self._encode = encode
        self._specials = specials
        self._cached = lru_cache(maxsize=_CACHED_TEXTS)(lambda text: array("i", encode(text)))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: nothing is added, no control token is recognised in it."""
        if not text:
            return []
        text = utf8_safe(text)
        return list(self._cached(text) if len(text) <= _LONGEST_CACHED else self._encode(text))

    def special(self, text: str) -> list[int]:
        """The one id of a control token; a text the vocabulary has no such token for is encoded as text."""
        known = self._specials.get(text)
        return self.encode(text) if known is None else [known]


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a Hugging Face `tokenizer.json` (or the folder that holds it) or a `NAME.tiktoken` file.

    A tiktoken file has no split pattern inside: o200k_base's is used when the file's name contains "o200k",
    else cl100k_base's.

    Raises:
        ImportFormatError: there is no such file, or it is not a tokenizer.
        InputError: the library that reads it is not installed.
    """
    path = Path(path)
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.exists():
        raise ImportFormatError(f"{path}: no such tokenizer file", hint=_HINT)
    if path.suffix not in (".json", ".tiktoken"):
        raise ImportFormatError(f"{path}: not a tokenizer file that is known by its name", hint=_HINT)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ImportFormatError(f"{path}: cannot be read: {error.strerror or error}", hint=_HINT) from error
    return _tiktoken(path, data) if path.suffix == ".tiktoken" else _hugging_face(path, data)


def utf8_safe(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _hugging_face(path: Path, data: bytes) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise _not_installed("tokenizers", path) from error
    try:
        made = tokenizers.Tokenizer.from_str(_controls_marked(data))
    except Exception as error:  # tokenizers raises plain Exception
        raise ImportFormatError(f"{path}: not a tokenizer.json: {error}", hint=_HINT) from error
    made.no_truncation()  # a file saved while training often carries both
    made.no_padding()
    made.encode_special_tokens = True  # special tokens in the text are text
    specials = {token.content: id for id, token in made.get_added_tokens_decoder().items()}

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = made.encode(text, add_special_tokens=False).ids
        return ids

    return Tokenizer(path.name, encode, specials)


def _controls_marked(data: bytes) -> str:
    """A tokenizer.json in which added tokens of the form <|...|> are special, as some files forget to say.

    Other added tokens that are not special (`<think>`) are part of the text a model writes and stay so.
    """
    text = data.decode()
    content: Any = json.loads(text)
    unmarked = [
        token
        for token in content.get("added_tokens") or ()
        if not token["special"] and token["content"].startswith("<|") and token["content"].endswith("|>")
    ]
    for token in unmarked:
        token["special"] = True
    return json.dumps(content) if unmarked else text


def _tiktoken(path: Path, data: bytes) -> Tokenizer:
    try:
        import tiktoken
    except ImportError as error:
        raise _not_installed("tiktoken", path) from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ImportFormatError(
                f"{path}:{number}: not a tiktoken line, expected a token in base64 and its rank", hint=_HINT
            ) from error
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if missing:  # tiktoken would panic at the first text that holds one
        raise ImportFormatError(
            f"{path}: not a whole vocabulary: {missing} of the 256 single bytes have no rank", hint=_HINT
        )
    if len(set(ranks.values())) != len(ranks):
        raise ImportFormatError(f"{path}: two tokens have the same rank", hint=_HINT)
    pattern = _O200K if "o200k" in path.name else _CL100K
    made = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    # Some files list control tokens with the others; the split patterns take such a text apart, so that only
    # `special` reaches them.
    specials = {
        token.decode(): rank
        for token, rank in ranks.items()
        if token.startswith(b"<|") and token.endswith(b"|>") and len(token) > 4
    }

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = made.encode_ordinary(text)
        return ids

    return Tokenizer(path.name, encode, specials)


def _not_installed(library: str, path: Path) -> InputError:
    return InputError(f"{path}: {library} is needed to read it", hint="pip install 'trajstore[text]'")
