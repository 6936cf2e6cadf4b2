"""Activations, optimizer state and weights that leave a rank's device for host memory and are back ahead of their use.

One copy a direction runs beside the compute. Activations of one unit leave at a time: the compute waits for the copy
before, whose memory it goes on with, so that a rank holds what its schedule says and no more, however slow copies are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.engine.host_copies import Copy, CopyStream, HostPool, copy_stream
from megapipe.engine.saved_tensors import SavedTensors
from megapipe.parallel.groups import Work
from megapipe.parallel.unit_state import UnitState

Watch = Callable[[Callable[[], None]], None]


@dataclass
class _Leaving:
    """A copy to host memory under way. finish: frees the device's side. of_state: it is optimizer state."""

    owner: object
    copy: Copy
    finish: Callable[[], None]
    of_state: bool


@dataclass
class _Arriving:
    """A copy from host memory under way. finish: puts what arrived into its place."""

    copy: Copy
    finish: Callable[[], None]


class _Arrival(Work):
    """A copy of weights to the device, awaited through `watch`."""

    def __init__(self, copy: Copy, watch: Watch) -> None:
        self._copy = copy
        self._watch = watch

    def wait(self) -> None:
        self._watch(self._copy.wait)


class Swaps:
    """A rank's traffic between its device and host memory; engines over the same stages take turns on it.

    Attributes:
        pool: the host memory of activations.
    """

    def __init__(
        self, device: torch.device, to_host: CopyStream | None = None, to_device: CopyStream | None = None
    ) -> None:
        """to_host, to_device: by default the device's own."""
        self._device = device
        self._pinned = device.type == "cuda"
        self._to_host = copy_stream(device, "offload") if to_host is None else to_host
        self._to_device = copy_stream(device, "reload") if to_device is None else to_device
        self.pool = HostPool(pinned=self._pinned)
        self._leaving: _Leaving | None = None
        self._arriving: dict[int, _Arriving] = {}
        self._home: dict[int, dict[str, Tensor]] = {}
        self._watch: Watch = _at_once

    def watch(self, wait: Watch | None) -> None:
        """Have every wait for a copy made through `wait`, which calls the function that it is given; None ends it."""
        self._watch = _at_once if wait is None else wait

    def offload(self, saved: SavedTensors) -> None:
        """Start to move activations out."""
        self._settle()
        copy = self._to_host.start(saved.leaving(self.pool))
        self._leaving = _Leaving(saved, copy, saved.left, of_state=False)

    def reload(self, saved: SavedTensors) -> None:
        """Start to bring activations back."""
        if self._leaving is not None and self._leaving.owner is saved:
            self._settle()
        copy = self._to_device.start(saved.arriving(self._device))
        self._arriving[id(saved)] = _Arriving(copy, lambda: saved.arrived(self.pool))

    def offload_state(self, state: UnitState) -> None:
        """Start to move what updates work on to where it was reloaded from, or, the first time, to new host memory."""
        self._settle()
        there = state.update_buffers()
        home = self._home.pop(id(state), {})
        here = {name: home[name] if name in home else self._host_buffer(each) for name, each in there.items()}
        copy = self._to_host.start([(here[name], there[name]) for name in there])
        state.place_update_buffers(here, in_host=True)
        self._leaving = _Leaving(state, copy, there.clear, of_state=True)

    def reload_state(self, state: UnitState) -> None:
        """Start to bring an update's buffers in; they take the place of the host's in `arrive`."""
        self._settle()
        if not state.in_host:
            return
        home = state.update_buffers()
        there = {name: torch.empty_like(each, device=self._device) for name, each in home.items()}
        copy = self._to_device.start([(there[name], home[name]) for name in home])
        self._home[id(state)] = home
        self._arriving[id(state)] = _Arriving(copy, lambda: state.place_update_buffers(there, in_host=False))

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        """Start to copy a unit's weights, `part` in host memory, to the device."""
        return _Arrival(self._to_device.start([(whole, part)]), self._watch)

    def arrive(self, owner: SavedTensors | UnitState) -> None:
        """Wait for what was reloaded, if it was; the compute that follows finds it on the device."""
        arriving = self._arriving.pop(id(owner), None)
        if arriving is not None:
            self._watch(arriving.copy.wait)
            arriving.finish()

    def end_section(self) -> None:
        """States are whole in host memory on return, for whoever reads them between steps."""
        if self._leaving is not None and self._leaving.of_state:
            self._watch(self._leaving.copy.synchronize)
            self._settle()

    def _settle(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self._watch(leaving.copy.wait)
            leaving.finish()

    def _host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pinned)


def _at_once(wait: Callable[[], None]) -> None:
    wait()
