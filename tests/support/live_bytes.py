"""How many bytes of tensors are alive: torch keeps no allocator statistics for the CPU."""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations create while the mode is active on this thread, until they are freed.

    Tensors from before are not counted, nor what an operation frees before it returns. A storage whose memory comes
    and goes is counted while it has it.

    Args:
        numbers: whether single numbers count too, which are tensors without dimensions: losses, counts, probes.

    Attributes:
        current: bytes alive now.
        peak: the most that were alive at once since the start or `reset_peak`.
    """

    def __init__(self, *, numbers: bool = True) -> None:
        super().__init__()
        self._numbers = numbers
        self.current = 0
        self.peak = 0
        self._seen = WeakIdKeyDictionary()
        # Another thread may drop the last reference to a tensor; re-entrant, as a collection may run inside.
        self._lock = threading.RLock()

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are alive now."""
        self.peak = self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tree_map_only(Tensor, self._ignore, (args, kwargs))
        result = func(*args, **kwargs)
        tree_map_only(Tensor, self._count, result)
        return result

    def _ignore(self, argument: Tensor) -> None:
        """Do not count an input of an operation, which may also return it or a view of it."""
        if argument.device.type != "meta":
            self._seen.setdefault(argument.untyped_storage(), None)

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if not self._numbers and not tensor.shape:
            self._seen.setdefault(storage, None)
        if storage not in self._seen:
            size = self._seen[storage] = [storage.nbytes()]
            self._add(storage.nbytes())
            weakref.finalize(storage, lambda: self._add(-size[0]))

    def __enter__(self) -> "LiveBytes":
        resize = self._resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            size = self._seen.setdefault(storage, [storage.nbytes()])
            change = num_bytes - storage.nbytes()
            if size is not None:
                size[0] += change
            self._add(change)
            return resize(storage, num_bytes)

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self.current += num_bytes
            self.peak = max(self.peak, self.current)
