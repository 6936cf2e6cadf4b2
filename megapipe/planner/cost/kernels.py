"""Times of a layer's kernels on a device: each by the roofline of what its op declares (`spec.ops.Kernel`)."""

from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Device
from megapipe.layout.hardware.device_type import device_type
from megapipe.layout.hardware.roofline import KernelTime, matrix_product_time, memory_bound_time
from megapipe.layout.prediction import layout_costs
from megapipe.spec.ops import Kernel, KernelPhase, MicrobatchShape
from megapipe.spec.parameters import LayerSpec

UNFUSED_LOSS_BYTES = 52
"""Of a logit that the steps of a loss in fp32 read and write: a copy in fp32 (6), maximum (4), difference (8),
exponential (8), sum (4), quotient (8), product with the outer gradient (8), a copy in 16 bits (6). As in Megatron-LM's
megatron/core/tensor_parallel/cross_entropy.py."""


@dataclass(frozen=True)
class TimedKernel:
    """One kernel of a micro-batch: in which phase it runs, and its time. `recompute`: a forward's, run again in the
    backward because recompute.method selective or recompute.logits asks for it."""

    name: str
    phase: KernelPhase
    time: KernelTime


@dataclass(frozen=True)
class LayerKernels:
    """All kernels of one layer for one micro-batch. Iterating gives them in no particular order.

    config: with parallel.data filled in. megatron_kernels: as in `Assumptions`. Passes over memory are those of fused
    kernels: a norm reads and writes its rows once, bias and activation are one kernel, so are dropout and the residual
    sum.
    """

    config: PretrainConfig
    layer: LayerSpec
    device: Device
    megatron_kernels: bool = False

    def __iter__(self) -> Iterator[TimedKernel]:
        costs = layout_costs(self.config, device=device_type(self.device), layers=(self.layer,))
        shape = costs.shape(self.layer)
        for op in costs.ops(self.layer):
            for kernel in op.kernels():
                chosen = self._unfused_loss(kernel, shape) if self.megatron_kernels else kernel
                if chosen is not None:
                    yield TimedKernel(chosen.name, chosen.phase, self._time(chosen, shape))

    def _unfused_loss(self, kernel: Kernel, shape: MicrobatchShape) -> Kernel | None:
        """Return a kernel as Megatron-LM has it: its loss keeps its logits and is a sequence of kernels."""
        if kernel.name != "loss" or not kernel.moved:
            return kernel
        logits = kernel.moved / (3 * shape.width)
        return None if kernel.phase == "recompute" else kernel._replace(moved=logits * UNFUSED_LOSS_BYTES)

    def _time(self, kernel: Kernel, shape: MicrobatchShape) -> KernelTime:
        # This project's kernels store no dropout mask: the backward recomputes it from indices.
        moved = None if kernel.moved is None else kernel.moved + kernel.mask * self.megatron_kernels
        if kernel.product is None:
            return memory_bound_time(self.device, moved or 0.0)
        dtype = kernel.dtype if kernel.dtype in self.device.peak_flops else shape.precision
        rows, inner, columns, batch = kernel.product
        time = matrix_product_time(self.device, rows, inner, columns, dtype, batch, kernel.out_bytes)
        if moved is not None:
            return KernelTime(kernel.compute * time.compute, moved / self.device.reached_bandwidth, time.launch)
        return KernelTime(kernel.times * time.compute, kernel.times * time.memory, kernel.times * time.launch)
