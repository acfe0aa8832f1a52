"""Every row once, in an order that keys alone decide; budgets, groups, ranks and tails as described."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trajstore import InputError, ValidationError
from trajstore.plan import Int64s, Plan, Recipe, plan
from trajstore.selection import seeded_keys

lengths_of_rows = st.lists(st.integers(0, 9), max_size=40)
sizes = st.integers(1, 7)
windows = st.none() | st.integers(1, 4)
worlds = st.integers(1, 4)


def arrays(lengths: list[int], seed: int = 0) -> tuple[Int64s, np.ndarray]:
    return np.array(lengths, np.int64), seeded_keys(np.arange(len(lengths)), seed)


def lists(planned: Plan) -> list[list[int]]:
    return [batch.tolist() for batch in planned]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any recipe under which a row of 9 tokens and a group of 4 rows fit."""
    bound = draw(st.sampled_from(["batch_size", "max_tokens"]))
    least = 40 if bound == "max_tokens" else 1
    groups = draw(st.booleans())
    multiple = draw(st.integers(1, 3))
    size = draw(st.integers(4 if groups and bound == "batch_size" else least, 60 if least > 1 else 7))
    if bound == "max_tokens" and groups:
        size += 4 * 12
    return Recipe(
        **{bound: size},  # type: ignore[arg-type]  # one of two names
        layout=draw(st.sampled_from(["padded", "packed", "prompt_response"])),
        bucket_window=draw(windows),
        whole_groups=groups,
        world_size=draw(worlds),
        tail=draw(st.sampled_from(["keep", "drop", "repeat"])),
        pad_to_multiple_of=multiple,
    )


def size_of(lengths: Int64s, prompts: Int64s, recipe: Recipe) -> int:
    """What the recipe's bound counts, of the rows of one batch, from its description."""
    multiple = recipe.pad_to_multiple_of

    def up(width: int) -> int:
        return (width + multiple - 1) // multiple * multiple

    if recipe.batch_size is not None:
        return len(lengths)
    if recipe.layout == "packed":
        return up(int(lengths.sum()))
    if recipe.layout == "padded":
        return len(lengths) * up(int(lengths.max(initial=0)))
    responses = lengths - prompts
    return len(lengths) * (up(int(prompts.max(initial=0))) + up(int(responses.max(initial=0))))


@settings(max_examples=200, deadline=None)
@given(recipes(), st.lists(st.integers(0, 9), max_size=40), st.booleans(), st.data())
def test_a_plan_keeps_what_its_recipe_promises(
    recipe: Recipe, of: list[int], shuffled: bool, data: st.DataObject
) -> None:
    lengths, keys = arrays(of)
    groups = np.sort(np.array(data.draw(st.permutations([i // 4 for i in range(len(of))])), np.int64))
    groups[data.draw(st.integers(0, len(of))) :] = -1
    prompts = lengths // 3
    options: dict[str, Any] = {
        "keys": keys if shuffled else None,
        "groups": groups,
        "prompt_lengths": prompts,
    }
    try:
        planned = plan(lengths, recipe, **options)
    except InputError as error:
        assert recipe.tail == "keep"
        assert recipe.world_size > 1
        assume("ranks" not in str(error))
        raise
    batches = lists(planned)
    assert len(batches) == planned.steps * recipe.world_size
    assert all(batches), "no rank goes without"
    assert batches == [
        planned.batch(step, rank).tolist()
        for step in range(planned.steps)
        for rank in range(recipe.world_size)
    ]
    bound = recipe.batch_size or recipe.max_tokens or 0
    assert all(size_of(lengths[b], prompts[b], recipe) <= bound for b in batches)

    rows = [row for batch in batches for row in batch]
    assert len(rows) == len(of) - planned.dropped + planned.repeated
    assert len(set(rows)) == len(of) - planned.dropped
    assert not planned.dropped or recipe.tail == "drop"
    assert not planned.repeated or recipe.tail == "repeat"
    if recipe.whole_groups:
        for batch in batches:
            for code in {int(groups[row]) for row in batch} - {-1}:
                assert set(np.flatnonzero(groups == code)) <= set(batch)
    if recipe.batch_size and not recipe.whole_groups and recipe.tail != "keep":
        assert {len(batch) for batch in batches} <= {recipe.batch_size}


@settings(max_examples=60, deadline=None)
@given(recipes(), lengths_of_rows, st.randoms(use_true_random=False), st.integers(0, 5))
def test_the_order_of_the_rows_changes_nothing(recipe: Recipe, of: list[int], random: Any, seed: int) -> None:
    """Lengths repeat inside every window, so ties are broken by key and not by place."""
    lengths, keys = arrays(of, seed)
    groups = np.arange(len(of)) // 4
    order = np.array(random.sample(range(len(of)), len(of)), np.int64)

    def planned(moved: Int64s) -> Plan:
        return plan(
            lengths[moved], recipe, keys=keys[moved], groups=groups[moved], prompt_lengths=lengths[moved] // 3
        )

    try:
        plain = planned(np.arange(len(of)))
    except InputError:
        with pytest.raises(InputError):
            planned(order)
        return
    assert [order[batch].tolist() for batch in planned(order)] == lists(plain)


@settings(max_examples=40, deadline=None)
@given(lengths_of_rows, sizes, windows, st.booleans())
def test_every_row_is_in_exactly_one_batch(
    of: list[int], size: int, window: int | None, shuffled: bool
) -> None:
    lengths, keys = arrays(of)
    batches = lists(plan(lengths, Recipe(size, bucket_window=window), keys=keys if shuffled else None))
    assert sorted(row for batch in batches for row in batch) == list(range(len(of)))
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert len(batches) == -(-len(of) // size)


def test_without_keys_rows_go_as_they_come() -> None:
    assert lists(plan(np.array([5, 1, 4, 2, 3]), Recipe(2))) == [[0, 1], [2, 3], [4]]


def test_a_window_is_cut_by_length() -> None:
    batches = plan(np.array([5, 1, 4, 2, 9, 7, 8, 6]), Recipe(2, bucket_window=2))
    assert lists(batches) == [[1, 3], [2, 0], [7, 5], [6, 4]]


def test_batches_of_a_window_are_shuffled_too() -> None:
    lengths, keys = arrays(list(range(400)))
    first = [int(lengths[b].max()) for b in plan(lengths, Recipe(4, bucket_window=100), keys=keys)]
    assert first != sorted(first)
    assert sorted(first) == list(range(3, 400, 4))


def test_what_is_left_over_is_not_the_longest_rows() -> None:
    """Dropping the end of a sorted window would drop long rows in every epoch."""
    lengths = np.arange(1003)
    for bound in (Recipe(8, bucket_window=1000, tail="drop"), Recipe(max_tokens=20_000, bucket_window=1000)):
        recipe = Recipe(**vars(bound) | {"tail": "drop", "world_size": 4})
        missing = set()
        for seed in range(6):
            kept = plan(lengths, recipe, keys=seeded_keys(lengths, seed)).rows
            missing |= set(range(1003)) - set(kept.tolist())
        assert min(missing, default=0) < 700


def test_keys_shuffle_and_another_seed_shuffles_otherwise() -> None:
    lengths = np.ones(50, np.int64)
    orders = [plan(lengths, Recipe(8), keys=seeded_keys(np.arange(50), seed)).rows for seed in range(4)]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert all(order.tolist() != list(range(50)) for order in orders)


def test_every_place_is_as_likely_for_every_row() -> None:
    """Chi-square of row by place over 1,500 seeds, 5 sigma."""
    count, seeds = 12, 1500
    seen = np.zeros((count, count))
    for seed in range(seeds):
        order = plan(np.ones(count, np.int64), Recipe(5), keys=seeded_keys(np.arange(count), seed)).rows
        seen[order, np.arange(count)] += 1
    expected = seeds / count
    chi_square = ((seen - expected) ** 2 / expected).sum()
    freedom = (count - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def log_normal(count: int) -> Int64s:
    lengths = np.random.default_rng(0).lognormal(5, 1, count).clip(1, 4000)
    return lengths.astype(np.int64)


def test_bucket_windows_lower_padding() -> None:
    lengths, keys = log_normal(4000), seeded_keys(np.arange(4000), 0)
    for recipe in ({"batch_size": 16}, {"max_tokens": 16000}):
        ratios = [
            plan(lengths, Recipe(**recipe, bucket_window=window), keys=keys).padding_ratio(lengths)  # type: ignore[arg-type]  # one of two names
            for window in (None, 4, 16)
        ]
        assert ratios[0] > 1.2 * ratios[1] > 1.5 * ratios[2] > 0


@pytest.mark.parametrize(
    ("recipe", "allowed"),
    [
        (Recipe(16, world_size=4), 1.1),
        (Recipe(16, world_size=4, bucket_window=16), 1.01),
        (Recipe(max_tokens=8000, layout="packed", world_size=4), 1.1),
        (Recipe(max_tokens=8000, world_size=4, bucket_window=16), 1.1),
        (Recipe(32, world_size=4, whole_groups=True), 1.5),
    ],
)
def test_ranks_of_a_step_have_near_equal_tokens(recipe: Recipe, allowed: float) -> None:
    lengths = log_normal(4000)
    planned = plan(lengths, recipe, keys=seeded_keys(np.arange(4000), 0), groups=np.arange(4000) // 4)
    tokens = np.array([int(lengths[batch].sum()) for batch in planned]).reshape(-1, 4)
    assert (tokens.max(axis=1) / tokens.mean(axis=1)).mean() < allowed


def test_five_rows_for_two_ranks() -> None:
    lengths = np.ones(5, np.int64)

    def batches(**more: Any) -> list[list[int]]:
        return lists(plan(lengths, Recipe(2, world_size=2, **more)))

    assert batches() == [[0, 2], [1], [3], [4]]  # no rank may be left without a row in the last step
    assert batches(tail="drop") == [[0, 2], [1, 3]]
    assert batches(tail="repeat") == [[0, 2], [1, 3], [4, 1], [0, 2]]
    with pytest.raises(InputError, match="1 rows or groups are left for 2 ranks"):
        plan(np.ones(3, np.int64), Recipe(1, world_size=2))
    repeated = plan(np.ones(1, np.int64), Recipe(2, world_size=2, tail="repeat"))
    assert (lists(repeated), repeated.repeated) == ([[0, 0], [0, 0]], 3)


def test_the_budget_counts_what_a_batch_takes() -> None:
    lengths = np.array([4, 1, 3, 2])
    assert lists(plan(lengths, Recipe(max_tokens=8))) == [[0, 1], [2, 3]]
    assert lists(plan(lengths, Recipe(max_tokens=8, layout="packed"))) == [[0, 1, 2], [3]]
    assert lists(plan(lengths, Recipe(max_tokens=9, pad_to_multiple_of=4))) == [[0, 1], [2, 3]]
    prompts = np.array([4, 0, 0, 1])
    blocks = plan(lengths, Recipe(max_tokens=10, layout="prompt_response"), prompt_lengths=prompts)
    assert lists(blocks) == [[0, 1], [2, 3]]  # 2 * (4 + 1), 2 * (1 + 3)
    rounded = Recipe(max_tokens=10, layout="packed", pad_to_multiple_of=4)
    assert lists(plan(np.full(4, 3), rounded)) == [[0, 1], [2, 3]]  # 9 tokens would be padded to 12


def test_a_row_that_was_cut_inside_its_prompt_is_all_prompt() -> None:
    blocks = Recipe(max_tokens=16, layout="prompt_response")
    assert lists(plan(np.array([4, 4]), blocks, prompt_lengths=np.array([9, 0]))) == [[0, 1]]  # 2 * (4 + 4)


def test_a_batch_across_two_windows_is_of_like_length() -> None:
    lengths = np.tile(np.arange(1, 101), 6)
    planned = plan(lengths, Recipe(max_tokens=1010, bucket_window=5))  # windows of 100 rows
    assert max(int(np.ptp(lengths[batch])) for batch in planned) < 50


def test_what_cannot_be_cut_smaller_is_not() -> None:
    batches = lists(plan(np.array([100, 1, 1, 1]), Recipe(max_tokens=100, layout="packed", world_size=3)))
    assert sorted(map(len, batches)) == [1, 1, 2]
    assert sorted(row for batch in batches for row in batch) == [0, 1, 2, 3]


def test_what_cannot_be_planned_is_named() -> None:
    with pytest.raises(ValidationError, match="trajectory 1, column 'length': it takes 21 tokens") as caught:
        plan(np.array([3, 21]), Recipe(max_tokens=20))
    assert caught.value.row == 1
    with pytest.raises(InputError, match="the group of row 0 takes 3 of the 2 of batch_size"):
        plan(np.ones(3, np.int64), Recipe(2, whole_groups=True), groups=np.zeros(3, np.int64))
    with pytest.raises(InputError, match="whole_groups needs to know the groups"):
        plan(np.ones(3, np.int64), Recipe(2, whole_groups=True))
    with pytest.raises(InputError, match="needs prompt_lengths"):
        plan(np.ones(3, np.int64), Recipe(max_tokens=9, layout="prompt_response"))
    with pytest.raises(InputError, match="2 keys for 3 rows"):
        plan(np.ones(3, np.int64), Recipe(2), keys=seeded_keys(np.arange(2), 0))
    with pytest.raises(IndexError, match="no step 2 of rank 0: 2 steps of 1 ranks"):
        plan(np.ones(3, np.int64), Recipe(2)).batch(2)


def test_padding_ratio_of_a_plan() -> None:
    lengths = np.array([4, 2, 3, 0])
    assert plan(lengths, Recipe(2)).padding_ratio(lengths) == 1 - 9 / 14
    assert plan(lengths[:0], Recipe(2)).padding_ratio(lengths) == 0
    assert plan(np.zeros(2, np.int64), Recipe(2)).padding_ratio(np.zeros(2, np.int64)) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"batch_size": 1, "bucket_window": 0}, "bucket_window is 0, expected at least 1"),
        ({"batch_size": 1, "world_size": 0}, "world_size is 0, expected at least 1"),
        ({"max_tokens": -1}, "max_tokens is -1, expected at least 1"),
        ({"batch_size": 1, "max_tokens": 1}, "bounded by batch_size or by max_tokens"),
        ({}, "bounded by batch_size or by max_tokens"),
        ({"batch_size": 1, "tail": "pad"}, "tail is 'pad', expected one of keep, drop, repeat"),
        ({"batch_size": 1, "layout": "flat"}, "layout is 'flat', expected one of padded, packed"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recipe(**given)
