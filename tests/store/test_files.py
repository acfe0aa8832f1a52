"""Encodings, statistics and digests, read back from the files' own metadata."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trajstore import CorruptFileError, PolicyVersion, Trajectory, TrajectoryStore, VersionSegment
from trajstore.schema import SCHEMA, TOKEN_FLOATS, list_of
from trajstore.store import Place, files


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = TrajectoryStore.create(tmp_path_factory.mktemp("files") / "store")
    rng = np.random.default_rng(0)
    rows = []
    for i in range(2500):
        tokens = rng.integers(0, 50_000, 20)
        rows.append(
            Trajectory(
                id=f"{i}", group_id=f"g{i // 8}", tokens=tokens, prompt_length=5, response_length=15,
                loss_mask=[0] * 5 + [1] * 15, action_mask=[0] * 5 + [1] * 15, attention_mask=[1] * 20,
                log_probs=rng.standard_normal(20), behavior_log_probs=rng.standard_normal(20),
                token_rewards=rng.standard_normal(20), values=rng.standard_normal(20),
                advantages=rng.standard_normal(20), returns=rng.standard_normal(20),
                prompt_tokens=[7, 8], response_tokens=[i, i + 9],
                reward=float(i % 3), version=PolicyVersion(i % 50),
                version_segments=[VersionSegment(5, 20, PolicyVersion(i % 50, 1.5, 2))],
            )
        )  # fmt: skip
    store.append(rows)
    return next(store.path.glob("part-*.parquet"))


def column(metadata: pq.FileMetaData, name: str) -> pq.ColumnChunkMetaData:
    group = metadata.row_group(0)
    return next(group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema == name)


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("tokens.list.element", "PLAIN"),
        ("prompt_tokens.list.element", "PLAIN"),
        ("response_tokens.list.element", "PLAIN"),
        ("loss_mask.list.element", "RLE_DICTIONARY"),
        ("action_mask.list.element", "RLE_DICTIONARY"),
        ("attention_mask.list.element", "RLE_DICTIONARY"),
        *[(f"{name}.list.element", "BYTE_STREAM_SPLIT") for name in TOKEN_FLOATS],
        ("version_segments.list.element.version_id", "RLE_DICTIONARY"),
        ("version_segments.list.element.timestamp", "BYTE_STREAM_SPLIT"),
        ("group_id", "RLE_DICTIONARY"),
        ("status", "RLE_DICTIONARY"),
        ("version_id", "RLE_DICTIONARY"),
    ],
)
def test_encodings_are_in_the_file(path: Path, name: str, encoding: str) -> None:
    found = column(pq.read_metadata(path), name).encodings
    assert encoding in found
    if encoding != "RLE_DICTIONARY":
        assert "RLE_DICTIONARY" not in found


def encoding_of(values: list[list[float]], folder: Path) -> str:
    store = TrajectoryStore.create(folder)
    store.append([Trajectory(tokens=[1] * len(v), prompt_length=0, advantages=v) for v in values])
    (file,) = folder.glob("part-*.parquet")
    found = column(pq.read_metadata(file), "advantages.list.element").encodings
    assert store.scan(columns=["advantages"]).to_arrow()["advantages"].to_pylist() == values
    return "RLE_DICTIONARY" if "RLE_DICTIONARY" in found else "BYTE_STREAM_SPLIT"


RNG = np.random.default_rng(3)
ONE_A_ROW = [[float(x)] * 40 for x in RNG.standard_normal(30).astype(np.float32)]
ONE_A_TOKEN = RNG.standard_normal((30, 40)).astype(np.float32).tolist()
OFF_THE_MASK = [[0.0] * 37 + row[:3] for row in ONE_A_TOKEN]


@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        (ONE_A_ROW, "RLE_DICTIONARY"),
        ([[0.0] * 20 + row[20:] for row in ONE_A_ROW], "RLE_DICTIONARY"),
        ([[0.0] * 40] * 30, "RLE_DICTIONARY"),
        (ONE_A_TOKEN, "BYTE_STREAM_SPLIT"),
        (OFF_THE_MASK, "BYTE_STREAM_SPLIT"),
    ],
)
def test_a_dictionary_where_values_repeat_the_one_before(
    values: list[list[float]], encoding: str, tmp_path: Path
) -> None:
    assert encoding_of(values, tmp_path / "a") == encoding


@pytest.mark.parametrize(
    ("values", "expected"),
    [([[float("nan")] * 40, None], True), ([[], None], False), ([[1.0], [2.0], [3.0]], False)],
)
def test_runs_of_nan_nothing_and_single_values(values: list[list[float] | None], expected: bool) -> None:
    batch = pa.record_batch({"advantages": pa.array(values, list_of(pa.float32()))})
    assert ("advantages" in files.runs(batch)) == expected


def test_the_first_rows_of_a_file_choose_for_all_of_it(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("advantages", list_of(pa.float32()))])
    for first, then, chosen in (
        (ONE_A_ROW, ONE_A_TOKEN, "RLE_DICTIONARY"),
        (ONE_A_TOKEN, ONE_A_ROW, "BYTE_STREAM_SPLIT"),
    ):
        place = Place.of(tmp_path)
        with files.FileWriter(place, schema) as writer:
            for values, times in ((first, files.GATHER_ROWS // 30 + 1), (then, 1)):
                writer.write(pa.record_batch([pa.array(values * times, schema.field(0).type)], schema))
            made = writer.close()
        metadata = pq.read_metadata(tmp_path / made.name)
        last = metadata.row_group(metadata.num_row_groups - 1).column(0)
        assert chosen in last.encodings
        assert files.read(place, made, schema)["advantages"].to_pylist()[-30:] == then


def test_a_file_without_rows_is_a_file(tmp_path: Path) -> None:
    with files.FileWriter(Place.of(tmp_path), SCHEMA) as writer:
        made = writer.close()
    assert files.read(Place.of(tmp_path), made, SCHEMA).num_rows == 0
    with pytest.raises(ZeroDivisionError), files.FileWriter(Place.of(tmp_path), SCHEMA):
        _ = 1 / 0
    assert [p.name for p in tmp_path.iterdir()] == [made.name]


def test_rows_out_of_order_are_sorted_and_unknown_versions_come_last(tmp_path: Path) -> None:
    schema = pa.schema([("oldest_version_id", pa.int64()), ("x", pa.int64())])
    for versions in ([1, 1, 2, None], [3, None, 1, 2], [None, None, 0, 0], [2, 2, 1, 1]):
        with files.FileWriter(Place.of(tmp_path), schema) as writer:
            writer.write(pa.record_batch([pa.array(versions, pa.int64()), pa.array(range(4))], schema))
            made = writer.close()
        found = files.read(Place.of(tmp_path), made, schema).to_pydict()
        order = sorted(range(4), key=lambda i: (versions[i] is None, versions[i], i))
        assert found == {"oldest_version_id": [versions[i] for i in order], "x": order}


def test_every_column_is_zstd_and_row_groups_are_small(path: Path) -> None:
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [1024, 1024, 452]
    group = metadata.row_group(0)
    assert {group.column(i).compression for i in range(group.num_columns)} == {"ZSTD"}


def test_statistics_cover_integers_and_short_text_and_never_floats(path: Path) -> None:
    group = pq.read_metadata(path).row_group(0)
    kept = {group.column(i).path_in_schema for i in range(group.num_columns) if group.column(i).is_stats_set}
    integers = {f.name for f in SCHEMA if str(f.type) in ("int32", "int64")}
    assert kept == integers | {"group_id", "status", "version_known", "writer_id"}


def test_versions_ascend_so_that_row_groups_can_be_skipped(path: Path) -> None:
    metadata = pq.read_metadata(path)
    ends = []
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        stats = next(
            group.column(k).statistics
            for k in range(group.num_columns)
            if group.column(k).path_in_schema == "oldest_version_id"
        )
        ends += [stats.min, stats.max]
    assert ends == sorted(ends)


def test_list_elements_are_not_null_and_roles_travel(path: Path) -> None:
    schema = pq.read_schema(path)
    assert schema.equals(SCHEMA, check_metadata=True)
    assert not schema.field("tokens").type.value_field.nullable
    assert schema.field("loss_mask").metadata[b"trajstore.role"] == b"token"


def test_the_name_holds_the_digest_of_the_bytes(path: Path) -> None:
    digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    assert path.stem.split("-")[-1] == digest


def test_log_statistics_are_those_of_the_rows(path: Path) -> None:
    store = TrajectoryStore.open(path.parent)
    (file,) = store._table.files()
    assert (file.rows, file.bytes) == (2500, path.stat().st_size)
    assert (file.low["version_id"], file.high["version_id"]) == (0, 49)
    assert (file.low["length"], file.high["length"]) == (20, 20)
    assert file.nulls["group_size"] == 2500
    assert "group_size" not in file.low


def test_a_damaged_or_missing_file_is_named(path: Path, tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    store.append([Trajectory(id="a", tokens=[1, 2])])
    (file,) = store.path.glob("part-*")
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptFileError, match=file.name):
        store.scan().to_arrow()
    file.unlink()
    with pytest.raises(CorruptFileError, match=file.name):
        store.scan().to_arrow()


def test_reading_rows_equals_reading_all_and_taking(path: Path) -> None:
    store = TrajectoryStore.open(path.parent)
    (file,) = store._table.files()
    whole = files.read(Place.of(path.parent), file, SCHEMA)
    rows = np.array([0, 3, 1023, 1024, 1025, 2047, 2499])
    assert files.read(Place.of(path.parent), file, SCHEMA, rows).equals(whole.take(rows))
    assert files.read(Place.of(path.parent), file, SCHEMA, rows[:0]).num_rows == 0


def test_column_bytes_add_up_to_most_of_the_file(path: Path) -> None:
    sizes = TrajectoryStore.open(path.parent).column_bytes()
    assert set(sizes) == set(SCHEMA.names)
    assert 0.8 * path.stat().st_size < sum(sizes.values()) < path.stat().st_size
