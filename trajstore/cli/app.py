"""Owns the command line itself: its verbs' names, options and exit codes; what they do is next door.

Exit codes: 0 done, 1 it failed, 2 the input was bad. `--debug` shows the traceback.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import trajstore.cli.verbs as verbs
from trajstore.cli import cache, judge, maintain, outward, show
from trajstore.cli.options import AtSnapshot, Json, Store
from trajstore.errors import InputError, TrajstoreError

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A columnar store for the trajectories of language-model RL.",
)

app.add_typer(cache.app, name="cache")


QUERY = "One query over the views trajectories, tokens, segments, groups, batches."


class _Shell:
    debug = False


class OnBadRecord(StrEnum):
    """What to do with a record that cannot be read, or breaks the contract of a row."""

    stop = "stop"
    skip = "skip"
    quarantine = "quarantine"


class Allocation(StrEnum):
    """How a sample is shared out over the strata."""

    equal = "equal"
    proportional = "proportional"


Version = Annotated[int | None, typer.Option("--at", metavar="V", help="Current policy version.")]


def _version(asked: bool) -> None:
    if asked:
        print(verbs.version())
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _Shell.debug = debug


@app.command("import", epilog="Example: trajstore import rollout_data/ air --on-error skip")
def import_(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="File, folder or quoted glob to read; - is stdin.")
    ],
    store: Store,
    format: Annotated[
        str, typer.Option("--format", "-f", metavar="NAME", help="auto, or one that `formats` lists.")
    ] = "auto",
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="FILE", help="tokenizer.json or .tiktoken, to make token ids."),
    ] = None,
    on_error: Annotated[
        OnBadRecord, typer.Option("--on-error", help="Stop at a bad record, skip it, or set it aside.")
    ] = OnBadRecord.stop,
    nulls: Annotated[
        bool, typer.Option("--nulls-as-nan", help="Take null in a list of log-probs as NaN.")
    ] = False,
    groups: Annotated[
        bool,
        typer.Option(
            "--derive-groups/--no-derive-groups",
            help="Rows of a file with one prompt are a group where the format names none.",
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Import trajectories of any known framework, making the store when there is none.

    Each file is a commit. The same call again goes on where a stopped one was, and adds nothing twice.
    Of a folder or glob, files that are no known dump are left out and named; a damaged one is a bad record.

    Exit code: 0 when something is in, with what was skipped counted and named; 2 when nothing could be
    imported, also with --on-error skip and quarantine.
    """
    nothing = verbs.import_files(
        path,
        store,
        format=format,
        tokenizer=tokenizer,
        on_error=on_error.value,
        nulls=nulls,
        groups=groups,
        json=json,
    )
    if nothing:
        raise typer.Exit(BAD_INPUT)


@app.command(epilog="Example: trajstore formats")
def formats(json: Json = False) -> None:
    """List the formats that can be imported."""
    verbs.formats(json=json)


@app.command(epilog="Example: trajstore info air")
def info(store: Store, snapshot: AtSnapshot = None, json: Json = False) -> None:
    """Show rows, tokens, policy versions, snapshots and the size of each column."""
    verbs.info(store, snapshot=snapshot, json=json)


@app.command(
    epilog='Example: trajstore sql air "select group_id, avg(reward) from trajectories group by 1"; '
    'columns: trajstore sql air "describe tokens"'
)
def sql(
    store: Store,
    query: Annotated[
        str,
        typer.Argument(metavar="QUERY", help=QUERY),
    ],
    current_version: Annotated[
        int | None, typer.Option("--at", metavar="V", help="Current policy version, for version_gap.")
    ] = None,
    snapshot: AtSnapshot = None,
    json: Json = False,
) -> None:
    """Ask SQL (DuckDB's dialect); the query can read the store and nothing else."""
    verbs.sql(store, query, current_version=current_version, snapshot=snapshot, json=json)


@app.command(epilog="Example: trajstore sample air -n 8 --by group_id --where 'reward > 0'")
def sample(
    store: Store,
    n: Annotated[int, typer.Option("-n", metavar="N", min=0, help="Rows to draw.")] = 8,
    by: Annotated[
        str,
        typer.Option("--by", metavar="COLUMN", help="Column whose values are the strata, or version_gap."),
    ] = "status",
    at: Version = None,
    max_staleness: Annotated[
        int | None, typer.Option("--max-staleness", metavar="K", help="Only rows at most K versions behind.")
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", metavar="SQL", help="Only rows for which this is true.")
    ] = None,
    allocation: Annotated[
        Allocation, typer.Option("--allocation", help="Same share for every stratum, or by size.")
    ] = Allocation.equal,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="COLUMN", help="Draw in proportion to it, or to 'freshness'."),
    ] = None,
    whole_groups: Annotated[
        bool, typer.Option("--whole-groups", help="N counts groups of siblings, which are never split.")
    ] = False,
    max_times: Annotated[
        int | None,
        typer.Option("--max-times", metavar="K", min=1, help="Only rows trained on fewer than K times."),
    ] = None,
    convention: Annotated[
        str,
        typer.Option("--convention", metavar="NAME", help="Whose staleness: trajstore, verl, prime-rl, ..."),
    ] = "trajstore",
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Chooses the draw.")] = 0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what each gate dropped, by task and length, not the rows.")
    ] = False,
    task: Annotated[
        str, typer.Option("--task", metavar="COLUMN", help="With --explain: what a task is.")
    ] = "source",
    snapshot: AtSnapshot = None,
    json: Json = False,
) -> None:
    """Draw a stratified sample, the same one for the same seed."""
    verbs.sample(
        store,
        n=n,
        by=by,
        at=at,
        max_staleness=max_staleness,
        where=where,
        allocation=allocation.value,
        weights=weights,
        whole_groups=whole_groups,
        max_times=max_times,
        convention=convention,
        seed=seed,
        task=task if explain else None,
        snapshot=snapshot,
        json=json,
    )


@app.command(epilog="Example: trajstore demo")
def demo(
    store: Annotated[Path, typer.Argument(metavar="[STORE]", help="Where to write the demo's store.")] = Path(
        "trajstore-demo"
    ),
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed of the run.")] = 0,
) -> None:
    """Train a small policy asynchronously, store its rollouts, and show what one can ask."""
    verbs.demo(store, seed=seed)


@app.command(epilog="Example: trajstore history air")
def history(store: Store, json: Json = False) -> None:
    """List the snapshots: when, what, how many rows, by whom."""
    maintain.history(store, json=json)


@app.command(epilog="Example: trajstore tag air step-1200")
def tag(
    store: Store,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name to give.")] = None,
    snapshot: Annotated[
        int | None, typer.Option("--snapshot", metavar="N", help="Which snapshot; the newest if not given.")
    ] = None,
    json: Json = False,
) -> None:
    """Name a snapshot, so that a vacuum keeps it; without a name, list the names."""
    maintain.tag(store, name, snapshot=snapshot, json=json)


@app.command(epilog="Example: trajstore fsck air")
def fsck(
    store: Store,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove orphans, set a torn log entry aside.")
    ] = False,
    json: Json = False,
) -> None:
    """Read everything again: log, digests, statistics and every row's contract. Exits 1 on an error."""
    if not maintain.fsck(store, repair=repair, json=json):
        raise typer.Exit(FAILED)


@app.command(epilog="Example: trajstore compact air")
def compact(store: Store, json: Json = False) -> None:
    """Join small files, ordered by policy version; rows and samples stay as they are."""
    maintain.compact(store, json=json)


@app.command(epilog="Example: trajstore delete air --where \"status = 'failed'\"")
def delete(
    store: Store,
    where: Annotated[
        str | None, typer.Option("--where", metavar="SQL", help="Delete rows for which this is true.")
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option("--max-staleness", metavar="K", help="Delete rows more than K versions behind."),
    ] = None,
    at: Version = None,
    json: Json = False,
) -> None:
    """Delete rows; earlier snapshots still have them until a vacuum."""
    maintain.delete(store, where=where, at=at, max_staleness=max_staleness, json=json)


@app.command(epilog="Example: trajstore vacuum air --run")
def vacuum(
    store: Store,
    hours: Annotated[
        float, typer.Option("--hours", metavar="H", help="Files younger than this stay.")
    ] = 168.0,
    run: Annotated[bool, typer.Option("--run", help="Really remove the files.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Allow less than 168 hours.")] = False,
    json: Json = False,
) -> None:
    """Name the files that only old, untagged snapshots use; with --run, remove them."""
    maintain.vacuum(store, hours=hours, run=run, force=force, json=json)


@app.command(epilog="Example: trajstore restore air 12")
def restore(
    store: Store,
    snapshot: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Number or tag.")],
    json: Json = False,
) -> None:
    """Make the store as it was at a snapshot, as a new snapshot."""
    maintain.restore(store, snapshot, json=json)


app.add_typer(judge.app)
app.add_typer(outward.app)


def main() -> None:
    """Runs the command line; the script `trajstore` is this."""
    try:
        app()
    except TrajstoreError as problem:
        if _Shell.debug:
            raise
        show.error(problem)
        sys.exit(BAD_INPUT if isinstance(problem, InputError) else FAILED)
    except BrokenPipeError:
        # The reader of our pipe went away: leave quietly, and keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
