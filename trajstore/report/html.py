"""Owns the report's page: facts to one HTML text that needs no network; computes no fact."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

import polars as pl

from trajstore.errors import TrajstoreError
from trajstore.report.facts import Facts
from trajstore.report.text import NOTHING, number, percent, short, size

SHOWN_IDS = 5

# No script, style, image or font from elsewhere, whatever the rows hold. Vega's expressions are interpreted.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def page(facts: Facts) -> str:
    """The report as one self-contained HTML page.

    Raises:
        TrajstoreError: altair or vl-convert-python is not installed.
    """
    try:
        # altair takes most of a second: only those who draw wait for it
        from trajstore.report import bundle, sections
    except ImportError as error:
        raise TrajstoreError(
            f"a report needs {error.name}", hint="pip install 'trajstore[report]'"
        ) from error
    specs: dict[str, Any] = {}
    body = [_header(facts), _tiles(facts), _findings(facts)]
    for section in sections.all_of(facts):
        panels = []
        for spec, numbers in section.panels:
            if spec is None:
                panels.append(f'<div class="row alone">{numbers}</div>')
                continue
            place = f"plot-{len(specs)}"
            specs[place] = spec
            label = escape(f"{section.name}: {section.says}")
            plot = f'<div class="plot" id="{place}" role="img" aria-label="{label}"></div>'
            panels.append(f'<div class="row">{plot}{numbers}</div>')
        body.append(
            f"<section><h2>{escape(section.name)}</h2><h3>{escape(section.says)}</h3>{''.join(panels)}"
            f'<p class="caption">{escape(section.caption)}</p></section>'
        )
    body.append("<footer>Made by trajstore from the store alone; this page loads nothing.</footer>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_name(facts))}: report</title><style>{_resource('page.css')}</style></head>\n"
        f"<body><main>{''.join(body)}</main>\n"
        f'<script type="application/json" id="specs">{_json(specs)}</script>\n'
        f"<script>{bundle.library()}</script>\n<script>{_resource('page.js')}</script></body></html>\n"
    )


def _resource(name: str) -> str:
    return files("trajstore.report").joinpath(name).read_text()


def _json(value: Any) -> str:
    """JSON that cannot end the script it stands in, whatever text the rows hold."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _name(facts: Facts) -> str:
    return facts.store.rstrip("/").rpartition("/")[2] or facts.store


def _header(facts: Facts) -> str:
    at = (
        "no policy version is known"
        if facts.at is None
        else f"version gaps are counted from version {facts.at}"
    )
    return (
        f"<header><h1>{escape(_name(facts))}</h1><p>{escape(facts.store)}, snapshot {facts.snapshot} of "
        f"{facts.written:%Y-%m-%d %H:%M} UTC; {at}; tasks by <code>{escape(facts.by)}</code></p></header>"
    )


def _tiles(facts: Facts) -> str:
    zero = facts.groups.filter(pl.col("zero_variance").is_not_null())["zero_variance"]
    done = sum(facts.ages["rows"].to_list())
    known = facts.ages.filter(pl.col("reward").is_not_null())
    weights = (known["rows"] - known["not_finite"]).to_list()
    reward = (
        sum(r * w for r, w in zip(known["reward"], weights, strict=True)) / sum(weights) if weights else None
    )
    tiles = {
        "rows": f"{facts.rows:,}",
        "tokens": short(facts.tokens),
        "completed": percent(done / facts.rows) if facts.rows else NOTHING,
        "policy versions": f"{facts.versions:,}",
        "groups": f"{facts.groups_count:,}",
        "mean reward": number(reward),
        "groups without signal": percent(zero.mean()) if len(zero) else NOTHING,
        "on disk": size(sum(facts.bytes.values())),
    }
    cells = (f'<div class="tile"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in tiles.items())
    return f'<div class="tiles">{"".join(cells)}</div>'


def _findings(facts: Facts) -> str:
    items = []
    for f in facts.findings:
        shown = ", ".join(f.ids[:SHOWN_IDS]) + (", …" if len(f.ids) > SHOWN_IDS else "")
        items.append(
            f'<li><span class="chip {f.level}">{f.level}</span><span>{escape(f.what)}</span>'
            f'<span class="next">{escape(f.next)}</span>'
            f'<span class="ids"><code>{escape(f.check)}</code> &nbsp;{escape(shown)}</span></li>'
        )
    counts = {level: sum(f.level == level for f in facts.findings) for level in ("error", "warning", "note")}
    said = ", ".join(f"{n} {level}{'s' if n != 1 else ''}" for level, n in counts.items() if n)
    nothing = "Nothing found that a trainer should know" if facts.rows else "There are no rows"
    text = said[:1].upper() + said[1:] or nothing
    listed = f'<ul class="findings">{"".join(items)}</ul>' if items else ""
    return f"<section><h2>Doctor</h2><h3>{text}</h3>{listed}</section>"
