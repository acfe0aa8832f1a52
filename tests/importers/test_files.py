"""Owns the tests of finding and opening the files of an import."""

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pytest

from trajstore.errors import ImportFormatError
from trajstore.importers import ImportOptions, beside, detect, files, open_importer
from trajstore.importers.files import SourceFile, opened, sources
from trajstore.importers.records import read_records

FIXTURES = Path(__file__).parents[1] / "formats"


def names(given: str | Path) -> list[str]:
    """What would be imported."""
    with sources(given) as found:
        left = beside(found)
        return [file.name for file in found if file.path not in left]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "run/1.jsonl",
        "run/2.jsonl",
        "run/deep/3.jsonl",
        "run/.hidden/4.jsonl",
        "run/.5",
        "other/6.jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"id": "x"}\n')
    (tmp_path / "run" / "STABLE").touch()
    return tmp_path


def test_a_folder_gives_all_below_it_but_hidden_and_empty_files(tree: Path) -> None:
    assert names(tree / "run") == ["1.jsonl", "2.jsonl", "deep/3.jsonl"]
    with sources(tree / "run") as found:
        assert beside(found) == {tree / "run" / "STABLE": "is empty"}


def test_globs(tree: Path) -> None:
    assert names(f"{tree}/run/*.jsonl") == ["1.jsonl", "2.jsonl"]
    assert names(f"{tree}/**/*.jsonl") == ["other/6.jsonl", "run/1.jsonl", "run/2.jsonl", "run/deep/3.jsonl"]
    assert names(f"{tree}/r?n") == ["run/1.jsonl", "run/2.jsonl", "run/deep/3.jsonl"]
    with pytest.raises(ImportFormatError, match="no file to import in it"):
        names(f"{tree}/*.parquet")


def test_a_name_with_brackets_is_a_name_first(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text("{}")
    assert names(tmp_path / "a[1].jsonl") == ["a[1].jsonl"]


def test_links_out_of_a_folder_are_not_followed(tree: Path) -> None:
    (tree / "run" / "out.jsonl").symlink_to(tree / "other" / "6.jsonl")
    (tree / "run" / "loop").symlink_to(tree / "run")
    assert names(tree / "run") == ["1.jsonl", "2.jsonl", "deep/3.jsonl"]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ImportFormatError, match="no such file"):
        names(tmp_path / "gone")
    with pytest.raises(ImportFormatError, match="no file to import"):
        names(tmp_path)


def test_stdin_is_read_twice_from_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b'{"id": "a"}\n')

    monkeypatch.setattr("sys.stdin", Stdin)
    with sources("-") as (file,):
        assert file.name == "stdin"
        assert detect(file.path).format == "trajstore-jsonl"
        assert [r.data for r in read_records(file.path)] == [{"id": "a"}]
    assert not file.path.exists()


def packed(data: bytes, how: str) -> bytes:
    return gzip.compress(data) if how == "gz" else pa.Codec("zstd").compress(data, asbytes=True)


@pytest.mark.parametrize("how", ["gz", "zst"])
@pytest.mark.parametrize(
    "name",
    [
        "verl/rollout_data_dir/8.jsonl",
        "slime/rollout_data/8.pt",
        "verl/skip/exp_proj/GBS2_N2_in6_out11/9/gen_batch.dp",
        "trl/completions/completions_00008.parquet",
        "prime_rl/rollouts/step_8/rank_0.bin",
        "atif/trial_2/agent/trajectory.json",
    ],
)
def test_packed_files_read_like_plain_ones(tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / f"{Path(name).name}.{how}"
    path.write_bytes(packed((FIXTURES / name).read_bytes(), how))
    assert detect(path).format == detect(FIXTURES / name).format
    read = open_importer("auto")
    lone = tmp_path / Path(name).name  # away from what is joined to it
    lone.write_bytes((FIXTURES / name).read_bytes())
    for one, other in zip(read(path, ImportOptions()), read(lone, ImportOptions()), strict=True):
        assert list(one.trajectory.tokens) == list(other.trajectory.tokens)
        assert one.trajectory.response == other.trajectory.response


@pytest.mark.parametrize("how", ["gz", "zst"])
def test_damaged_packing_is_named(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.jsonl"
    lines = b"".join(json.dumps({"id": str(i), "x": str(hash(str(i)))}).encode() + b"\n" for i in range(9000))
    path.write_bytes(packed(lines, how)[:-300])
    with pytest.raises(ImportFormatError, match=r"a\.jsonl: .*(damaged|cannot be read)"):
        list(read_records(path))


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajstore.importers.records.MAX_LINE", 1000)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"b": "' + b"x" * 1_000_000))
    with pytest.raises(ImportFormatError, match=r"gz:2: a line of more than 1,000 bytes"):
        list(read_records(path))


def test_an_array_that_unpacks_too_far_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 10_000)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b"[\n" + b" " * 100_000 + b"1]"))
    with opened(path), pytest.raises(ImportFormatError, match="more than 10,000 bytes"):
        list(read_records(path))


def test_companions_are_not_imported_twice() -> None:
    with sources(FIXTURES / "miles") as found:
        left = {path.relative_to(FIXTURES / "miles").as_posix(): why for path, why in beside(found).items()}
    assert left == {
        "train_data/8_0.pt": "joined into the rollouts it belongs to",
        "dashboard_columns/rollout_8.parquet": "its samples are in rollout_data/",
        "trajectory/8.jsonl": "its samples are in rollout_data/",
    }
    alone = [SourceFile(FIXTURES / "miles/dashboard_columns/rollout_8.parquet", "rollout_8.parquet")]
    assert beside(alone) == {}
    with sources(FIXTURES / "prime_rl") as found:
        assert "its episodes are in all/" in beside(found).values()
