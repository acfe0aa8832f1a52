"""Owns the shell verbs that look after a store: history, tags, fsck, compact, delete, vacuum, restore."""

from __future__ import annotations

from trajstore.cli import show
from trajstore.cli.options import reference
from trajstore.errors import QueryError
from trajstore.store import Place, TrajectoryStore
from trajstore.store.maintenance import Maintenance

SHOWN_FILES = 10


def history(store: str, *, json: bool) -> None:
    """`trajstore history`."""
    opened = TrajectoryStore.open(store)
    names: dict[int, list[str]] = {}
    for name, snapshot in opened.tags().items():
        names.setdefault(snapshot, []).append(name)
    rows = [vars(s) | {"tags": ", ".join(names.get(s.snapshot, []))} for s in opened.history()]
    if json:
        show.as_json(rows)
        return
    for row in rows:
        row["timestamp"] = row["timestamp"].isoformat(sep=" ", timespec="seconds")
    show.table(rows)


def tag(store: str, name: str | None, *, snapshot: int | None, json: bool) -> None:
    """`trajstore tag`: names a snapshot, or lists the names there are."""
    opened = TrajectoryStore.open(store)
    if name is not None:
        opened.tag(name, snapshot)
    known = opened.tags()
    if json:
        show.as_json(known)
    else:
        show.table(
            [{"tag": n, "snapshot": s} for n, s in known.items() if name in (None, n)],
            columns=["tag", "snapshot"],
        )


def fsck(store: str, *, repair: bool, json: bool) -> bool:
    """`trajstore fsck`; returns whether no row is lost or wrong."""
    found = Maintenance(Place.of(store)).fsck(repair=repair)  # a store with a torn log does not open
    if json:
        show.as_json([vars(f) for f in found])
    elif not found:
        show.console().print(f"{store}: every file and every row is as it should be", markup=False)
    else:
        rows = [vars(f) | {"repaired": "yes" if f.repaired else ""} for f in found]
        show.table(rows)
    return all(f.level != "error" or f.repaired for f in found)


def compact(store: str, *, json: bool) -> None:
    """`trajstore compact`."""
    done = TrajectoryStore.open(store).maintenance.compact()
    _say(done, f"joined {done.files_removed} files into {done.files_added}", json=json)


def delete(store: str, *, where: str | None, at: int | None, max_staleness: int | None, json: bool) -> None:
    """`trajstore delete`: by a predicate, or by staleness."""
    maintenance = TrajectoryStore.open(store).maintenance
    if (where is None) == (max_staleness is None):
        raise QueryError(
            "say which rows go", hint="--where SQL, or --max-staleness K with --at V; one of the two"
        )
    if where is not None:
        done = maintenance.delete(where)
    elif at is not None and max_staleness is not None:
        done = maintenance.remove_stale(at, max_staleness)
    else:
        raise QueryError("--max-staleness needs the current policy version", hint="add --at V")
    _say(done, f"deleted {done.rows:,} rows", json=json)


def _say(done: object, text: str, *, json: bool) -> None:
    if json:
        show.as_json(vars(done))
    else:
        show.console().print(f"{text}, snapshot {vars(done)['snapshot']}", markup=False)


def vacuum(store: str, *, hours: float, run: bool, force: bool, json: bool) -> None:
    """`trajstore vacuum`: names files, and removes them only when told to."""
    names = TrajectoryStore.open(store).maintenance.vacuum(hours, dry_run=not run, force=force)
    if json:
        show.as_json({"removed" if run else "would_remove": names})
        return
    out = show.console()
    out.print(f"{'removed' if run else 'would remove'} {len(names):,} files")
    for name in names[:SHOWN_FILES]:
        out.print(f"  {name}", markup=False)
    if len(names) > SHOWN_FILES:
        out.print(f"  and {len(names) - SHOWN_FILES:,} more")
    if names and not run:
        out.print("nothing was removed: add --run to do it")


def restore(store: str, snapshot: str, *, json: bool) -> None:
    """`trajstore restore`."""
    opened = TrajectoryStore.open(store)
    back = opened.at(reference(snapshot)).snapshot
    made = opened.maintenance.restore(back)
    if json:
        show.as_json({"snapshot": made, "restored": back})
    else:
        show.console().print(f"{store} is as it was at snapshot {back}, snapshot {made}", markup=False)
