"""What a batch holds, written from the design in plain Python: one row at a time, one token at a time."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from trajstore.layouts import SCALARS, Options, Rows
from trajstore.schema import BY_NAME, Column, list_of

Row = dict[str, Any]

FLOATS = ("log_probs", "behavior_log_probs", "advantages", "returns")
TOKEN_COLUMNS = ("input_ids", "attention_mask", "loss_mask", *FLOATS)
EXTRA = ("action_mask", "values", "token_rewards", "entropy", "flags")
PADS = {"entropy": -5.0, "flags": 1.0}
SCHEMA = pa.schema(
    [
        *(BY_NAME[name].field for name in SCALARS),
        *(BY_NAME[name].field for name in ("tokens", "attention_mask", "loss_mask", "action_mask")),
        *(BY_NAME[name].field for name in (*FLOATS, "values")),
        Column("entropy", list_of(pa.float64()), "token", pad=PADS["entropy"]).field,
        Column("flags", list_of(pa.bool_()), "token", pad=PADS["flags"]).field,
        BY_NAME["version_segments"].field,
    ]
)  # fmt: skip


def values_of(row: Row, name: str, options: Options) -> list[float]:
    """One value a token, nothing cut yet."""
    length = row["length"]
    given = row.get("tokens" if name == "input_ids" else name)
    if given is not None:
        return [float(value) if name != "input_ids" else value for value in given]
    if name == "attention_mask":
        return [1] * length
    if name == "loss_mask":
        return [float(t >= row["prompt_length"]) for t in range(length)]
    if name == "action_mask":
        return values_of(row, "loss_mask", options)
    return [math.nan if options.missing == "nan" else 0.0] * length


def fill_of(name: str, options: Options) -> float:
    return options.pad_token_id if name == "input_ids" else PADS.get(name, 0.0)


def bounds_of(row: Row, options: Options) -> tuple[int, int]:
    """First and last kept token (exclusive)."""
    length, most = row["length"], options.max_length
    if most is None or length <= most:
        return 0, length
    return (length - most, length) if options.truncation_side == "left" else (0, most)


def kept(row: Row, name: str, options: Options) -> list[float]:
    start, end = bounds_of(row, options)
    return values_of(row, name, options)[start:end]


def up(width: int, multiple: int) -> int:
    while width % multiple:
        width += 1
    return width


def block(rows: Sequence[list[float]], fill: float, side: str, multiple: int) -> list[list[float]]:
    width = up(max(map(len, rows), default=0), multiple)
    if side == "left":
        return [[fill] * (width - len(row)) + row for row in rows]
    return [row + [fill] * (width - len(row)) for row in rows]


def same(found: dict[str, Any], name: str, expected: list[Any], dtype: Any) -> None:
    array = found[name]
    assert array.dtype == dtype, name
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(array, np.array(expected, dtype).reshape(array.shape), err_msg=name)
    assert array.size == np.array(expected, dtype).size, name


def dtype_of(name: str, options: Options) -> Any:
    torch = options.dtypes == "torch"
    if name in ("input_ids", "position_ids", "prompts", "responses"):
        return np.int64 if torch else np.int32
    if name == "attention_mask":
        return np.int64 if torch else np.int8
    if name in ("loss_mask", "action_mask"):
        return np.float32 if torch else np.int8
    return np.float32


def one_row(draw: st.DrawFn) -> Row:
    length = draw(st.integers(0, 6))
    floats = st.floats(width=32, allow_infinity=False)

    def column(values: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(values, min_size=length, max_size=length))

    bit = st.integers(0, 1)
    row: Row = {name: column(bit) for name in ("attention_mask", "loss_mask", "action_mask")}
    row |= {name: column(floats) for name in (*FLOATS, "values", "entropy")}
    row["flags"] = column(st.booleans())
    return row | {
        "id": "a",
        "id_hash": 1,
        "length": length,
        "prompt_length": draw(st.integers(0, length)),
        "reward": draw(st.floats(width=32)),
        "version_id": draw(st.none() | st.integers(0, 2**40)),
        "tokens": draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
        "version_segments": None,
    }


batch_rows = st.lists(st.composite(one_row)(), max_size=5)

any_options = st.builds(
    Options,
    pad_token_id=st.integers(0, 9),
    missing=st.sampled_from(["nan", "zero"]),
    extra=st.just(EXTRA),
    padding_side=st.sampled_from(["left", "right"]),
    pad_to_multiple_of=st.integers(1, 4),
    max_length=st.none() | st.integers(1, 6),
    truncation_side=st.sampled_from(["left", "right"]),
    dtypes=st.sampled_from(["torch", "compact"]),
    full_sequence=st.booleans(),
)


def table_of(rows: Sequence[Row], cut: int = 0) -> pa.Table:
    """The rows in up to two chunks, each a slice of a longer array."""
    filler = dict.fromkeys(SCHEMA.names) | {
        "id": "x",
        "id_hash": 0,
        "length": 1,
        "reward": 0.0,
        "tokens": [7],
    }
    whole = pa.Table.from_pylist([filler, *rows, filler], SCHEMA)
    cut = min(cut, len(rows))
    return pa.concat_tables([whole.slice(1, cut), whole.slice(1 + cut, len(rows) - cut)])


def rows_of(*rows: Row, cut: int = 0) -> Rows:
    return Rows.from_arrow(table_of(rows, cut), PADS)


def row(**given: Any) -> Row:
    return (
        dict.fromkeys(SCHEMA.names)
        | {
            "id": "r",
            "id_hash": 1,
            "length": 3,
            "prompt_length": 1,
            "reward": 0.5,
            "version_id": 4,
            "tokens": [5, 6, 7],
        }
        | given
    )
