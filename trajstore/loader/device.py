"""Owns the way of a batch to a device: staging, one copy a column, padding there; knows no order of rows.

The host gathers values without padding, in their own narrow dtypes, into pinned memory. A side stream copies
each column once, then the device widens and pads it: one gather a column, through an index that all columns
of a width share. Nothing waits for the device but the thread that wants to fill staging memory again. On the
CPU the same code runs with neither pinned memory nor streams, which is how it is tested without a GPU.

Axis letters: B rows of a batch, W the width of a padded output.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trajstore.layouts import OUTLINES, BatchArrays, Buffers, Field, Options, Outline, RowSource, packed
from trajstore.layouts.fields import dtypes_of
from trajstore.layouts.kernels import Job, write
from trajstore.layouts.padded import counted, fields_of
from trajstore.layouts.place import Place, Span, packed_place

SLOTS = 2
"""Staging memories: one is filled while the other one is copied."""


@dataclass
class _Slot:
    buffers: Buffers
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True)
class Sent:
    """A batch on its way to the device.

    Attributes:
        batch: its outputs by name, tensors on the device, and its counts.
        nbytes: bytes that were copied.
        ready: after which the tensors hold their values; None when they do already.
    """

    batch: BatchArrays
    nbytes: int
    ready: torch.cuda.Event | None = field(repr=False)

    def wait(self) -> BatchArrays:
        """The batch for the stream that the caller works on; the host does not wait."""
        if self.ready is not None:
            tensors = [value for value in self.batch.arrays.values() if isinstance(value, torch.Tensor)]
            stream = torch.cuda.current_stream(tensors[0].device)
            stream.wait_event(self.ready)
            for value in tensors:
                value.record_stream(stream)  # or its memory could be given away too early
        return self.batch


def here(device: torch.device) -> torch.device:
    """The device itself, where it is one of several that the thread has chosen among.

    What `torch.cuda.set_device` chose holds for the thread that called it: a thread that makes batches ahead
    would send those of every rank to the first GPU.
    """
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class Device:
    """Sends batches of one layout to a device.

    Args:
        device: where to.
        layout, options: of the batches; `nested` is sent as `packed`.
    """

    def __init__(self, device: torch.device, layout: str, options: Options) -> None:
        self.device = device
        self._layout = layout
        self._options = options
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it so
        self._slots = [self._slot() for _ in range(SLOTS)]
        self._turn = 0

    def _slot(self) -> _Slot:
        return _Slot(Buffers() if self._stream is None else Buffers(allocate=_pinned))

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory held for staging."""
        return sum(slot.buffers.nbytes for slot in self._slots)

    def send(self, rows: RowSource) -> Sent:
        """Starts a batch; its copies may still run when this returns."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        if slot.copied is not None:
            slot.copied.synchronize()
        sending = _Sending(self.device, slot.buffers)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._layout in ("packed", "nested"):
                batch = _send_packed(rows, self._options, sending)
            else:
                batch = _send_padded(rows, OUTLINES[self._layout](rows, self._options), sending)
            ready = None if self._stream is None else self._stream.record_event()
        slot.copied = ready
        return Sent(batch, sending.nbytes, ready)


class _Sending:
    """Copies from one staging memory, and how many bytes they were."""

    def __init__(self, device: torch.device, buffers: Buffers) -> None:
        self.device = device
        self.buffers = buffers
        self.nbytes = 0

    def staged(self, array: NDArray[Any]) -> torch.Tensor:
        """An array that lies in staging memory, on the device."""
        host = torch.from_numpy(array)
        self.nbytes += array.nbytes
        return torch.empty_like(host, device=self.device).copy_(host, non_blocking=True)

    def array(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """Any array on the device, by way of staging memory."""
        staging = self.buffers.array(name, array.shape, array.dtype)
        staging[...] = array
        return self.staged(staging)


def _send_packed(rows: RowSource, options: Options, sending: _Sending) -> BatchArrays:
    batch = packed(rows, replace(options, dtypes="compact"), sending.buffers)
    dtypes = {name: f.dtype for name, f in fields_of(rows.outputs(options)).items()}
    dtypes["position_ids"] = dtypes_of(options)["ids"]
    out: dict[str, Any] = {}
    for name, value in batch.arrays.items():
        if name in dtypes:
            out[name] = sending.staged(value).to(_torch_dtype(dtypes[name]))
        else:
            out[name] = sending.array(name, value) if isinstance(value, np.ndarray) else value
    return replace(batch, arrays=out)


def _send_padded(rows: RowSource, plan: Outline, sending: _Sending) -> BatchArrays:
    fields = fields_of(plan.outputs)
    spans = {name: plan.span if f.aligned else plan.places[name].span for name, f in fields.items()}
    # Prompts, responses and ids are one field in three places: it travels once.
    names = {id(f): name for name, f in fields.items() if not _is_derived(f)}
    jobs: list[Job] = []
    staging: dict[str, NDArray[Any]] = {}
    for name in names.values():
        given, (place, bounds) = fields[name], packed_place(spans[name])
        memory = staging[name] = sending.buffers.array(name, (int(bounds[-1]) + 1,), _wire(given))
        memory[-1] = given.fill  # what every position of padding takes
        jobs.append(Job(given._replace(dtype=memory.dtype), place, memory[:-1]))
    write(jobs)
    sent = {
        name: sending.staged(memory).to(_torch_dtype(fields[name].dtype)) for name, memory in staging.items()
    }
    pads = _Pads(sending)
    arrays: dict[str, Any] = {}
    for name, output in plan.outputs.items():
        if not isinstance(output, Field):
            arrays[name] = sending.array(name, output)
        elif id(output) in names:
            index = pads.index(plan.places[name], spans[name])
            flat = sent[names[id(output)]]
            arrays[name] = flat.index_select(0, index.view(-1)).view(index.shape)
        else:
            arrays[name] = pads.derived(output, plan.places[name])
    return counted(rows, arrays, tuple(fields), plan.span, plan.size)


class _Pads:
    """Positions on the device, worked out there once for each place of a batch."""

    def __init__(self, sending: _Sending) -> None:
        self._sending = sending
        self._columns = 0
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._indices: dict[tuple[int, int], torch.Tensor] = {}

    def _column(self, values: NDArray[Any]) -> torch.Tensor:
        self._columns += 1  # the same names batch after batch: their memory is used again
        return self._sending.array(f"number {self._columns} of a row", values.astype(np.int64))[:, None]

    def positions(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, W] which value of its span each position holds, and whether it holds one."""
        found = self._places.get(id(place))
        if found is None:
            first = self._column(place.at - np.arange(place.shape[0]) * place.width)
            count = self._column(place.span.count)
            position = torch.arange(place.width, device=self._sending.device) - first
            found = self._places[id(place)] = position, (position >= 0) & (position < count)
        return found

    def index(self, place: Place, flat: Span) -> torch.Tensor:
        """[B, W] which value of a flat column, whose rows are the spans `flat`, each position takes."""
        found = self._indices.get((id(place), id(flat)))
        if found is None:
            start, bounds = packed_place(flat)
            total = int(bounds[-1])
            row = self._column(start.at + place.span.skip - flat.skip)
            position, inside = self.positions(place)
            narrow = torch.int32 if total < 2**31 - 1 else torch.int64
            found = torch.where(inside, position + row, total).to(narrow)
            self._indices[id(place), id(flat)] = found
        return found

    def derived(self, given: Field, place: Place) -> torch.Tensor:
        """A field that no row of the batch gives."""
        position, inside = self.positions(place)
        dtype = _torch_dtype(given.dtype)
        fill = torch.tensor(given.fill, dtype=dtype, device=self._sending.device)
        if given.positions:
            return torch.where(inside, position.to(dtype), fill)
        null = torch.tensor(given.null, dtype=dtype, device=self._sending.device)
        if given.split is None:
            return torch.where(inside, null, fill)
        split = self._column(given.split - place.span.skip)
        held = torch.where(position >= split, null, torch.zeros_like(null))
        return torch.where(inside, held, fill)


def _is_derived(given: Field) -> bool:
    """Whether no row gives the field, so that the device can make it from lengths."""
    return bool((given.column.length < 0).all())


def _wire(given: Field) -> np.dtype[Any]:
    """The narrowest dtype that a field can travel in without loss."""
    own = given.column.dtype
    if own is None or own.itemsize >= given.dtype.itemsize or own.kind not in "iu":
        return given.dtype
    constants = [given.fill, given.null] if (given.column.length < 0).any() else [given.fill]
    limits = np.iinfo(own)
    fits = all(c == c and c == int(c) and limits.min <= c <= limits.max for c in constants)
    return own if fits else given.dtype


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _pinned(size: int) -> NDArray[np.uint8]:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
