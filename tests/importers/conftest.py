"""Owns the small tokenizers and the files that tests of the importers share."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "hello world, the weather is fine",
    "user assistant system tool",
    '{"name": "get", "arguments": {}}',
] * 4


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with the ChatML tokens, saved with truncation and padding on."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.enable_truncation(max_length=5)
    made.enable_padding(length=8)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def plain_bpe(bpe_file: Path) -> Tokenizer:
    """The library's own view of `bpe_file`, to decode with."""
    return Tokenizer.from_file(str(bpe_file))


@pytest.fixture(scope="session")
def tiktoken_ranks() -> dict[bytes, int]:
    tokens = [bytes([value]) for value in range(256)] + [b"he", b"ll", b"hell", b"hello", b"<|", b"|>"]
    return {token: rank for rank, token in enumerate(tokens)}


def tiktoken_text(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


@pytest.fixture(scope="session")
def tiktoken_file(tmp_path_factory: pytest.TempPathFactory, tiktoken_ranks: dict[bytes, int]) -> Path:
    path = tmp_path_factory.mktemp("tik") / "tiny.tiktoken"
    path.write_bytes(tiktoken_text(tiktoken_ranks))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes records as JSON lines, and gives the path."""

    def write(*records: object, name: str = "file.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write
