"""Owns what each shell verb does: calls the library's verb of the same name and prints the answer."""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from trajstore import importers
from trajstore import ingest as ingesting
from trajstore.cli import show
from trajstore.cli.options import opened_at
from trajstore.errors import QueryError
from trajstore.ingest.refusals import OnBadRecord
from trajstore.query import Explanation, connect, fresh, max_times_sampled, stratified_sample
from trajstore.schema import FORMAT_VERSION
from trajstore.selection import Allocation
from trajstore.selection.explain import bucket
from trajstore.store import Scan

SHOWN_REFUSALS = 10
TOO_LONG = 48


def version() -> str:
    """The installed version."""
    return metadata.version("trajstore")


def import_files(
    path: str,
    store: str,
    *,
    format: str,
    tokenizer: Path | None,
    on_error: OnBadRecord,
    nulls: bool,
    groups: bool,
    json: bool,
) -> bool:
    """`trajstore import`; whether nothing could be imported."""
    started = time.monotonic()
    with _bar() as bar:
        task = bar.add_task(Path(path).name, total=None, rows=0, speed="")

        def report(progress: ingesting.Progress) -> None:
            if progress.rows % 64 == 0:
                seconds = time.monotonic() - started
                speed = f"{progress.tokens / seconds:,.0f} tokens/s" if progress.tokens else ""
                bar.update(
                    task,
                    total=progress.total_bytes,
                    completed=progress.bytes_read,
                    rows=progress.rows,
                    speed=speed,
                )

        done = ingesting.ingest(
            path,
            store,
            format=format,
            tokenizer=tokenizer,
            on_error=on_error,
            nulls=nulls,
            derive_groups=groups,
            report=report,
        )
    seconds = time.monotonic() - started
    commit = done.commit
    refused = [{"where": w, "reason": r} for w, r in done.refused]
    if json:
        show.as_json(
            {
                "store": str(store),
                "created": done.created,
                "format": done.format,
                "snapshot": commit.snapshot,
                "rows": commit.rows,
                "tokens": done.tokens,
                "bytes": commit.bytes,
                "quarantined": refused if on_error == "quarantine" else [],
                "skipped": refused if on_error == "skip" else [],
                "files": [vars(file) for file in done.files],
                "left_out": [{"name": n, "reason": r} for n, r in done.left_out],
                "not_finite": commit.not_finite,
                "no_reward_at": done.no_reward_at,
                "seconds": round(seconds, 3),
            }
        )
        return done.nothing
    _tell(done, store, seconds, told=format == ingesting.AUTO, set_aside=on_error == "quarantine")
    return done.nothing


def _tell(done: ingesting.ImportReport, store: str, seconds: float, *, told: bool, set_aside: bool) -> None:
    out, commit = show.console(), done.commit
    if told:
        for name, files in _by_format(done.files).items():
            many = f": {len(files):,} files" if len(files) > 1 else ""
            out.print(f"format {name}{many} ({files[0].why})", markup=False)
    reasons: dict[str, list[str]] = {}
    for name, why in done.left_out:
        reasons.setdefault(why, []).append(name)
    for why, names in list(reasons.items())[:SHOWN_REFUSALS]:
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        out.print(f"left out {names[0]}{more}: {why}", markup=False)
    if len(reasons) > SHOWN_REFUSALS:
        left = sum(len(names) for names in list(reasons.values())[SHOWN_REFUSALS:])
        out.print(f"left out {left:,} files more, for other reasons (--json lists them)", markup=False)
    already = sum(file.already_in for file in done.files)
    if already:
        out.print(f"{already:,} of {len(done.files):,} files were in already")
    verb = "made" if done.created else "appended to"
    rate = f", {done.tokens:,} tokens, {done.tokens / seconds:,.0f} tokens/s" if done.tokens else ""
    many = f"{len(done.files):,} files, " if len(done.files) > 1 else ""
    if done.nothing:
        out.print("nothing was imported: every record was refused")
    else:
        out.print(
            f"{verb} {store}: {many}{commit.rows:,} rows{rate}, {show.size(commit.bytes)}, "
            f"snapshot {commit.snapshot}",
            markup=False,
        )
    if not done.tokens and commit.rows:
        out.print("no tokens: the file holds text only; give --tokenizer FILE to make token ids")
    for name, rows in commit.not_finite.items():
        first = f", the first is {done.no_reward_at[0]}" if name == "reward" and done.no_reward_at else ""
        out.print(f"{name}: {rows:,} rows hold NaN or an infinity{first}", markup=False)
    if done.refused:
        one = "record" if len(done.refused) == 1 else "records"
        place = f" in {store}" if set_aside else ""
        verb = "quarantined" if set_aside else "skipped"
        out.print(f"{verb} {len(done.refused):,} {one}{place}:", markup=False)
        for where, reason in done.refused[:SHOWN_REFUSALS]:
            out.print(f"  {where}: {reason}", markup=False)
        if len(done.refused) > SHOWN_REFUSALS:
            out.print(f"  and {len(done.refused) - SHOWN_REFUSALS:,} more")


def _by_format(files: list[ingesting.FileReport]) -> dict[str, list[ingesting.FileReport]]:
    found: dict[str, list[ingesting.FileReport]] = {}
    for file in files:
        found.setdefault(file.format, []).append(file)
    return found


def formats(*, json: bool) -> None:
    """`trajstore formats`."""
    rows = [{"format": name, "what it is": summary} for name, summary in importers.described()]
    if json:
        show.as_json(rows)
    else:
        show.table(rows)


def _bar() -> Progress:
    out = show.console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} rows {task.fields[speed]}"),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )


def info(store: str, *, snapshot: str | None, json: bool) -> None:
    """`trajstore info`."""
    opened = opened_at(store, snapshot)
    history = opened.history()
    columns = ["length", "group_id", "reward", "oldest_version_id", "newest_version_id", "status"]
    rows = opened.scan(columns=columns).to_arrow()
    tokens = pc.sum(rows["length"]).as_py() or 0
    sizes = dict(sorted(opened.column_bytes().items(), key=lambda item: -item[1]))
    total = sum(sizes.values())
    facts: dict[str, Any] = {
        "rows": len(rows),
        "tokens": tokens,
        "groups": pc.count_distinct(rows["group_id"]).as_py(),
        "mean reward": _mean(rows["reward"]),
        "policy versions": _range(rows),
        "status": {str(c["values"]): c["counts"] for c in pc.value_counts(rows["status"]).to_pylist()},
        "snapshots": len(history),
        "newest snapshot": opened.snapshot,
        "format version": FORMAT_VERSION,
        "bytes": total,
        "bytes per token": round(total / tokens, 3) if tokens else None,
        "quarantined": len(opened.quarantined()),
    }
    if json:
        show.as_json(facts | {"column bytes": sizes, "history": [vars(s) for s in history]})
        return
    facts["status"] = ", ".join(f"{count} {name}" for name, count in facts["status"].items())
    facts["bytes"] = show.size(total)
    shown = {k: f"{v:,}" if isinstance(v, int) else v for k, v in facts.items() if v is not None}
    show.pairs(str(store), shown)
    show.table(
        [
            {
                "column": name,
                "size": show.size(bytes_),
                "%": f"{100 * bytes_ / total:.1f}",
                "bytes/token": f"{bytes_ / tokens:.3f}" if tokens else "",
            }
            for name, bytes_ in sizes.items()
            if bytes_ * 200 >= total
        ],
        title="size by column (0.5 % and above)",
    )


def _mean(column: pa.ChunkedArray) -> float | None:
    known = column.filter(pc.is_finite(column))
    return round(pc.mean(known).as_py(), 6) if len(known) else None


def _range(rows: pa.Table) -> str | None:
    low, high = pc.min(rows["oldest_version_id"]).as_py(), pc.max(rows["newest_version_id"]).as_py()
    return None if low is None else f"{low} to {high}"


def sql(store: str, query: str, *, current_version: int | None, snapshot: str | None, json: bool) -> None:
    """`trajstore sql`."""
    with connect(opened_at(store, snapshot), current_version=current_version) as connection:
        result = _unique(connection.sql(query))
    try:
        rows = result.to_pylist()
    except (OverflowError, ValueError) as error:  # DuckDB's dates and intervals go further than Python's
        raise QueryError(
            f"a value cannot be shown: {error}", hint="cast it to text in the query: value::varchar"
        ) from error
    if json:
        show.as_json(rows)
    else:
        show.table(rows, columns=result.schema.names)


def _unique(result: pa.Table) -> pa.Table:
    """Two columns of one name would become one in a row."""
    names = [f"{n}_{i}" if n in result.schema.names[:i] else n for i, n in enumerate(result.schema.names)]
    return result.rename_columns(names)


def sample(
    store: str,
    *,
    n: int,
    by: str,
    at: int | None,
    max_staleness: int | None,
    where: str | None,
    allocation: Allocation,
    weights: str | None,
    whole_groups: bool,
    max_times: int | None,
    convention: str,
    seed: int,
    task: str | None,
    snapshot: str | None,
    json: bool,
) -> None:
    """`trajstore sample`; with a task, what each gate dropped instead of the rows."""
    scan: Scan = opened_at(store, snapshot).scan()
    if where is not None:
        scan = scan.filter(where)
    if max_staleness is not None:
        gate = fresh(_current(at, "--max-staleness"), max_staleness, convention=convention)
        scan = scan.filter(gate)
    if max_times is not None:
        scan = max_times_sampled(scan, max_times)
    if by == "version_gap":
        _current(at, "--by version_gap")
    if weights == "freshness":
        _current(at, "--weights freshness")
    drawn = stratified_sample(
        scan,
        n,
        by=by,
        at=at,
        allocation=allocation,
        weights=weights,
        whole_groups=whole_groups,
        seed=seed,
    )
    if task is not None:
        _explain(drawn.explain(task), json=json)
        return
    names = ["id", "group_id", "status", "length", "reward", "oldest_version_id", "prompt", "response"]
    shown = [*names, *([by] if by in scan.schema.names and by not in names else [])]
    rows = drawn.columns(shown).to_arrow().to_pylist()
    for row in rows:
        if at is not None:
            oldest = row["oldest_version_id"]
            row["version_gap"] = None if oldest is None else at - oldest
    if json:
        show.as_json(rows)
        return
    if not rows:
        show.console().print("no rows:")
        for done in drawn.gates():
            show.console().print(
                f"  {done.label}: {done.rows_in:,} rows in, {done.rows_out:,} out", markup=False
            )
        return
    for row in rows:
        for name in ("prompt", "response"):
            row[name] = row[name] if len(row[name]) <= TOO_LONG else row[name][: TOO_LONG - 1] + "…"
    show.table(rows)


def _explain(explained: Explanation, *, json: bool) -> None:
    if json:
        show.as_json({"gates": explained.to_polars().to_dicts(), "warnings": explained.warnings})
        return
    rows = [
        {"gate": gate.label, "part": part, "rows in": rows_in, "kept": kept, "dropped": rows_in - kept}
        for gate in explained
        for part, rows_in, kept in (
            *((f"{explained.by} {s.value}", s.rows_in, s.rows_out) for s in gate.by_task),
            *((f"{bucket(s.value)} tokens", s.rows_in, s.rows_out) for s in gate.by_length),
            *([("unknown version", gate.unknown_version, 0)] if gate.unknown_version else []),
        )
    ]
    totals = [
        {
            "gate": gate.label,
            "rows in": gate.rows_in,
            "kept": gate.rows_out,
            "dropped": gate.dropped,
            "mean length kept": _rounded(gate.mean_length_kept),
            "mean length dropped": _rounded(gate.mean_length_dropped),
        }
        for gate in explained
    ]
    show.table(totals)
    show.table(rows)
    for warning in explained.warnings:
        show.console().print(f"warning: {warning}", markup=False)


def _rounded(length: float) -> float | None:
    return round(length, 1) if length == length else None


def _current(at: int | None, why: str) -> int:
    if at is None:
        raise QueryError(f"{why} needs the current policy version", hint="add --at V")
    return at


def demo(store: Path, *, seed: int) -> None:
    """`trajstore demo`."""
    from trajstore.demo import run_demo  # torch is imported here and nowhere before

    run_demo(store, seed=seed, console=show.console())
