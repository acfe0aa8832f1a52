"""Owns the tests of reading JSON records with their places."""

import json
import math
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajstore.errors import ImportFormatError
from trajstore.importers import records
from trajstore.importers.records import Record, read_records, require_object

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def read(tmp_path: Path, content: bytes, name: str = "file.jsonl") -> list[Record]:
    path = tmp_path / name
    path.write_bytes(content)
    return list(read_records(path))


def refused(tmp_path: Path, content: bytes, name: str = "file.jsonl") -> ImportFormatError:
    with pytest.raises(ImportFormatError) as caught:
        read(tmp_path, content, name)
    assert caught.value.hint
    return caught.value


def test_lines_have_their_physical_number_and_position(tmp_path: Path) -> None:
    content = b'{"a":1}\n\n  \r\n{"a":2}\n{"a":3}'
    records = read(tmp_path, content)
    assert [r.data for r in records] == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [r.where for r in records] == [f"{tmp_path}/file.jsonl:{n}" for n in (1, 4, 5)]
    assert [r.bytes_read for r in records] == [8, 21, len(content)]


def test_byte_order_mark_crlf_and_blank_lines(tmp_path: Path) -> None:
    content = '\ufeff{"a":"é"}\r\n\r\n{"a":"b"}\r\n'.encode()
    records = read(tmp_path, content)
    assert [(r.data["a"], r.where.rsplit(":")[-1]) for r in records] == [("é", "1"), ("b", "3")]
    assert records[-1].bytes_read == len(content)


def test_byte_order_mark_inside_joined_files(tmp_path: Path) -> None:
    assert len(read(tmp_path, b'\xef\xbb\xbf{"a":1}\n\xef\xbb\xbf{"a":2}\n')) == 2


def test_line_separators_inside_text_do_not_split(tmp_path: Path) -> None:
    (record,) = read(tmp_path, '{"a":"x\u2028y\u0085z"}\n'.encode())
    assert record.data == {"a": "x\u2028y\u0085z"}


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf", b"\n \r\n"])
def test_array_elements_are_numbered(tmp_path: Path, head: bytes) -> None:
    content = head + b'[\n {"a": 1},\n {"a": "\xc3\xa9"} , 3\n]\n'
    records = read(tmp_path, content, "file.json")
    assert [r.data for r in records] == [{"a": 1}, {"a": "é"}, 3]
    assert [r.where for r in records] == [f"{tmp_path}/file.json[{n}]" for n in range(3)]
    positions = [r.bytes_read for r in records]
    assert positions == sorted(positions)
    assert len(content) // 4 < positions[0] < positions[-1] <= len(content)


@pytest.mark.parametrize(
    "layout", [{"indent": 2}, {"indent": 0}, {"indent": "\t", "separators": (" ,", ":")}]
)
def test_one_object_over_lines(tmp_path: Path, layout: dict[str, Any]) -> None:
    data = {"samples": [{"a": 1}, {"a": 2}], "n": 2}
    content = json.dumps(data, **layout).encode()
    (record,) = read(tmp_path, content, "file.json")
    assert record == Record(data, f"{tmp_path}/file.json", len(content))


def test_one_object_whose_second_line_is_an_object(tmp_path: Path) -> None:
    (record,) = read(tmp_path, b'{"samples": [\n{"a": 1},\n{"a": 2}]}\n')
    assert record.data == {"samples": [{"a": 1}, {"a": 2}]}


def test_one_object_with_leading_commas(tmp_path: Path) -> None:
    (record,) = read(tmp_path, b'{"a": 1\n, "b": 2\n}')
    assert record.data == {"a": 1, "b": 2}


def test_one_object_on_one_line_is_a_line(tmp_path: Path) -> None:
    (record,) = read(tmp_path, b'{"a": 1}', "file.json")
    assert record.where.endswith("file.json:1")


def test_pythons_dialect(tmp_path: Path) -> None:
    text = b'{"r": NaN}\n{"r": -Infinity}\n{"r": 1e400}\n{"r": 9007199254740993}\n{"r": 1}\n{"r": 1.0}\n'
    nan, low, high, exact, whole, real = (r.data["r"] for r in read(tmp_path, text))
    assert math.isnan(nan)
    assert (low, high, exact) == (-math.inf, math.inf, 9007199254740993)
    assert isinstance(whole, int)
    assert isinstance(real, float)


def test_types_drift_without_harm(tmp_path: Path) -> None:
    rows = [{"id": i, "note": None, "pad": "x" * 300} for i in range(5000)] + [{"id": 5000, "note": "hi"}]
    records = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert [r.data for r in records] == rows


def test_lines_are_streamed(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    line = json.dumps({"pad": "x" * 10_000}) + "\n"
    path.write_text(line * 2000)  # 20 MB, read through a buffer of one
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_records(path)) == 2000
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportFormatError, match=r"gone\.jsonl: no such file"):
        next(read_records(tmp_path / "gone.jsonl"))
    with pytest.raises(ImportFormatError, match="is a folder"):
        next(read_records(tmp_path))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("file.jsonl")
        with pytest.raises(ImportFormatError, match=r"file\.jsonl: cannot be read: "):
            list(read_records(Path("file.jsonl")))


@pytest.mark.parametrize("content", [b"", b"\n \r\n\n", b"\xef\xbb\xbf", b"[]", b" [ \n ] \n"])
def test_no_records(tmp_path: Path, content: bytes) -> None:
    assert refused(tmp_path, content).message == f"{tmp_path}/file.jsonl: no records in it"


def test_bad_line_is_named_after_the_good_ones(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 1, "b": 2 "c"}\n')
    records = read_records(path)
    assert next(records).data == {"a": 1}
    with pytest.raises(ImportFormatError) as caught:
        next(records)
    assert caught.value.message == f"{path}:3: not JSON: Expecting ',' delimiter (column 17)"
    assert "one whole object a line" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": "cut', "file.jsonl:2: not JSON: Unterminated string starting at (column 7)"),
        (b'{"a": 1}\n{"a": [1, 2', "file.jsonl:2: not JSON: Expecting ',' delimiter (column 12)"),
        (b'{"a": 1}\n{"a":', "file.jsonl:2: not JSON: Expecting value (column 6)"),
        (b'[{"a": 1},\n {"a"', "file.jsonl:2: not JSON: Expecting ':' delimiter (column 6)"),
        (b'[{"a": 1},', "file.jsonl:1: not JSON: Expecting value (column 11)"),
        (b'[{"a": 1}\n', "file.jsonl:2: not JSON: Expecting ',' delimiter (column 1)"),
        (b"[", "file.jsonl:1: not JSON: Expecting value (column 2)"),
        (b'{\n "a": 1,\n "b"', "file.jsonl:3: not JSON: Expecting ':' delimiter (column 5)"),
    ],
)
def test_truncated(tmp_path: Path, content: bytes, message: str) -> None:
    error = refused(tmp_path, content)
    assert error.message == f"{tmp_path}/{message}"
    assert "writer was stopped" in str(error.hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'\n\n[{"a": 1},\n{]', "file.jsonl:4: not JSON: Expecting property name"),
        (b"[1] [2]", "file.jsonl:1: not JSON: Extra data (column 5)"),
        (b'{"a": 1}\n{"a": 1\n', "file.jsonl:2: not JSON: Expecting ',' delimiter (column 8)"),
        (b'[1]\n{"a": 1}\n', "file.jsonl:2: not JSON: Extra data (column 1)"),
        (b"[1,]", "file.jsonl:1: not JSON: Expecting value (column 4)"),
        (b"[1 2]", "file.jsonl:1: not JSON: Expecting ',' delimiter (column 4)"),
        (b'{"a": 1} {"a": 2}\n', "file.jsonl:1: not JSON: Extra data (column 10)"),
        (b'\n{\n "a": 1\n}\n{"b": 2}\n', "file.jsonl:5: not JSON: Extra data (column 1)"),
        (b"hello\n", "file.jsonl:1: not JSON: Expecting value (column 1)"),
        (b"'a'\n", "file.jsonl:1: not JSON: Expecting value"),
        (b'{"a": 1}\n\x00\x00\x00', "file.jsonl:2: not JSON: Expecting value (column 1)"),
        (b'{"a": "x\ty"}\n', "file.jsonl:1: not JSON: Invalid control character at (column 9)"),
    ],
)
def test_not_json(tmp_path: Path, content: bytes, message: str) -> None:
    error = refused(tmp_path, content)
    assert error.message.startswith(f"{tmp_path}/{message}")
    assert "one whole object a line" in str(error.hint)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"a": 1}\n{"a": "\xff"}\n', 2),
        (b'[{"a": 1},\n\n{"a": "\xff"}]', 3),
        (b'\n{\n"a": "\xff"}', 3),
    ],
)
def test_invalid_utf8_names_the_line(tmp_path: Path, content: bytes, line: int) -> None:
    error = refused(tmp_path, content)
    assert error.message.startswith(f"{tmp_path}/file.jsonl:{line}: not UTF-8: byte 0xff")


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b'{"a": 1}\n{"b": {"reward": 1, "x": 2, "reward": 3}}\n', "file.jsonl:2"),
        (b'[{"a": 1}, {"reward": 1, "reward": 1}]', "file.jsonl[1]"),
        (b'{\n"reward": 1,\n"reward": 1}', "file.jsonl"),
    ],
)
def test_duplicate_keys_are_refused(tmp_path: Path, content: bytes, where: str) -> None:
    error = refused(tmp_path, content)
    assert error.message == f"{tmp_path}/{where}: key 'reward' appears twice in one object"


def test_same_key_in_sibling_objects_is_fine(tmp_path: Path) -> None:
    assert read(tmp_path, b'{"a": {"k": 1}, "b": {"k": 2}}')[0].data == {"a": {"k": 1}, "b": {"k": 2}}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"PK\x03\x04", "a zip archive"),
        (b"PAR1....PAR1", "a Parquet file"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16 text"),
    ],
)
def test_other_kinds_of_file_are_recognised(tmp_path: Path, content: bytes, found: str) -> None:
    assert f"expected JSON text, found {found}" in refused(tmp_path, content).message


def test_values_that_python_cannot_read(tmp_path: Path) -> None:
    assert "nested too deeply" in refused(tmp_path, b'{"a": ' + b"[" * 100_000 + b"\n").message
    assert "4300 digits" in refused(tmp_path, b'{"a": ' + b"1" * 5000 + b"}").message


def test_require_object(tmp_path: Path) -> None:
    good, *bad = read(tmp_path, b'{"a": 1}\n2\n"text"\nnull\ntrue\n1.5\n')
    assert require_object(good) == {"a": 1}
    found = ["an integer", "text 'text'", "null", "true", "the number 1.5"]
    for line, (record, what) in enumerate(zip(bad, found, strict=True), 2):
        with pytest.raises(ImportFormatError) as caught:
            require_object(record)
        assert caught.value.message.endswith(f"file.jsonl:{line}: expected a JSON object, found {what}")


def test_file_edited_on_windows() -> None:
    path = SHARED / "cases" / "files" / "bom_crlf.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    records = read_records(path)
    assert next(records).data["traj_id"] == "e1"
    assert next(records).data["reward"] == math.inf
    with pytest.raises(ImportFormatError, match=r"bom_crlf\.jsonl:4: key 'reward' appears twice"):
        next(records)


texts = st.text(st.sampled_from('ab1,:"\\ {}é\n\u2028'), max_size=6)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    texts,
    st.sampled_from([2**63, 10**20]),
)
small = st.integers(-(2**63), 2**64 - 1)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(small | st.floats(), max_size=4),
        st.lists(st.lists(small, max_size=3), max_size=3),
        st.lists(st.dictionaries(texts, inner, max_size=3), max_size=3),
        st.dictionaries(texts, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(
    st.dictionaries(texts, values, max_size=4), st.booleans(), st.sampled_from([(",", ":"), (" , ", " : ")])
)
def test_the_fast_road_gives_what_pythons_json_gives(data: Any, ascii: bool, separators: Any) -> None:
    line = json.dumps(data, ensure_ascii=ascii, separators=separators).encode()
    found = records._fast(line)
    if found is not records._SLOW:
        assert repr(found) == repr(json.loads(line))


@settings(max_examples=150)
@given(
    texts, values, values, st.dictionaries(texts, values, max_size=2), st.sampled_from([":", " : ", "\t:"])
)
def test_the_fast_road_lets_no_key_through_twice(key: str, a: Any, b: Any, more: Any, colon: str) -> None:
    pairs = [(key, a), *more.items(), (key, b)]
    line = "{" + ",".join(f"{json.dumps(k)}{colon}{json.dumps(v)}" for k, v in pairs) + "}"
    assert records._fast(line.encode()) is records._SLOW


def test_lines_of_tokens_take_the_fast_road() -> None:
    row = {"id": 'a "b"', "tokens": list(range(999)), "behavior_log_probs": [-1e-5, -0.00012345678901234567]}
    for line in (json.dumps(row), json.dumps(row, separators=(",", ":")), json.dumps([row])):
        assert records._fast(line.encode()) is not records._SLOW
