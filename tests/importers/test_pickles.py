"""Owns the tests of safe decoding: hostile pickles and archives are refused and nothing of them runs."""

import _codecs
import gzip
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajstore.errors import ImportFormatError
from trajstore.importers import ImportOptions, detect, files, open_importer, pickles, rebuilt
from trajstore.importers.files import read_whole
from trajstore.importers.pickles import load_pickle, load_torch
from trajstore.importers.rows import plain

torch = pytest.importorskip("torch")


class Reduces:
    """An object whose pickle calls something when it is loaded."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def raw(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def hostile(marker: Path) -> dict[str, bytes]:
    """Pickles that would make the file `marker`, or break the decoder, by another way each."""
    run = f"import pathlib; pathlib.Path({str(marker)!r}).touch()"
    made = {
        "os.system": pickle.dumps(Reduces(os.system, (f"touch {marker}",))),
        "eval": pickle.dumps(Reduces(eval, (f"__import__('pathlib').Path({str(marker)!r}).touch()",))),
        "exec": pickle.dumps({"samples": [{"tokens": Reduces(exec, (run,))}]}),
        "getattr chain": pickle.dumps(Reduces(getattr, (Reduces(__import__, ("os",)), "system"))),
        "dotted name": raw(b"\x8c\x05numpyX", struct.pack("<I", 14), b"ndarray.tofile", b"\x93"),
        "submodule of an allowed one": raw(b"ctorch\nload\n(", text(str(marker)), b"tR"),
        "numpy's own loader": raw(b"cnumpy\nload\n(", text(str(marker)), b"tR"),
        "a state for a function": raw(
            b"ctorch._utils\n_rebuild_tensor_v2\nN}", text("__code__"), b"I1\ns\x86b"
        ),
        "a state for a class": raw(b"cverl.protocol\nDataProto\nN}", text("__setstate__"), b"I1\ns\x86b"),
        "extension registry": raw(b"\x82\x01"),
        "a persistent id": raw(text("os.system"), b"Q"),
        "many zero bytes": raw(b"c__builtin__\nbytearray\n(J", struct.pack("<i", 2**31 - 1), b"tR"),
        "an array of claimed size": raw(
            b"cnumpy._core.numeric\n_frombuffer\n(",
            b"C\x01a",
            b"cnumpy\ndtype\n(" + text("u1") + b"tR",
            b"(J" + struct.pack("<i", 2**31 - 1) + b"t" + text("C") + b"tR",
        ),
        "an object array of bytes": raw(
            b"cnumpy._core.multiarray\n_reconstruct\n)R(I1\n(I1\nt",
            b"cnumpy\ndtype\n(" + text("O8") + b"tR",
            b"I00\nC\x08abcdefghtb",
        ),
        "text of claimed size": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
        "cut off": pickle.dumps(list(range(1000)))[:-200],
        "not a pickle": b"\x80\x04garbage",
        "protocol 0": b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.",
    }
    return made


NAMES = list(hostile(Path("x")))


def as_torch(inner: bytes, **members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a/data.pkl", inner)
        archive.writestr("a/byteorder", b"little")
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_pickle_is_refused_and_nothing_runs(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    data = hostile(marker)[name]
    with pytest.raises(ImportFormatError, match=r"evil\.pkl: refused: "):
        load_pickle(tmp_path / "evil.pkl", data)
    with pytest.raises(ImportFormatError, match=r"evil\.pt: refused: "):
        load_torch(tmp_path / "evil.pt", as_torch(data))
    proto = pickle.dumps(Proto((as_torch(data), {}, {})))
    with pytest.raises(ImportFormatError, match="refused: "):
        list(open_importer("verl-dataproto")(write(tmp_path / "gen_batch.dp", proto), ImportOptions()))
    for suffix, content in ((".pkl", data), (".pt", as_torch(data))):
        path = write(tmp_path / f"evil{suffix}", content)
        for format in ("auto", "slime", "verl-dataproto", "skyrl", "nemo-rl-buffer", "verl-tq"):
            with pytest.raises(ImportFormatError):
                list(open_importer(format)(path, ImportOptions()))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os.system", "exec", "eval"])
def test_these_pickles_do_run_where_nothing_stops_them(tmp_path: Path, name: str) -> None:
    pickle.loads(hostile(tmp_path / "marker")[name])
    assert (tmp_path / "marker").exists(), "else the test above shows nothing"


class Proto:
    """Pickles as verl's DataProto does."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state


Proto.__module__, Proto.__qualname__ = "verl.protocol", "DataProto"


@pytest.fixture(autouse=True)
def _verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the pickler find the class under verl's name; the decoder never looks."""
    import sys
    from types import ModuleType

    module = ModuleType("verl.protocol")
    module.DataProto = Proto  # type: ignore[attr-defined]  # made for this test
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", module)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_function_of_the_decoder_cannot_be_changed(tmp_path: Path) -> None:
    before = pickles._ALLOWED["torch._utils", "_rebuild_tensor_v2"]._function
    for name in NAMES:
        with pytest.raises(ImportFormatError):
            load_pickle(tmp_path / "evil", hostile(tmp_path / "marker")[name])
    allowed = pickles._ALLOWED["torch._utils", "_rebuild_tensor_v2"]
    assert allowed._function is before
    assert vars(pickles.Opaque)["__setstate__"] is pickles.Opaque.__setstate__


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../escape", "leaves the archive"),
        ("/etc/passwd", "leaves the archive"),
        ("a\\..\\..\\b", "leaves the archive"),
    ],
)
def test_an_archive_cannot_name_what_is_outside(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ImportFormatError, match=reason):
        load_torch(tmp_path / "a.pt", as_torch(pickle.dumps({}), **{name: b"x"}))
    assert list(tmp_path.iterdir()) == []


def test_bombs_are_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps("x" * 10_000_000))
    with pytest.raises(ImportFormatError, match=r"is compressed, which torch\.save never does"):
        load_torch(tmp_path / "a.pt", out.getvalue())

    plain = bytearray(as_torch(pickle.dumps({}), **{"a/data/0": b"12345678"}))
    entry = plain.rindex(b"PK\x01\x02")
    plain[entry + 20 : entry + 28] = struct.pack("<II", 1 << 30, 1 << 30)  # both sizes claimed
    with pytest.raises(ImportFormatError, match="its entries claim 1,073,74"):
        load_torch(tmp_path / "a.pt", bytes(plain))


def test_what_unpacks_too_far_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    path = write(tmp_path / "a.pt.gz", gzip.compress(as_torch(pickle.dumps(b"\0" * (4 << 20)))))
    with pytest.raises(ImportFormatError, match="more than 1,048,576 bytes would have to be in memory"):
        read_whole(path)


def test_tensors_beyond_their_storage_are_refused(tmp_path: Path) -> None:
    def tensor(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
        numbers = [b"(" + b"".join(b"J" + struct.pack("<i", n) for n in t) + b"t" for t in (size, stride)]
        storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"I4\ntQ"
        return raw(b"ctorch._utils\n_rebuild_tensor_v2\n(", storage, b"I%d\n" % offset, *numbers, b"I00\nNtR")

    data = np.arange(4, dtype=np.float32).tobytes()

    def load(*shape: Any) -> Any:
        return load_torch(tmp_path / "a.pt", as_torch(tensor(*shape), **{"a/data/0": data}))

    assert load(1, (3,), (1,)).tolist() == [1.0, 2.0, 3.0]
    assert load(0, (2, 2), (1, 2)).tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert load(3, (3,), (0,)).tolist() == [3.0, 3.0, 3.0]  # as torch's expand saves it
    for wrong in ((2, (3,), (1,)), (0, (5,), (1,)), (0, (2, 2), (4, 1)), (-1, (2,), (1,)), (0, (2,), (-1,))):
        with pytest.raises(ImportFormatError, match="refused: "):
            load(*wrong)
    with pytest.raises(ImportFormatError, match="reaches beyond its storage"):
        load(0, (1 << 30, 1), (0, 0))


def test_a_value_that_holds_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = [1]
    for _ in range(40):
        deep = [deep, deep]  # 2^40 values out of 40 lists
    for value in (endless, deep):
        sample = {"tokens": [1, 2], "response_length": 1, "response": "", "reward": 0.0, "extra": value}
        path = tmp_path / "8.pt"
        torch.save({"rollout_id": 8, "samples": [sample, sample]}, path)
        with pytest.raises(ImportFormatError, match=r"samples\[0\]: .*its metadata"):
            list(open_importer("slime")(path, ImportOptions()))


VALUES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, "é", b"x", (1, 2), {3}], "b": True, "c": 2**70},
    "ordered": OrderedDict(a=1),
    "int64": np.arange(6).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian": np.arange(4, dtype=">i4"),
    "bool": np.array([True, False]),
    "text": np.array(["ab", "c"]),
    "empty": np.zeros((0, 3), np.float16),
    "scalar": np.float32(0.5),
    "objects": np.array([{"a": 1}, None, [1, 2], "x"], object),
    "nested": np.array([np.arange(2), np.arange(3)], object),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", VALUES)
def test_honest_values_come_out_as_they_went_in(tmp_path: Path, name: str, protocol: int) -> None:
    value = VALUES[name]
    same(load_pickle(tmp_path / "a", pickle.dumps(value, protocol)), value)
    path = tmp_path / "a.pt"
    torch.save({"x": value}, path, pickle_protocol=protocol)
    same(load_torch(path, read_whole(path))["x"], value)


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        native = expected.dtype.newbyteorder("=")  # numpy itself turns the bytes of some
        assert (found.shape, found.dtype.newbyteorder("=")) == (expected.shape, native)
        for one, other in zip(found.ravel().tolist(), expected.ravel().tolist(), strict=True):
            assert np.array_equal(one, other) if isinstance(other, np.ndarray) else one == other
    else:
        assert found == expected


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64"]
)
def test_tensors_are_read_without_torch(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    whole = (torch.arange(12) % 2).to(kind) if dtype == "bool" else (torch.arange(12) / 4).to(kind)
    saved = {"whole": whole.reshape(3, 4), "turned": whole.reshape(3, 4).t(), "part": whole[3:7]}
    path = tmp_path / "a.pt"
    torch.save(saved, path)
    for name, found in load_torch(path, read_whole(path)).items():
        wanted = saved[name].float() if dtype == "bfloat16" else saved[name]
        np.testing.assert_array_equal(found, wanted.numpy())


def test_the_old_form_of_torch_is_told(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ImportFormatError, match="not a torch archive"):
        load_torch(tmp_path / "a.pt", read_whole(tmp_path / "a.pt"))


@pytest.mark.parametrize("make", [lambda d: d[: len(d) // 2], lambda d: d[:40], lambda d: d[:-30]])
def test_a_damaged_archive_is_named(tmp_path: Path, make: Callable[[bytes], bytes]) -> None:
    torch.save({"rollout_id": 1, "samples": []}, tmp_path / "a.pt")
    path = write(tmp_path / "b.pt", make((tmp_path / "a.pt").read_bytes()))
    with pytest.raises(ImportFormatError, match=r"b\.pt"):
        list(open_importer("slime")(path, ImportOptions()))
    with pytest.raises(ImportFormatError, match=r"b\.pt"):
        detect(path)


def repeating() -> dict[str, bytes]:
    """Pickles of some KB that have 200 copies made of one value of 1,000 bytes, by a way each."""
    long, numbers = "x" * 1000, np.arange(250, dtype=np.float32)
    make, args, state = numbers.__reduce__()  # type: ignore[misc]  # of three parts, numpy says
    items = tuple(range(15))
    pairs = [(n, None) for n in items]
    blank = np.zeros(8, np.int64)
    leaf = ("torch.float32", (250,), 0, 1000)
    whole = np.zeros(1000, np.uint8)
    return {
        "text to bytes": pickle.dumps([Reduces(_codecs.encode, (long, "latin1")) for _ in range(200)]),
        "state of an array": pickle.dumps([Reduces(make, args, state) for _ in range(200)]),
        "tuples": pickle.dumps([Reduces(torch.Size, (items,)) for _ in range(200)]),
        "sets": pickle.dumps([Reduces(set, (items,)) for _ in range(200)], 2),
        "dicts": pickle.dumps([Reduces(OrderedDict, (pairs,)) for _ in range(200)]),
        "rows of a jagged tensor": pickle.dumps(
            [
                Reduces(
                    torch.nested._internal.nested_tensor._rebuild_njt, ({"values": blank, "offsets": blank},)
                )
                for _ in range(200)
            ]
        ),
        "leaves of one storage": _consolidated({"leaves": {f"k{n}": leaf for n in range(200)}}, whole),
    }


def _consolidated(metadata: Any, storage: Any) -> bytes:
    """As tensordict pickles it, which need not be installed."""
    inner = pickle.dumps((metadata, storage), 2)[2:-1]
    return raw(b"ctensordict._reductions\n_rebuild_tensordict_files_consolidated\n", inner, b"R")


@pytest.mark.parametrize("way", repeating())
def test_copies_of_one_value_are_counted_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    data = repeating()[way]
    assert len(data) < 20_000
    load_pickle(tmp_path / "a.pkl", data)  # 200 KB are allowed to any file
    monkeypatch.setattr(rebuilt, "_FREE", 100_000)
    monkeypatch.setattr(rebuilt, "_TIMES", 0)
    with pytest.raises(ImportFormatError, match="it makes many times its own size"):
        load_pickle(tmp_path / "a.pkl", data)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_honest_pickle_makes_no_more_than_a_few_times_its_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protocol: int
) -> None:
    monkeypatch.setattr(rebuilt, "_FREE", 0)
    held = {str(n): np.arange(n, n + 1000) for n in range(20)} | {"o": OrderedDict(a=[1] * 300)}
    read = load_pickle(tmp_path / "a.pkl", pickle.dumps(held, protocol))
    assert all(np.array_equal(read[str(n)], held[str(n)]) for n in range(20))
    path = tmp_path / "a.pt"
    torch.save({"a": torch.zeros(1000, dtype=torch.bfloat16), "b": torch.ones(1000)}, path)
    assert load_torch(path, read_whole(path))["b"].sum() == 1000


def test_metadata_that_repeats_a_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.importers.rows._MAX_TEXT", 10_000)
    monkeypatch.setattr("trajstore.importers.rows._MAX_VALUES", 1000)
    for value in ("x" * 1000, b"x" * 1000):
        assert len(plain([value] * 10)) == 10
        with pytest.raises(ValueError, match="more than 10,000 characters of text"):
            plain([value] * 11)
    with pytest.raises(ValueError, match="more than 1,000 values"):
        plain([np.arange(100)] * 10)
