"""Owns the plots of a report: tables to Vega-Lite by altair; knows no page and no store.

Colours are roles (see `page.css`), which the page fills in for light and for dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

Spec = dict[str, Any]
"""A plot in Vega-Lite, without the colours and type that the page gives it."""

HEIGHT = 220
UNKNOWN = "unknown"


def _data(table: pl.DataFrame) -> alt.InlineData:
    """Inline values, for which altair has no limit of rows; what JSON cannot say is null."""
    floats = [pl.col(n).fill_nan(None) for n, t in table.schema.items() if t.is_float()]
    finite = [pl.when(e.is_finite()).then(e).alias(e.meta.output_name()) for e in floats]
    return alt.InlineData(values=table.with_columns(finite).to_dicts())


def _chart(table: pl.DataFrame, height: int = HEIGHT) -> alt.Chart:
    return alt.Chart(_data(table), height=height, width="container")


def _spec(chart: Any) -> Spec:
    made: Spec = chart.to_dict()
    made.pop("config", None)
    return made


def _line(base: Any, tips: Sequence[alt.Tooltip], **line: Any) -> Spec:
    """A line with a point at each value, which says its numbers."""
    points = base.mark_point(filled=True, size=45, opacity=1).encode(tooltip=list(tips))
    return _spec(base.mark_line(**line) + points)


def _tips(**fields: str) -> list[alt.Tooltip]:
    """Tooltips by title: `field:type:format`."""
    out = []
    for title, spec in fields.items():
        name, kind, *form = spec.split(":")
        out.append(
            alt.Tooltip(
                f"{name}:{kind}",
                title=title.replace("_", " ").strip(),
                format=form[0] if form else alt.Undefined,
            )
        )
    return out


def _versions(step: int, field: str = "version_id", title: str = "policy version") -> alt.X:
    title = title if step == 1 else f"{title}, in steps of {step:,}"
    return alt.X(f"{field}:Q", title=title, axis=alt.Axis(format="d", tickMinStep=1))


def _counts(field: str, title: str) -> alt.Y:
    return alt.Y(f"{field}:Q", title=title, axis=alt.Axis(format=",d", tickMinStep=1))


def reward_histogram(table: pl.DataFrame) -> Spec:
    """Rows by reward; a bar each, or bins."""
    tips = _tips(from_="low:Q:.4", to="high:Q:.4", rows="rows:Q:,")
    if (table["low"] == table["high"]).all():
        named = table.with_columns(pl.col("low").alias("name"))
        chart = _chart(named).encode(
            x=alt.X("name:O", title="reward", axis=alt.Axis(labelAngle=0, format=".4~", labelOverlap=True))
        )
    else:
        chart = _chart(table).encode(x=alt.X("low:Q", bin="binned", title="reward"), x2="high:Q")
    return _spec(chart.mark_bar().encode(y=_counts("rows", "rows"), tooltip=tips))


def rewards(table: pl.DataFrame, step: int) -> Spec:
    """Mean reward against the version a row was started under, a line a task."""
    tips = _tips(version="version_id:Q", task="task:N", mean_reward="reward:Q:.3f", rows="rows:Q:,")
    many = table["task"].n_unique() > 1
    base = _chart(table.filter(pl.col("version_id").is_not_null())).encode(
        x=_versions(step), y=alt.Y("reward:Q", title="mean reward", scale=alt.Scale(zero=False))
    )
    if many:
        base = base.encode(color=alt.Color("task:N", title=None))
    return _line(base, tips)


def bars(
    table: pl.DataFrame, x: str, y: str, *, x_title: str, y_title: str, tips: Sequence[alt.Tooltip]
) -> Spec:
    """A bar for each value of x in their order; null is told as unknown."""
    named = table.with_columns(
        pl.col(x).cast(pl.String).fill_null(UNKNOWN).alias("name"), order=pl.int_range(pl.len())
    )
    return _spec(
        _chart(named)
        .mark_bar()
        .encode(
            x=alt.X(
                "name:N",
                title=x_title,
                sort=alt.SortField("order"),
                axis=alt.Axis(labelAngle=0, labelOverlap=True),
            ),
            y=_counts(y, y_title),
            tooltip=list(tips),
        )
    )


def ages(table: pl.DataFrame, step: int) -> Spec:
    """Rows at each version gap."""
    title = "version gap" if step == 1 else f"version gap, in steps of {step:,}"
    tips = _tips(gap="name:N", rows="rows:Q:,", tokens="tokens:Q:,", mean_reward="reward:Q:.3f")
    table = table.sort("gap", nulls_last=True)
    return bars(table, "gap", "rows", x_title=title, y_title="rows", tips=tips)


def drift(table: pl.DataFrame, step: int) -> Spec:
    """Mean |log-ratio| and k3 against the gap at which log-probs were recomputed."""
    known = table.filter(pl.col("drift_gap").is_not_null())
    names = {"abs_log_ratio": "mean |log-ratio|", "k3": "KL (k3)"}
    long = known.unpivot(list(names), index=["drift_gap", "rows", "tokens"]).with_columns(
        pl.col("variable").replace(names)
    )
    base = _chart(long).encode(
        x=_versions(step, "drift_gap", "version gap"),
        y=alt.Y("value:Q", title="nats a token"),
        color=alt.Color("variable:N", title=None),
    )
    tips = _tips(gap="drift_gap:Q", what="variable:N", nats="value:Q:.4f", tokens="tokens:Q:,")
    return _line(base, tips)


def ess(table: pl.DataFrame, step: int) -> Spec:
    """Effective sample size over n and clip fraction against the gap."""
    known = table.filter(pl.col("drift_gap").is_not_null()).with_columns(
        clipped=pl.col("clipped_low") + pl.col("clipped_high")
    )
    names = {"ess_tokens": "ESS / n, tokens", "ess_rows": "ESS / n, rows", "clipped": "clip fraction"}
    long = known.unpivot(list(names), index=["drift_gap", "rows"]).with_columns(
        pl.col("variable").replace(names)
    )
    base = _chart(long).encode(
        x=_versions(step, "drift_gap", "version gap"),
        y=alt.Y("value:Q", title="share", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
        color=alt.Color("variable:N", title=None, sort=list(names.values())),
    )
    tips = _tips(gap="drift_gap:Q", what="variable:N", share="value:Q:.1%", rows="rows:Q:,")
    return _line(base, tips)


def staleness(table: pl.DataFrame, step: int) -> Spec:
    """Share of each task that a gate keeps, against max_staleness."""
    base = _chart(table).encode(
        x=_versions(step, "max_staleness", "max_staleness"),
        y=alt.Y("share:Q", title="rows kept", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
    )
    if table["task"].n_unique() > 1:
        base = base.encode(color=alt.Color("task:N", title=None))
    tips = _tips(max_staleness="max_staleness:Q", task="task:N", kept="share:Q:.1%", rows="rows:Q:,")
    return _line(base, tips, interpolate="step-after")


def length_histogram(table: pl.DataFrame) -> Spec:
    """Rows by response length, by how the response ended."""
    order = ["finished", "cut off", "aborted", "failed", "pending", "generating"]
    ranked = table.with_columns(order=pl.col("ended").replace_strict(order, list(range(len(order)))))
    return _spec(
        _chart(ranked)
        .mark_bar()
        .encode(
            x=alt.X(
                "low:Q", bin="binned", title="response tokens", axis=alt.Axis(format=",d", tickMinStep=1)
            ),
            x2="high:Q",
            y=_counts("rows", "rows").stack("zero"),
            color=alt.Color("ended:N", title=None, sort=order),
            order=alt.Order("order:Q"),
            tooltip=_tips(from_="low:Q:,", below="high:Q:,", ended="ended:N", rows="rows:Q:,"),
        )
    )


def lengths(table: pl.DataFrame, step: int) -> Spec:
    """Median, 90th percentile and longest response against the version."""
    names = {"p50": "median", "p90": "90th percentile", "longest": "longest"}
    long = (
        table.filter(pl.col("version_id").is_not_null())
        .with_columns(pl.col("longest").cast(pl.Float64))
        .unpivot(list(names), index=["version_id", "rows"])
        .with_columns(pl.col("variable").replace(names))
    )
    base = _chart(long).encode(
        x=_versions(step),
        y=alt.Y("value:Q", title="response tokens"),
        color=alt.Color("variable:N", title=None, sort=list(names.values())),
    )
    tips = _tips(version="version_id:Q", what="variable:N", tokens="value:Q:,", rows="rows:Q:,")
    return _line(base, tips)


def padding(table: pl.DataFrame) -> Spec:
    """Padding ratio of each plan."""
    most = max(table["padding"].to_list(), default=0.0)
    base = _chart(table, height=34 * max(1, len(table))).encode(
        y=_names(table["plan"].to_list(), "plan", width=260),
        x=alt.X(
            "padding:Q",
            title="padding / padded size",
            axis=alt.Axis(format="%"),
            scale=alt.Scale(domain=[0, 1.15 * most or 1]),  # room for the last number
        ),
        tooltip=_tips(plan="plan:N", padding="padding:Q:.1%", batches="batches:Q:,"),
    )
    text = base.mark_text(align="left", dx=5).encode(text=alt.Text("padding:Q", format=".1%"))
    return _spec(base.mark_bar() + text)


def _names(order: Sequence[str], field: str, width: int) -> alt.Y:
    axis = alt.Axis(labelLimit=width, ticks=False, domain=False)
    return alt.Y(f"{field}:N", title=None, sort=list(order), axis=axis)


def groups(table: pl.DataFrame) -> Spec:
    """Groups by the standard deviation of their rewards, all finite; those without any stand apart."""
    width = (max(table["reward_std"].to_list(), default=0.0) or 1.0) / 24
    std = pl.col("reward_std")
    binned = (
        table.with_columns(
            low=pl.when("zero_variance").then(-width).otherwise((std / width).floor().clip(0, 23) * width),
            kind=pl.when("zero_variance").then(pl.lit("no signal")).otherwise(pl.lit("rewards differ")),
        )
        .group_by("low", "kind")
        .agg(groups=pl.len())
        .with_columns(high=pl.col("low") + width)
        .sort("low")
    )
    return _spec(
        _chart(binned)
        .mark_bar()
        .encode(
            x=alt.X("low:Q", bin="binned", title="standard deviation of a group's rewards (left of 0: none)"),
            x2="high:Q",
            y=_counts("groups", "groups"),
            color=alt.Color("kind:N", title=None, sort=["rewards differ", "no signal"]),
            tooltip=_tips(from_="low:Q:.3f", to="high:Q:.3f", groups="groups:Q:,", kind="kind:N"),
        )
    )


def sizes(table: pl.DataFrame) -> Spec:
    """Compressed bytes of each column."""
    return _spec(
        _chart(table, height=24 * max(1, len(table)))
        .mark_bar()
        .encode(
            y=_names(table["column"].to_list(), "column", width=200),
            x=alt.X("bytes:Q", title="compressed bytes", axis=alt.Axis(format="~s", tickCount=5)),
            tooltip=_tips(column="column:N", bytes="bytes:Q:,", share="share:Q:.1%"),
        )
    )
