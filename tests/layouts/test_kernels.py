"""Any fields and dtypes: the kernel in use against the numpy reference, bit for bit; memory used again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.reference import EXTRA, Row, batch_rows, row, rows_of
from trajstore import InputError, layouts
from trajstore.layouts import LAYOUTS, Buffers, Lists, Options, Ragged, build_kernel, kernels, packed, padded

NUMBERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
TARGETS = ["i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8", ">i4"]


@st.composite
def any_lists(draw: st.DrawFn) -> Lists:
    """Columns of any number type and any lengths, in chunks, out of order, asked for as any other."""
    count = draw(st.integers(0, 5))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    columns, dtypes, pads = {}, {}, {}
    for number in range(draw(st.integers(1, 4))):
        name = f"c{number}"
        source, target = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(TARGETS))
        if np.dtype(source).kind == "f" and np.dtype(target).kind != "f":
            target = source  # a float of any size as an integer is not defined in C
        sizes = rng.integers(0, 60, count)
        raw = rng.integers(0, 256, (2, 200 * np.dtype(source).itemsize), np.uint8)
        chunks = [part.view(source) for part in raw]
        if np.dtype(source).kind == "f":  # a NaN has many bit patterns
            chunks = [np.nan_to_num(chunk, nan=np.nan, posinf=np.inf, neginf=-np.inf) for chunk in chunks]
        length = np.where(rng.random(count) < 0.2, -1, sizes)
        columns[name] = Ragged(
            tuple(chunks), rng.integers(0, 2, count), rng.integers(0, 140, count), length.astype(np.int64)
        )
        dtypes[name] = target
        pads[name] = draw(st.sampled_from([0, 1, 7, 100]))
    lengths = columns["c0"].length.clip(0)
    return Lists([str(i) for i in range(count)], lengths, np.arange(count), columns, dtypes, pads)


def bits(arrays: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (a.dtype.str, a.shape, a.tobytes()) if isinstance(a, np.ndarray) else a
        for name, a in arrays.items()
    }


def by_numpy(layout: str, rows: Any, options: Options) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAJSTORE_KERNEL", "numpy")
        return bits(LAYOUTS[layout](rows, options).arrays)


@settings(max_examples=40, deadline=None)
@given(any_lists(), st.sampled_from(["left", "right"]), st.none() | st.integers(1, 40))
def test_any_lists_are_written_alike(lists: Lists, side: Any, most: int | None) -> None:
    options = Options(padding_side=side, max_length=most, truncation_side=side)
    with np.errstate(all="ignore"):
        for layout in ("padded", "packed"):
            assert bits(LAYOUTS[layout](lists, options).arrays) == by_numpy(layout, lists, options)


@settings(max_examples=30, deadline=None)
@given(any_lists())
def test_any_lists_are_what_a_loop_would_write(lists: Lists) -> None:
    with np.errstate(all="ignore"):
        out, flat = padded(lists).arrays, packed(lists).arrays
        for name, column in lists.columns.items():
            dtype, fill = np.dtype(lists.dtypes[name]), lists.pads[name]
            rows = [column.row(i) for i in range(len(column))]
            given = [np.empty(0, dtype) if one is None else one.astype(dtype) for one in rows]
            width = max(map(len, given), default=0)
            expected = np.full((len(given), width), fill, dtype)
            for i, one in enumerate(given):
                expected[i, : len(one)] = one
            assert out[name].dtype == dtype
            np.testing.assert_array_equal(out[name], expected)
            np.testing.assert_array_equal(
                flat[name], np.concatenate([np.empty(0, dtype), *given]).astype(dtype)
            )
            if name != "c0" and lists.aligned is not None and name not in lists.aligned:
                ends = np.cumsum([0, *map(len, given)])
                assert flat[f"{name}_cu_seqlens"].tolist() == ends.tolist()
                assert flat[f"{name}_max_seqlen"] == width


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(batch_rows, st.sampled_from(sorted(LAYOUTS)), st.integers(0, 2)), max_size=4),
    st.booleans(),
)
def test_used_memory_shows_nothing_of_the_batch_before(
    batches: list[tuple[list[Row], Any, int]], untouched: bool
) -> None:
    buffers = Buffers(untouched=untouched)
    for rows, layout, pad_id in batches:
        options = Options(pad_token_id=pad_id, extra=EXTRA)
        arrays = LAYOUTS[layout](rows_of(*rows), options, buffers).arrays
        assert bits(arrays) == by_numpy(layout, rows_of(*rows), options)
        if not untouched:
            for name, array in arrays.items():
                if isinstance(array, np.ndarray) and name not in ("cu_seqlens", "rewards", "versions"):
                    array.fill(99)


def test_another_pad_value_reaches_memory_that_nobody_touched() -> None:
    buffers = Buffers(untouched=True)
    for pad in (0, 7, 7, 0):
        batch = padded(rows_of(row(), row(tokens=[1], length=1)), Options(pad_token_id=pad), buffers)
        ids = batch.arrays["input_ids"]
        assert ids[1].tolist() == [1] + [pad] * (ids.shape[1] - 1)
        assert ids.shape[1] > 1


def test_memory_is_used_again_and_asked_for_where_told() -> None:
    asked: list[int] = []

    def allocate(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        asked.append(size)
        return np.empty(size, np.uint8)

    buffers = Buffers(allocate=allocate)
    long, short = rows_of(row(), row()), rows_of(row())
    first = padded(long, out=buffers).arrays["input_ids"]
    count = len(asked)
    second = padded(short, out=buffers).arrays["input_ids"]
    assert len(asked) == count
    assert np.shares_memory(first, second)
    assert buffers.nbytes == sum(asked)
    assert not np.shares_memory(padded(short).arrays["input_ids"], padded(short).arrays["input_ids"])


def test_which_form_is_in_use_can_be_told_and_chosen(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert layouts.kernel() == form
    monkeypatch.setenv("TRAJSTORE_KERNEL", "fortran")
    with pytest.raises(InputError, match="TRAJSTORE_KERNEL is 'fortran', expected numpy or c"):
        layouts.kernel()
    monkeypatch.setattr(kernels, "_library", lambda: None)
    monkeypatch.setenv("TRAJSTORE_KERNEL", "c")
    with pytest.raises(InputError, match="the C kernel was not built"):
        layouts.kernel()
    monkeypatch.delenv("TRAJSTORE_KERNEL")
    assert layouts.kernel() == "numpy"


def test_the_c_form_is_what_writes_when_chosen(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: Any) -> None:
        raise AssertionError("numpy wrote")

    monkeypatch.setattr(kernels, "_write", refuse)
    if form == "c":
        assert padded(rows_of(row())).arrays["input_ids"].tolist() == [[5, 6, 7]]
    else:
        with pytest.raises(AssertionError, match="numpy wrote"):
            padded(rows_of(row()))


def test_the_library_of_another_source_is_never_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels.LIBRARY == build_kernel.LIBRARY
    source = tmp_path / "_kernel.c"
    source.write_text(build_kernel.SOURCE.read_text() + "\n/* newer */\n")
    (tmp_path / "_kernel.so").write_text("of an older source")
    assert build_kernel.named_after(source) != build_kernel.named_after(build_kernel.SOURCE)
    monkeypatch.setenv("CC", "/bin/false")
    assert "exited with 1" in str(build_kernel.compile_kernel(source, tmp_path / "_kernel-1.so"))
    assert [p.name for p in tmp_path.iterdir()] == ["_kernel.c"]
