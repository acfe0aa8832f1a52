"""`trajstore fsck` on a store whose log has a torn end, as a power cut leaves it."""

from pathlib import Path

from tests.cli.conftest import Run
from trajstore import Trajectory, TrajectoryStore
from trajstore.store.place import entry


def test_a_torn_log_is_named_and_repaired(trajstore: Run, tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "s")
    for name in "ab":
        store.append([Trajectory(id=name, tokens=[1])])
    newest = store.path / entry(2)
    newest.write_bytes(newest.read_bytes()[:500])

    def run(verb: str, *words: str) -> tuple[int, str]:
        code, out, err = trajstore(verb, str(store.path), *words)
        return code, out + err

    code, said = run("info")
    assert code == 1
    assert "trajstore fsck" in said
    code, said = run("fsck", "--json")
    assert code == 1
    assert "its end is missing" in said
    assert run("fsck", "--repair")[0] == 0
    assert run("fsck")[0] == 0
    assert run("info")[0] == 0
    assert TrajectoryStore.open(store.path).count() == 1
