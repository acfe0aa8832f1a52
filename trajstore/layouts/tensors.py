"""Owns the step from arrays to torch tensors; torch is imported when called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def to_torch(arrays: Mapping[str, Any], device: Any = "cpu") -> dict[str, Any]:
    """Tensors over the same memory on the CPU, copies elsewhere; what is not an array stays as it is."""
    import torch

    return {
        name: torch.from_numpy(array).to(device) if isinstance(array, np.ndarray) else array
        for name, array in arrays.items()
    }


def to_nested(tensors: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The tensors of a packed batch, the flat ones of these names as jagged NestedTensors, [B, j] each.

    They lie over the memory of the flat ones and share one offsets tensor, by which torch tells that they
    are of one shape. What is not named (scalars, `cu_seqlens`, `max_seqlen`) stays as it is.
    """
    from torch.nested import nested_tensor_from_jagged

    out = dict(tensors)
    offsets: dict[str, torch.Tensor] = {}
    for name in names:
        own = f"{name}_" if f"{name}_cu_seqlens" in tensors else ""
        bounds = offsets.setdefault(own, tensors[f"{own}cu_seqlens"].long())
        longest = tensors[f"{own}max_seqlen"]
        out[name] = nested_tensor_from_jagged(tensors[name], offsets=bounds, max_seqlen=longest)
    return out
