"""Every operation of torch, as it passes the dispatcher: its shapes by FakeTensorMode, its memory on the timeline.

No device tensor has values. Small ones (flags, counts, losses) have a shadow on the host that is computed for real, so
that a program which reads them goes on as it would; what only large tensors determine is taken to be one.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from tests.fake_cuda.device import Baton, Device
from tests.fake_cuda.timeline import Memory, Place, Timeline, place

SHADOWED = 64
"""Most elements of a tensor with a shadow."""

aten = torch.ops.aten
COPY, TO_COPY = aten.copy_.default, aten._to_copy.default
SETS = (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor)
"""Operators that let a tensor look into other memory."""
WITHOUT_KERNEL = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    *SETS,
}
"""Operators that launch nothing: they allocate, or let a tensor look into other memory."""


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an operator writes."""
    return tuple(
        (position, each.name)
        for position, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


def num_bytes(tensor: Tensor) -> int:
    """Bytes that a kernel touches of a tensor; broadcast elements once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or size == 0 else 1
    return count


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on the device that is not there. A fake tensor's own `device` costs a dispatch."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "cuda"


def tensors_in(*values: Any) -> list[Tensor]:
    """Tensors among an operator's arguments or results: themselves, or in lists."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(*value)
    return tensors


class Watch(TorchDispatchMode):
    """Puts every operation on the timeline, above the FakeTensorMode that gives it its shapes.

    Attributes:
        handlers: what runs in place of an operator, such as one that fake tensors cannot run by themselves.
    """

    def __init__(self, timeline: Timeline, device: Device) -> None:
        super().__init__()
        self.timeline = timeline
        self.device = device
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._unseen = False
        self.expert_ranks = 1
        self.handlers: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._scalar,
            aten.bincount.default: self._bincount,
        }

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile trace: under any other mode it skips every frame."""
        return True

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run this thread's operations on the device that is not there."""
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(list, device="cuda") goes through the dispatcher
        with self.fake, self:
            yield

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Give results their shapes alone: the operations in the block are inside of a fused kernel."""
        self._unseen = True
        try:
            yield
        finally:
            self._unseen = False

    def install(self) -> None:
        """Put stand-ins in place of what looks into a tensor's memory, for the rest of the process."""
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (FakeTensor, "tolist", self._tolist),
            (torch.Tensor, "numpy", self._numpy),
            (torch.Tensor, "data_ptr", self._data_ptr),
            (torch.Tensor, "is_pinned", self._is_pinned),
            (torch.Tensor, "record_stream", self._record_stream),
        ]
        for owner, name, stand_in in replaced:
            setattr(owner, name, _for_fake_tensors(getattr(owner, name), stand_in))
        torch.Tensor.pin_memory = self._pin  # type: ignore[method-assign,assignment]  # of the host's own tensors too
        timeline, address, resize = self.timeline, torch.UntypedStorage.data_ptr, torch.UntypedStorage.resize_

        def data_ptr(storage: torch.UntypedStorage) -> int:
            memory = timeline.memory(storage)
            return address(storage) if memory is None else memory.address

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            memory = timeline.memory(storage)
            if memory is not None:
                timeline.resized(memory, size)
            return resize(storage, size)

        torch.UntypedStorage.data_ptr = data_ptr  # type: ignore[method-assign]
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        Baton(timeline, self.entered).install()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **kwargs)
        if self._unseen:
            return self._known(args[0]) if func is aten._local_scalar_dense.default else func(*args, **kwargs)
        handler = self.handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if func.namespace == "megapipe":  # what a compiler may not look into: its operations one by one
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        given = tensors_in(*args, *kwargs.values())
        before = [self.memory_of(each) for each in given]
        self.fake.cache_enabled = func not in SETS  # its cache would keep the storage alive
        result = func(*args, **kwargs)
        self.fake.cache_enabled = True
        returned = tensors_in(result)
        changed = tensors_in(
            [
                args[position] if position < len(args) else kwargs.get(name)
                for position, name in written_arguments(func)
            ]
        )
        copied = self._copied(func, args, kwargs, returned)
        pinned = bool(kwargs.get("pin_memory"))
        if copied is not None:
            source, _, non_blocking = copied
            pinned = non_blocking and on_device(source)  # torch's own memory for such a copy is pinned
        known = {id(each) for each in before}
        made = [memory for memory in (self.memory_of(each, pinned) for each in returned) if id(memory) not in known]
        if func not in WITHOUT_KERNEL:
            writes = [*made, *map(self.memory_of, changed)]
            if copied is not None and on_device(copied[0]) != on_device(copied[1]):
                self._copy_across(*copied)
            elif not any(map(on_device, (*given, *returned))):
                self._on_host(before, [self.memory_of(each) for each in changed])
            elif writes:
                self._kernel(func, given, before, returned, writes)
        self._shadow(func, args, kwargs, returned, changed)
        return result

    def memory_of(self, tensor: Tensor, pinned: bool = False) -> Memory:
        """The record of a tensor's storage, made when it is first seen."""
        storage = tensor.untyped_storage()
        memory = self.timeline.memory(storage)
        if memory is None:
            stream = self.device.current if on_device(tensor) else None
            memory = self.timeline.allocated(storage, stream, pinned=pinned)
        return memory

    def launch(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        stream: int | None = None,
        at: Place | None = None,
        *,
        keeps_values: bool = False,
    ) -> None:
        """One kernel of the program's own, by default on the current stream. keeps_values: of small tensors."""
        read, written = [self.memory_of(each) for each in reads], [self.memory_of(each) for each in writes]
        self._launch(name, read, written, sum(map(num_bytes, (*reads, *writes))), stream, at)
        for each in () if keeps_values else writes:
            set_shadow(each, None)

    def _launch(
        self,
        name: str,
        reads: Sequence[Memory],
        writes: Sequence[Memory],
        moved: int,
        stream: int | None = None,
        at: Place | None = None,
    ) -> None:
        self.timeline.launch(self.device.current if stream is None else stream, reads, writes, at)
        self.timeline.loaded(name)
        self.timeline.launches[name] += 1
        self.timeline.moved[name] += moved

    def _kernel(
        self,
        func: Any,
        given: Sequence[Tensor],
        before: Sequence[Memory],
        returned: Sequence[Tensor],
        writes: Sequence[Memory],
    ) -> None:
        """An operator of torch on the device. A number of the host's is an argument, which the host reads."""
        reads, written = [], {id(memory) for memory in writes}
        name = func._schema.name.removeprefix("aten::")
        shape_alone = name.startswith("new_") or name.endswith("_like")  # of what it is given: it reads no values
        for tensor, memory in zip(given, before, strict=True):
            if not on_device(tensor):
                self.timeline.host_reads(memory)
            elif id(memory) not in written and not shape_alone:
                reads.append(memory)
        self._launch(name, reads, writes, sum(map(num_bytes, given)) + sum(map(num_bytes, returned)))

    def _on_host(self, reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        for memory in reads:
            self.timeline.host_reads(memory)
        for memory in writes:
            self.timeline.host_writes(memory)

    @staticmethod
    def _copied(func: Any, args: Any, kwargs: Any, returned: Sequence[Tensor]) -> tuple[Tensor, Tensor, bool] | None:
        """(source, target, non_blocking) of a copy; None for any other operator."""
        if func is COPY:
            return args[1], args[0], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if func is TO_COPY:
            return args[0], returned[0], bool(kwargs.get("non_blocking"))
        return None

    def _copy_across(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        """A copy between the host and the device: the host waits for it unless it may not, with pinned memory."""
        to_device = on_device(target)
        host = self.memory_of(source) if to_device else self.memory_of(target)
        name = "copy to the device" if to_device else "copy to the host"
        at = place()
        self._launch(name, [self.memory_of(source)], [self.memory_of(target)], num_bytes(source), None, at)
        if not (non_blocking and host.pinned):
            kind = "blocking" if not non_blocking else "pageable"
            self.timeline.synchronize(self.timeline.record(self.device.current), f"{kind} {name}")

    # What a program learns of a tensor's values.

    def _read(self, tensor: Tensor, reason: str) -> Tensor:
        """A tensor's values, as far as they are known; the host waits for the device."""
        if on_device(tensor):
            self.timeline.synchronize(self.timeline.record(self.device.current), reason)
        else:
            self.timeline.host_reads(self.memory_of(tensor))
        value = shadow_of(tensor)
        if value is not None:
            return value
        with _disable_current_modes():
            return torch.ones(tensor.shape, dtype=tensor.dtype)

    @staticmethod
    def _known(tensor: Tensor) -> Any:
        """A number inside of a kernel, which the host does not wait for."""
        value = shadow_of(tensor)
        with _disable_current_modes():
            return 1 if value is None else value.reshape(-1)[0].item()

    def _scalar(self, tensor: Tensor) -> Any:
        value = self._read(tensor, "item")
        with _disable_current_modes():
            return value.reshape(-1)[0].item()

    def _tolist(self, tensor: Tensor) -> Any:
        value = self._read(tensor, "tolist")
        with _disable_current_modes():
            return value.tolist()

    def _numpy(self, tensor: Tensor, *, force: bool = False) -> np.ndarray:
        if on_device(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        value = self._read(tensor, "numpy")
        with _disable_current_modes():
            return value.numpy()

    def _data_ptr(self, tensor: Tensor) -> int:
        return self.memory_of(tensor).address + int(tensor.storage_offset()) * tensor.element_size()

    @staticmethod
    def _pin(tensor: Tensor, *device: Any) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor)

    def _is_pinned(self, tensor: Tensor, *device: Any) -> bool:
        return self.memory_of(tensor).pinned

    def _record_stream(self, tensor: Tensor, stream: Any) -> None:
        self.timeline.record_stream(tensor.untyped_storage()._cdata, stream.stream_id)

    def _bincount(self, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        """How often each value occurs: the rows of each of a rank's experts, and of all others, an even share of each.

        Of `expert_ranks` ranks, each has the same number of experts.
        """
        counts = torch.empty(minlength, dtype=torch.int64, device=x.device)
        self.launch("bincount", [x], [counts])
        # The number of bins is the largest value's: the host waits for it.
        self.timeline.synchronize(self.timeline.record(self.device.current), "bincount")
        with _disable_current_modes():
            ends = torch.arange(minlength) * x.numel() // (self.expert_ranks * max(minlength - 1, 1))
            set_shadow(counts, torch.cat([ends, torch.tensor([x.numel()])]).diff())
        return counts

    def _shadow(
        self, func: Any, args: Any, kwargs: Any, returned: Sequence[Tensor], changed: Sequence[Tensor]
    ) -> None:
        """Compute a small operator on the host too."""
        for each in returned:
            if isinstance(each, FakeTensor):
                each.constant = None  # FakeTensorMode's own values, which it would compute with on the device
        small = [each for each in (*returned, *changed) if has_shadow(each)]
        if not small:
            return
        values: Any = None
        if func not in WITHOUT_KERNEL:
            if func._schema.name.startswith("aten::new_"):  # of any tensor's dtype, whatever its values
                with _disable_current_modes():
                    args = (torch.empty(0, dtype=args[0].dtype), *args[1:])
            inputs = tree_map(lambda each: shadow_of(each) if isinstance(each, Tensor) else each, (args, kwargs))
            known = len(tensors_in(*inputs[0], *inputs[1].values())) == len(tensors_in(*args, *kwargs.values()))
            if known:
                values = self._computed(func, *inputs)
        tensors = tensors_in(values)
        for index, each in enumerate(returned):
            set_shadow(each, tensors[index] if index < len(tensors) else None)
        if not tensors:
            for each in changed:
                set_shadow(each, None)

    @staticmethod
    def _computed(func: Any, args: Any, kwargs: Any) -> Any:
        named = {name: each for name, each in kwargs.items() if name not in ("pin_memory", "non_blocking")}
        if named.get("device") is not None:
            named["device"] = torch.device("cpu")
        with _disable_current_modes(), torch.no_grad():
            try:
                return func(*args, **named)
            except (RuntimeError, NotImplementedError):  # an operator that the CPU does not have
                return None


def has_shadow(tensor: Tensor) -> bool:
    """Whether a tensor is one that programs look into: a number, or a short list."""
    return isinstance(tensor, FakeTensor) and tensor.dim() <= 1 and tensor.numel() <= SHADOWED


def shadow_of(tensor: Tensor) -> Tensor | None:
    """A tensor's values; None where they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor if tensor.device.type == "cpu" else None
    if not has_shadow(tensor):
        return None
    value: Tensor | None = getattr(tensor, "_fake_cuda_value", None)
    if value is None:
        set_shadow(tensor, None)
        value = tensor._fake_cuda_value  # type: ignore[attr-defined]
    return value


def set_shadow(tensor: Tensor, value: Tensor | None) -> None:
    """Let a small fake tensor have these values; None: ones, in the memory that its views share where it has any."""
    if not has_shadow(tensor):
        return
    with _disable_current_modes():
        shadow: Tensor | None = getattr(tensor, "_fake_cuda_value", None)
        if value is not None:
            tensor._fake_cuda_value = value  # type: ignore[attr-defined]
        elif shadow is not None:
            shadow.fill_(1)
        else:
            tensor._fake_cuda_value = torch.ones(tensor.shape, dtype=tensor.dtype)  # type: ignore[attr-defined]


def _for_fake_tensors(method: Any, stand_in: Callable[..., Any]) -> Any:
    @functools.wraps(method)
    def call(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        run = stand_in if isinstance(tensor, FakeTensor) else method
        return run(tensor, *arguments, **named)

    return call
