"""SQL over stores and scans: right about NaN, and confined to the rows."""

import math
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from trajstore import CorruptFileError, PolicyVersion, QueryError, Trajectory, TrajectoryStore
from trajstore.query import connect, fresh, stratified_sample
from trajstore.query.sql import VIEWS
from trajstore.schema import Column

REWARDS = [1.0, 2.0, math.nan, 3.0, 6.0, 7.0, -0.0, math.inf, -math.inf]


def rows() -> list[Trajectory]:
    return [
        Trajectory(
            id=f"r{i}",
            prompt_tokens=[1, 2],
            response_tokens=[3] * (i + 1),
            reward=reward,
            version=PolicyVersion(i) if i % 4 else None,
        )
        for i, reward in enumerate(REWARDS)
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryStore:
    store = TrajectoryStore.create(tmp_path_factory.mktemp("sql") / "store")
    store.append(rows()[:5])
    store.append(rows()[5:])
    return store


def ids(source: Any, condition: str, **options: Any) -> list[str]:
    with connect(source, **options) as connection:
        table = connection.sql(f"select id from trajectories where {condition} order by id")
    return table.column("id").to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped


# Sources


def test_a_store_a_snapshot_and_a_scan(store: TrajectoryStore) -> None:
    count = "select count(*) as n, sum(length) as tokens from trajectories"
    assert connect(store).sql(count).to_pylist() == [{"n": 9, "tokens": 63}]
    assert connect(store.at(1)).sql(count).to_pylist() == [{"n": 5, "tokens": 25}]
    assert connect(store.at(0)).sql("select count(*) as n from trajectories").to_pylist() == [{"n": 0}]
    assert connect(store.at(1)).snapshot == 1
    scan = store.scan(where=fresh(at=9, max_staleness=4))
    assert ids(scan, "true") == ["r5", "r6", "r7"]
    assert ids(stratified_sample(store.scan(), 100, at=3), "true") == [f"r{i}" for i in range(9)]


def test_a_connection_stays_at_its_snapshot(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    store.append(rows()[:2])
    connection = connect(store)
    store.append(rows()[2:4])
    assert connection.sql("select count(*) as n from trajectories").to_pylist() == [{"n": 2}]
    assert connect(store).sql("select count(*) as n from trajectories").to_pylist() == [{"n": 4}]


def test_version_gap(store: TrajectoryStore) -> None:
    gaps = "select version_gap from trajectories order by version_gap nulls last"
    expected = [5 - i for i in reversed(range(9)) if i % 4] + [None] * 3
    for version in (5, PolicyVersion(5)):
        for source in (store, store.scan("true")):
            table = connect(source, current_version=version).sql(gaps)
            assert table.schema.field("version_gap").type == pa.int64()
            assert table.column("version_gap").to_pylist() == expected
    assert connect(store).sql(gaps).column("version_gap").null_count == 9
    assert connect(store, current_version=-1).sql(gaps).column("version_gap").to_pylist()[0] == -8


def test_a_scan_of_chosen_columns_still_has_its_version_gap(store: TrajectoryStore) -> None:
    for scan in (store.scan(columns=["id", "reward"]), store.scan("length > 3").columns(["id", "reward"])):
        with connect(scan, current_version=5) as connection:
            table = connection.sql("select * from trajectories")
            assert table.schema.names == ["id", "reward", "oldest_version_id", "version_gap"]
            with pytest.raises(QueryError, match="length"):
                connection.sql("select length from trajectories")


def test_list_columns_unnest(store: TrajectoryStore) -> None:
    query = "select sum(t) as total from (select unnest(tokens) as t from trajectories where id = 'r3')"
    assert connect(store).sql(query).to_pylist() == [{"total": 15}]


def test_a_data_file_that_went_away_is_named(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "store")
    store.append(rows()[:2])
    connection = connect(store)
    (path,) = map(Path, store.scan().data_files())
    path.unlink()
    with pytest.raises(CorruptFileError, match=path.name):
        connect(store)
    with pytest.raises(CorruptFileError, match=path.name):
        connection.sql("select sum(reward) from trajectories")
    with pytest.raises(QueryError, match=path.name):
        connection.sql("select tokens from trajectories")


# NaN


CONDITIONS = [
    "reward > 5",
    "reward < 5",
    "reward >= 6",
    "reward <= 2",
    "5 < reward",
    "reward <> 3",
    "reward between 2 and 100",
    "reward in (1, 3)",
    "not (reward > 5)",
    "not (reward <= 5)",
    "reward > 5 and length > 6",
    "reward > 5 or reward < 2",
    "reward is not null",
    "reward > 5 and version_id is not null",
]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_polars_and_duckdb_agree_that_nan_is_above_every_number(
    store: TrajectoryStore, condition: str
) -> None:
    """By the text in a scan, and by SQL over the files and over rows in memory."""
    expected = sorted(store.scan(where=condition).to_polars()["id"])
    assert ids(store, condition) == ids(store.scan("true"), condition) == expected


def test_nan_is_above_every_number(store: TrajectoryStore) -> None:
    assert ids(store, "reward > 5") == ["r2", "r4", "r5", "r7"]
    assert ids(store, "reward < 5") == ["r0", "r1", "r3", "r6", "r8"]


@pytest.mark.parametrize("narrowed", [False, True])
def test_nan_is_found_and_left_out(store: TrajectoryStore, narrowed: bool) -> None:
    source = store.scan("true") if narrowed else store
    assert ids(source, "isnan(reward)") == ["r2"]
    assert ids(source, "not isnan(reward)") == ["r0", "r1", "r3", "r4", "r5", "r6", "r7", "r8"]
    assert ids(source, "not isfinite(reward)") == ["r2", "r7", "r8"]
    assert ids(source, "reward = 'nan'") == ["r2"]
    (found,) = connect(source).sql(
        "select count(*) filter (isnan(reward)) as nans, max(reward) as high, min(reward) as low,"
        " max(reward) filter (isfinite(reward)) as finite_high, count(reward) as n from trajectories"
    ).to_pylist()  # fmt: skip
    assert math.isnan(found.pop("high"))
    assert found == {"nans": 1, "low": -math.inf, "finite_high": 7.0, "n": 9}


def test_nan_is_found_in_the_files_by_a_duckdb_of_ones_own(store: TrajectoryStore) -> None:
    """Statistics of float columns leave NaN out, and DuckDB prunes by them: our files have none."""
    with duckdb.connect() as own:
        for condition in ("isnan(reward)", "not isnan(reward)", "reward > 5", "reward < 5"):
            query = f"select id from read_parquet(?) where {condition} order by id"
            found = [id for (id,) in own.execute(query, [store.scan().data_files()]).fetchall()]
            assert found == ids(store, condition)


# Asking


def test_parameters(store: TrajectoryStore) -> None:
    connection = connect(store)
    query = "select count(*) as n from trajectories where reward > ? and id <> ?"
    assert connection.sql(query, [5, "r4"]).to_pylist() == [{"n": 3}]
    query = "select id from trajectories where id = $id"
    assert connection.sql(query, {"id": "r4"}).to_pylist() == [{"id": "r4"}]
    assert connection.sql(query, {"id": "x' or true --"}).to_pylist() == []
    with pytest.raises(QueryError):
        connection.sql(query)


@pytest.mark.parametrize(
    "query",
    [
        "from trajectories select id limit 1",
        "with t as (select * from trajectories) select count(*) from t",
        "pivot (select status, length from trajectories) on status using count(*)",
        "describe trajectories",
        "summarize select reward from trajectories",
        "explain select * from trajectories",
        "EXPLAIN ANALYZE select * from trajectories",
        "explain (format json) select 1",
        "select 1; -- and a comment",
        "-- a comment first\nselect 1",
        "values (1), (2)",
    ],
)
def test_queries_of_every_form(store: TrajectoryStore, query: str) -> None:
    assert connect(store).sql(query).num_rows > 0


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("selec", "syntax error"),
        ("", "found 0 statements, expected one query"),
        ("select 1; select 2", "found 2 statements, expected one query"),
        ("select * from nope", "nope does not exist!\n  hint: "),
        ("select nope from trajectories", "nope"),
        ("select id + 1 from trajectories", "Could not convert|No function matches|Conversion Error"),
        ("select error('mine')", "mine"),
        ("from secrets", "secrets does not exist!\n  hint: views: trajectories, tokens"),
        ("update extensions", "found a statement that is no query\n  hint: SQL here reads"),
    ],
)
def test_what_is_wrong_is_said(store: TrajectoryStore, query: str, message: str) -> None:
    connection = connect(store)
    with pytest.raises(QueryError, match=message):
        connection.sql(query)
    assert connection.sql("select 1 as one").to_pylist() == [{"one": 1}]


def test_the_views_can_be_listed(store: TrajectoryStore) -> None:
    for query in ("show tables", " SHOW  ALL tables ;"):
        assert connect(store).sql(query)["name"].to_pylist() == list(VIEWS)
    narrow = connect(store.scan(columns=["id", "reward"]))
    assert narrow.sql("show tables")["name"].to_pylist() == ["trajectories", "batches"]
    for view in VIEWS:
        assert connect(store).sql(f"describe {view}").num_rows > 5


def test_a_query_while_the_result_of_another_is_alive(store: TrajectoryStore) -> None:
    connection = connect(store)
    first = connection.sql("select id from trajectories order by id")
    second = connection.sql("select id from trajectories order by id desc")
    assert first.column("id").to_pylist() == second.column("id").to_pylist()[::-1]
    connection.close()
    assert first.num_rows == 9


@pytest.mark.parametrize("narrowed", [False, True])
def test_cursors_work_in_other_threads_at_once(store: TrajectoryStore, narrowed: bool) -> None:
    connection = connect(store.scan("length > 4") if narrowed else store, current_version=9)
    query = "select count(*) as n, max(version_gap) as gap, sum(length) as tokens from trajectories"
    expected = connection.sql(query).to_pylist()
    found: list[Any] = []

    def ask() -> None:
        with connection.cursor() as cursor:
            found.append([cursor.sql(query).to_pylist() for _ in range(3)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected] * 3] * 4


# Trusted


def test_a_trusted_connection_is_duckdb_as_it_is(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "a b's store")
    store.append(rows()[:5])
    store.maintenance.add_column(Column("entropy", pa.float64()))
    store = TrajectoryStore.open(store.path)
    store.append(rows()[5:])
    for source in (store, store.at(1), store.scan("length > 4"), store.scan(columns=["id", "reward"])):
        trusted = connect(source, current_version=9, trusted=True)
        query = "select * exclude (reward), reward::text as reward from trajectories order by id"
        assert trusted.sql(query).to_pylist() == connect(source, current_version=9).sql(query).to_pylist()
    trusted = connect(store, current_version=9, trusted=True)
    assert trusted.sql("select count(*) as n from tokens").to_pylist() == [{"n": 63}]
    assert "READ_PARQUET" in str(trusted.sql("explain select sum(length) from trajectories").to_pylist())
    out = tmp_path / "out.parquet"
    trusted.sql(f"create table long as from trajectories where length > 4; copy long to '{out}'")
    with trusted.cursor() as cursor:  # it sees the views again, and the same tables
        both = "select (select count(*) from long) as made, (select count(*) from groups) as groups"
        assert cursor.sql(both).to_pylist() == [{"made": 7, "groups": 0}]
        assert cursor.sql(f"select count(*) as n from '{out}'").to_pylist() == [{"n": 7}]
    with pytest.raises(QueryError, match="nope"):
        trusted.sql("select nope from trajectories")


def test_a_name_of_a_file_is_never_a_pattern(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "run[1]*")
    store.append(rows())
    query = "select count(*) as n from trajectories"
    assert connect(store, trusted=True).sql(query).to_pylist() == [{"n": 9}]


# Confinement


def everything(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


FORBIDDEN = [
    "copy (select 1) to '{store}/evil.parquet'",
    "copy (select 1) to '{store}/_delta_log/00000000000000000009.json'",
    "copy trajectories to '{out}/evil.csv'",
    "copy (select 1) to 'evil.csv'",
    "explain analyze copy (select 1) to '{out}/evil.csv'",
    "create table t (a int); copy t from '{secret}'",
    "copy stored from '{secret}'",
    "export database '{out}/database'",
    "import database '{out}'",
    "select * from read_text('{secret}')",
    "select * from read_blob('{secret}')",
    "select * from read_csv('{secret}')",
    "select * from read_json('{secret}')",
    "select * from '{secret}'",
    "select * from read_parquet('{file}')",
    "select * from '{file}'",
    "select * from parquet_metadata('{file}')",
    "select * from glob('{out}/*')",
    "select * from sniff_csv('{secret}')",
    "select * from query('select * from read_text(''{secret}'')')",
    "select * from query_table('{secret}')",
    "attach '{out}/other.db' as other",
    "attach ':memory:' as other",
    "install httpfs",
    "load httpfs",
    "set threads = 1",
    "set enable_external_access = true",
    "set lock_configuration = false",
    "set temp_directory = '{out}'",
    "set python_enable_replacements = true",
    "reset enable_external_access",
    "pragma database_size",
    "pragma enable_profiling = 'json'",
    "pragma profiling_output = '{out}/profile.json'",
    "call enable_logging('QueryLog', storage = 'file', storage_path = '{out}')",
    "select * from enable_logging('QueryLog', storage = 'file', storage_path = '{out}')",
    "create persistent secret s (type s3)",
    "create table t as select 1",
    "create macro f(x) as x",
    "create or replace temp view trajectories as select 1",
    "drop view trajectories",
    "explain analyze drop view trajectories",
    "delete from stored",
    "insert into stored values (1)",
    "update stored set reward = 0",
    "checkpoint",
    "begin",
    "use memory",
    "prepare p as select 1",
]


@pytest.mark.parametrize("query", FORBIDDEN)
def test_a_query_reads_nothing_else_and_writes_nowhere(
    store: TrajectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    secret, out, home = tmp_path / "secret.csv", tmp_path / "out", tmp_path / "home"
    secret.write_text("a,b\n1,2\n")
    out.mkdir()
    home.mkdir()
    monkeypatch.chdir(out)
    monkeypatch.setenv("HOME", str(home))
    before = everything(store.path, tmp_path)
    file = store.scan().data_files()[0]
    text = query.format(store=store.path, out=out, secret=secret, file=file)
    with connect(store.scan("true") if text.startswith("copy") else store) as connection:
        with pytest.raises(QueryError):
            connection.sql(text)
        assert connection.sql("select count(*) as n from trajectories").to_pylist() == [{"n": 9}]
    assert everything(store.path, tmp_path) == before


def test_a_python_variable_is_no_table(store: TrajectoryStore) -> None:
    secret_table = pa.table({"password": ["hunter2"]})
    assert secret_table.num_rows == 1
    for query in ("select * from secret_table", "select * from REWARDS"):
        with pytest.raises(QueryError, match="does not exist"):
            connect(store).sql(query)


def test_a_sort_that_does_not_fit_leaves_no_rows_behind(store: TrajectoryStore) -> None:
    (found,) = connect(store).sql("select current_setting('temp_directory') as folder").to_pylist()
    assert found == {"folder": ""}
