"""The optimizer's step of one layer on one rank: what it reads and writes, and Muon's matrix products."""

from math import prod

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Device
from megapipe.layout.hardware.roofline import matrix_product_time, memory_bound_time
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.parameters import ParameterSpec


def update_seconds(config: PretrainConfig, device: Device, elements: int, precision: Precision) -> float:
    """Of one pass over `elements` parameters of a rank, by memory bandwidth.

    Each reads its gradient three times (the norm, the update, and once to be cleared), and reads and writes master and
    moments; the new weights are written besides where a master is kept.
    """
    optimizer = config.optimizer
    moments = 2 if optimizer.name in ("adamw", "muon") else (1 if optimizer.momentum else 0)
    moment_bytes = 2 if optimizer.moment_dtype == "bf16" else FULL_BYTES
    has_master = precision != "fp32" and config.training.master_weights
    weight = ELEMENT_BYTES[precision]
    each = 3 * FULL_BYTES + 2 * moments * moment_bytes
    each += 2 * FULL_BYTES + weight if has_master else 2 * weight
    return memory_bound_time(device, elements * each).seconds


def muon_seconds(config: PretrainConfig, device: Device, specs: tuple[ParameterSpec, ...], shards: int) -> float:
    """Newton-Schulz iterations on the matrices, which `shards` replicas share out whole.

    An iteration on r x c, r <= c, is X X' (2 r r c FLOP), its square (2 r r r) and their product with X (2 r r c).
    """
    total = 0.0
    for spec in specs:
        if spec.matrix:
            rows, columns = sorted((prod(spec.shape[:-1]), spec.shape[-1]))
            dtype = "bf16" if "bf16" in device.peak_flops else "fp32"
            sizes = ((rows, columns, rows), (rows, rows, rows), (rows, rows, columns))
            once = sum(matrix_product_time(device, *each, dtype).seconds for each in sizes)
            total += once * config.optimizer.muon.newton_schulz_steps
    return total / shards
