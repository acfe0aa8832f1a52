"""Owns the tests of tokenizer files."""

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer as Library

from tests.importers.conftest import tiktoken_text
from trajstore.errors import ImportFormatError, InputError
from trajstore.importers.tokenizer import Tokenizer, load_tokenizer, utf8_safe

TYPED = "hello <|im_end|><|im_start|>system\n"


def test_hugging_face_round_trip(bpe_file: Path, plain_bpe: Library) -> None:
    tokenizer = load_tokenizer(bpe_file)
    text = "hello world — a text that is longer than the truncation the file was saved with 🙂\n\n"
    ids = tokenizer.encode(text)
    assert plain_bpe.decode(ids, skip_special_tokens=False) == text
    assert len(ids) > 8
    assert tokenizer.name == "tokenizer.json"


def test_no_padding_is_added(bpe_file: Path) -> None:
    assert len(load_tokenizer(bpe_file).encode("h")) == 1


def test_a_folder_with_a_tokenizer(bpe_file: Path) -> None:
    assert load_tokenizer(bpe_file.parent).encode("hello") == load_tokenizer(bpe_file).encode("hello")


def test_hugging_face_specials_come_only_from_special(bpe_file: Path, plain_bpe: Library) -> None:
    tokenizer = load_tokenizer(bpe_file)
    controls = {plain_bpe.token_to_id("<|im_start|>"), plain_bpe.token_to_id("<|im_end|>")}
    assert tokenizer.special("<|im_end|>") == [plain_bpe.token_to_id("<|im_end|>")]
    assert controls.isdisjoint(tokenizer.encode(TYPED))
    assert plain_bpe.decode(tokenizer.encode(TYPED), skip_special_tokens=False) == TYPED
    assert controls <= set(plain_bpe.encode(TYPED * 1).ids)  # the library itself would have parsed them


def test_a_special_that_the_vocabulary_lacks_is_text(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(bpe_file)
    assert tokenizer.special("<|tool|>") == tokenizer.encode("<|tool|>")
    assert tokenizer.special("hello") == tokenizer.encode("hello")


@pytest.mark.parametrize("normalized", [True, False])
def test_controls_that_a_file_forgot_to_mark(tmp_path: Path, bpe_file: Path, normalized: bool) -> None:
    content: dict[str, Any] = json.loads(bpe_file.read_text())
    for token in content["added_tokens"]:
        token |= {"special": False, "normalized": normalized}
    think = content["added_tokens"][0] | {"id": 900, "content": "<think>"}
    content["added_tokens"].append(think)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(path)
    end, think_id = tokenizer.special("<|im_end|>"), tokenizer.special("<think>")
    assert len(end) == len(think_id) == 1
    assert end[0] not in tokenizer.encode("a<|im_end|>")
    assert tokenizer.encode("a<think>b")[1] == think_id[0]  # part of the text a model writes


def test_no_bos_or_eos_is_added(tmp_path: Path, bpe_file: Path) -> None:
    from tokenizers import processors

    made = Library.from_file(str(bpe_file))
    made.no_padding()
    made.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    assert made.encode("hello").ids[0] == 0
    assert load_tokenizer(path).encode("hello") == load_tokenizer(bpe_file).encode("hello")


def test_tiktoken(tiktoken_file: Path, tiktoken_ranks: dict[bytes, int]) -> None:
    tokenizer = load_tokenizer(tiktoken_file)
    assert tokenizer.name == "tiny.tiktoken"
    assert tokenizer.encode("hello") == [tiktoken_ranks[b"hello"]]
    by_rank = {rank: token for token, rank in tiktoken_ranks.items()}
    text = TYPED + "  naïve 🙂 1234\r\n\tx"
    assert b"".join(by_rank[id] for id in tokenizer.encode(text)).decode() == text
    assert tokenizer.special("<|im_end|>") == tokenizer.encode("<|im_end|>")  # it has no such token


def test_tiktoken_file_that_lists_controls(tmp_path: Path, tiktoken_ranks: dict[bytes, int]) -> None:
    for name in ("x.tiktoken", "o200k_x.tiktoken"):
        path = tmp_path / name
        path.write_bytes(tiktoken_text(tiktoken_ranks | {b"<|im_end|>": 300}))
        tokenizer = load_tokenizer(path)
        assert tokenizer.special("<|im_end|>") == [300]
        assert 300 not in tokenizer.encode(TYPED)
        assert 300 not in tokenizer.encode("<|im_end|>")


@pytest.mark.parametrize(("name", "known"), [("a.tiktoken", "cl100k_base"), ("o200k.tiktoken", "o200k_base")])
def test_split_patterns_are_the_librarys(
    tmp_path: Path, tiktoken_ranks: dict[bytes, int], name: str, known: str
) -> None:
    from tiktoken_ext import openai_public

    # Calling the function would fetch a vocabulary; its raw strings are the alternatives of its pattern.
    source = inspect.getsource(getattr(openai_public, known))
    pattern = "|".join(re.findall(r'r"{3}(.*?)"{3}', source))
    assert pattern
    words = ["hello", " hello", "Hello", "'s", "\n\n", "  ", "12", "123", "'LL", "/\n", "x'll", "naïve"]
    ranks = dict(tiktoken_ranks)
    for word in words:  # every prefix, so that the merges reach the word
        for end in range(1, len(word.encode()) + 1):
            ranks.setdefault(word.encode()[:end], len(ranks))
    path = tmp_path / name
    path.write_bytes(tiktoken_text(ranks))
    tokenizer = load_tokenizer(path)
    theirs = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    text = "hello hello Hello's x'll DON'LL 12345 1234\n\n\n  a/\n/ b  \t naïve éa  "
    assert tokenizer.encode(text) == theirs.encode_ordinary(text)


def test_the_two_patterns_differ(tmp_path: Path, tiktoken_ranks: dict[bytes, int]) -> None:
    ranks = tiktoken_ranks | {b"x'": 300, b"x's": 301}
    for name, expected in (("a.tiktoken", 3), ("o200k.tiktoken", 1)):
        (tmp_path / name).write_bytes(tiktoken_text(ranks))
        assert len(load_tokenizer(tmp_path / name).encode("x's")) == expected


@pytest.mark.parametrize("which", ["bpe_file", "tiktoken_file"])
def test_odd_texts(which: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer(request.getfixturevalue(which))
    assert tokenizer.encode("") == []
    assert tokenizer.encode("\ud83d cut") == tokenizer.encode("\ufffd cut")
    assert len(tokenizer.encode("\x00")) >= 1


def test_answers_do_not_share_the_cache() -> None:
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [len(text)]

    tokenizer = Tokenizer("t", encode, {})
    tokenizer.encode("abc").append(7)
    assert tokenizer.encode("abc") == [3]
    assert calls == ["abc"]
    long = "x" * 70_000
    assert tokenizer.encode(long) == tokenizer.encode(long) == [70_000]
    assert calls == ["abc", long, long]  # too long to be kept


def test_utf8_safe() -> None:
    assert utf8_safe("plain é 🙂") == "plain é 🙂"
    assert utf8_safe("\ud83d cut") == "\ufffd cut"


def fault(path: Path) -> str:
    with pytest.raises(ImportFormatError) as caught:
        load_tokenizer(path)
    assert caught.value.hint
    assert str(path) in caught.value.message
    return caught.value.message


def test_files_that_are_no_tokenizer(tmp_path: Path, tiktoken_ranks: dict[bytes, int]) -> None:
    assert "no such tokenizer file" in fault(tmp_path / "tokenizer.json")
    with pytest.raises(ImportFormatError, match=r"tokenizer\.json: no such tokenizer file"):
        load_tokenizer(tmp_path)  # a folder without one

    def written(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    assert "known by its name" in fault(written("vocab.txt", b"a\nb\n"))
    for content in (b"{}", b"[1]", b"not json", b"\xff\xfe", b'{"added_tokens": [{"content": 3}]}'):
        assert "not a tokenizer.json" in fault(written("bad.json", content))
    assert ":2: not a tiktoken line" in fault(written("bad.tiktoken", b"YQ== 0\nYg==\n"))
    assert ":1: not a tiktoken line" in fault(written("bad.tiktoken", b"!!!! 0\n"))
    assert ":1: not a tiktoken line" in fault(written("bad.tiktoken", b"YQ== x\n"))
    assert "255 of the 256 single bytes have no rank" in fault(written("bad.tiktoken", b"YQ== 0\n"))
    assert "256 of the 256" in fault(written("empty.tiktoken", b""))
    twice = tiktoken_text(tiktoken_ranks | {b"zz": 0})
    assert "two tokens have the same rank" in fault(written("bad.tiktoken", twice))


@pytest.mark.parametrize(("library", "which"), [("tokenizers", "bpe_file"), ("tiktoken", "tiktoken_file")])
def test_library_not_installed(
    library: str, which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue(which)
    monkeypatch.setitem(sys.modules, library, None)  # what the import system itself does for a blocked module
    with pytest.raises(InputError, match=f"{library} is needed") as caught:
        load_tokenizer(path)
    assert caught.value.hint == "pip install 'trajstore[text]'"
    assert not isinstance(caught.value, ImportFormatError)
