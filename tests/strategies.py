"""Hypothesis strategies for trajectories over all fields, as users hold them: lists, arrays, tensors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from trajstore.trajectory import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryStatus,
    VersionSegment,
)

TOKEN_FLOATS = ("log_probs", "behavior_log_probs", "token_rewards", "values", "advantages", "returns")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
"""Text that UTF-8 can hold: all of Unicode but lone surrogates."""

wild_texts = st.text(max_size=6) | st.just("\ud800") | st.just("a\udfffb")
"""Any Python str, lone surrogates included."""

ids = st.integers(0, 2**31 - 1) | st.integers(0, 9)
float32s = st.floats(width=32)
int64s = st.integers(-(2**63), 2**63 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | wild_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(wild_texts, inner, max_size=3),
    max_leaves=6,
)
versions = st.builds(PolicyVersion, int64s, st.floats(), int64s)


def _strided(values: np.ndarray) -> np.ndarray:
    """The same values in every second place of a wider buffer."""
    wide = np.zeros(2 * len(values), values.dtype)
    wide[::2] = values
    return wide[::2]


@st.composite
def _boxed(draw: st.DrawFn, values: list[Any], numpy_types: list[str], torch_types: list[torch.dtype]) -> Any:
    """The values as a list, tuple, numpy array (also a strided or reversed view) or torch tensor."""
    box = draw(st.sampled_from(["list", "list", "tuple", "numpy", "torch"]))
    if box == "list":
        return values
    if box == "tuple":
        return tuple(values)
    shape = draw(st.sampled_from(["plain", "strided", "reversed"]))
    if box == "numpy":
        with np.errstate(over="ignore"):
            array = np.array(values).astype(draw(st.sampled_from(numpy_types)))
        return {"plain": array, "strided": _strided(array), "reversed": array[::-1]}[shape]
    tensor = torch.tensor(values).to(draw(st.sampled_from(torch_types)))
    if shape != "plain":
        tensor = torch.stack([tensor, tensor], dim=1)[:, 0]
    return tensor.requires_grad_() if tensor.is_floating_point() and shape == "reversed" else tensor


def token_ids(size: int) -> st.SearchStrategy[Any]:
    """`size` token ids in any box."""
    numpy_types = ["int32", "int64", "uint32", "uint64", ">i4"]
    values = st.lists(ids, min_size=size, max_size=size)
    return values.flatmap(lambda v: _boxed(v, numpy_types, [torch.int32, torch.int64]))


def masks(size: int) -> st.SearchStrategy[Any]:
    """`size` zeros and ones in any box."""
    numpy_types = ["int8", "bool", "int64", "uint8", "float32"]
    torch_types = [torch.int8, torch.bool, torch.int64, torch.float32, torch.bfloat16]
    kinds = st.sampled_from([st.integers(0, 1), st.booleans(), st.sampled_from([0.0, 1.0])])
    values = kinds.flatmap(lambda k: st.lists(k, min_size=size, max_size=size))
    return values.flatmap(lambda v: _boxed(v, numpy_types, torch_types))


def floats(size: int) -> st.SearchStrategy[Any]:
    """`size` float32 values, NaN and infinities included, in any box."""
    numpy_types = ["float32", "float64", "float16", ">f4"]
    torch_types = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    values = st.lists(float32s, min_size=size, max_size=size)
    return values.flatmap(lambda v: _boxed(v, numpy_types, torch_types))


@dataclass(frozen=True)
class Shape:
    """Tokens of the prompt and the response, and whether the object says so."""

    prompt: int
    response: int
    known: bool

    @property
    def total(self) -> int:
        return self.prompt + self.response


def _segments(draw: st.DrawFn, shape: Shape) -> list[VersionSegment]:
    """Segments that cover all tokens, in order."""
    cuts = sorted(draw(st.sets(st.integers(1, shape.total - 1), max_size=2))) if shape.total > 1 else []
    edges = [0, *cuts, shape.total]
    return [VersionSegment(a, b, draw(versions)) for a, b in pairwise(edges)]


def _version_fields(draw: st.DrawFn, shape: Shape) -> dict[str, Any]:
    kinds = ["absent", "exact", "span", "list"] + (["segments"] if shape.total else [])
    kind = draw(st.sampled_from(kinds))
    said = draw(st.sampled_from([None, {"segments": "exact"}.get(kind, kind)]))
    if kind == "absent":
        return {"version_known": said}
    if kind == "segments":
        version = draw(st.none() | versions)
        return {"version_segments": _segments(draw, shape), "version_known": said, "version": version}
    if kind == "exact":
        return {"version": draw(versions), "version_known": said}
    low, high = sorted((draw(int64s), draw(int64s)))
    return {"version_span": (low, high), "version_known": kind, "version": draw(st.none() | versions)}


@st.composite
def trajectories(draw: st.DrawFn, *, partial: bool | None = None) -> Trajectory:
    """A valid trajectory or partial trajectory; every field takes part, each may be left out."""
    shape = Shape(draw(st.integers(0, 4)), draw(st.integers(0, 5)), draw(st.integers(0, 3)) > 0)
    total = shape.total
    known = shape.known or not total
    fields: dict[str, Any] = {}
    if known and draw(st.booleans()):  # tokens are joined from these, or these are kept beside tokens
        fields["prompt_tokens"] = draw(token_ids(shape.prompt))
        fields["response_tokens"] = draw(token_ids(shape.response))
        if draw(st.booleans()):
            fields["tokens"] = draw(token_ids(total))
    else:
        fields["tokens"] = draw(token_ids(total))
        if known and draw(st.booleans()):
            fields["prompt_tokens"] = list(fields["tokens"])[: shape.prompt]
    if known:
        fields |= {"prompt_length": shape.prompt, "response_length": shape.response}
    retokenized = draw(st.integers(0, 4)) == 0
    full = known and shape.response > 0
    for name in ("attention_mask", "loss_mask", "action_mask", *TOKEN_FLOATS):
        if draw(st.booleans()) or (retokenized and "log_probs" in name):
            continue
        # A log-prob that is given for the response only would be refused under a loss on the prompt.
        shifted = full and name in TOKEN_FLOATS[2:] and draw(st.booleans())
        size = shape.response if shifted else total
        fields[name] = draw(masks(size) if name.endswith("mask") else floats(size))
    if full and "log_probs" not in fields and "loss_mask" not in fields and not retokenized:
        fields["log_probs"] = draw(floats(shape.response))
    fields |= _version_fields(draw, shape)
    optional_text = st.none() | texts
    fields |= {
        "id": draw(texts),
        "group_id": draw(optional_text),
        "prompt": draw(texts),
        "response": draw(texts),
        "reward": draw(st.floats() | st.integers(-3, 3) | float32s.map(np.float32)),
        "status": draw(st.sampled_from(TrajectoryStatus)),
        "metadata": draw(st.none() | st.dictionaries(wild_texts, json_values, max_size=3)),
        "generation_time_ms": draw(st.floats() | st.integers(0, 9)),
        "group_size": draw(st.none() | st.integers(0, 2**31 - 1)),
        "messages": draw(st.none() | st.lists(json_values, max_size=2)),
        "bootstrap_value": draw(st.none() | st.floats()),
        "log_probs_version": draw(st.none() | int64s),
        "finish_reason": draw(optional_text),
        "terminated": draw(st.none() | st.booleans()),
        "parent_id": draw(optional_text),
        "tokens_retokenized": retokenized,
        "source": draw(optional_text),
    }
    if not (draw(st.booleans()) if partial is None else partial):
        return Trajectory(**fields)
    return PartialTrajectory(
        **fields,
        continuation_prompt=draw(texts),
        start_rollout_id=draw(optional_text),
        continuation_count=draw(st.integers(0, 2**31 - 1)),
        kv_cache_ref=draw(optional_text),
    )


def same(left: Any, right: Any) -> bool:
    """Equality of dataclass instances, lists and dicts in which NaN equals NaN and 0.0 is not -0.0."""
    if isinstance(left, float) and isinstance(right, float):
        return bool(np.array(left).tobytes() == np.array(right).tobytes()) or (
            left != left and right != right
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(same(value, right[key]) for key, value in left.items())
        )
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and same(vars(left), vars(right))
    return type(left) is type(right) and bool(left == right)
