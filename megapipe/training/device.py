"""The device of a rank: its speed, its fastest precision, deterministic operations, and host memory."""

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import torch

from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.spec.ops import Precision

SIZES = {"cpu": 512, "cuda": 4096}
"""Rows and columns of the timed matrices by kind of device: similar to those of a micro-batch, but small enough that a
product takes only milliseconds where bf16 is emulated."""
REPEATS = 8
COPY_BYTES = 64 * 2**20
"""Bytes of each timed copy; more than the size of most caches."""
COPY_REPEATS = 5


def product_times(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, repeats: int, warm_up: int = 1
) -> list[float]:
    """Return the seconds of products of two matrices; see `seconds_of`. sizes: rows, inner size and columns."""
    rows, inner, columns = sizes
    # The matrices are random, because a GPU draws less power on constant ones and then runs at a higher clock.
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(rows, inner, generator=generator, device=device).to(dtype)
    right = torch.randn(inner, columns, generator=generator, device=device).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    return seconds_of(lambda: torch.mm(left, right, out=out), device, repeats, warm_up)


def product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of a product of two square matrices of `SIZES`, the shortest of several after a warm-up."""
    size = SIZES[device.type]
    return min(product_times((size, size, size), dtype, device, REPEATS))


def product_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a product of such matrices; multiplications and additions count separately."""
    return 2.0 * SIZES[device.type] ** 3 / product_seconds(dtype, device)


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a copy to page-locked host memory, or within the memory of a CPU; best of
    several."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return COPY_BYTES / min(seconds_of(lambda: target.copy_(source), device, COPY_REPEATS))


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 1) -> list[float]:
    """Return the seconds that each of `repeats` calls takes until the device has finished, after `warm_up` untimed
    calls."""
    times = []
    for _ in range(warm_up + repeats):
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return times[warm_up:]


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work; on a CPU, return at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def with_precision(
    config: PretrainConfig, mesh: Mesh, resumed: str | None, say: Callable[[str], None]
) -> PretrainConfig:
    """Return the configuration with training.precision `auto` replaced: bf16 if the device multiplies faster in it,
    else fp32. A processor without bf16 instructions emulates them, and is several times slower in bf16. A collective
    call.

    resumed: precision of the checkpoint that the run continues from, which `auto` keeps on any device. Rank 0 chooses
    for all ranks, because their timings may differ.
    """
    if config.training.precision != "auto":
        return config
    if resumed is not None:
        say(f"precision: {resumed}, as in the checkpoint")
        choice = cast(Precision, resumed)
    else:
        choice = mesh.world.all_gather_object(_faster_precision(mesh.device, say) if mesh.rank == 0 else None)[0]
    return replace(config, training=replace(config.training, precision=choice))


def _faster_precision(device: torch.device, say: Callable[[str], None]) -> Precision:
    bf16 = product_seconds(torch.bfloat16, device)
    fp32 = product_seconds(torch.float32, device)
    choice: Precision = "bf16" if bf16 < fp32 else "fp32"
    size = SIZES[device.type]
    say(
        f"precision: {choice} is faster (a {size} x {size} product takes "
        f"{bf16 * 1e3:.2f} ms in bf16, {fp32 * 1e3:.2f} ms in fp32)"
    )
    return choice


if __name__ == "__main__":
    print(_faster_precision(torch.device("cuda" if torch.cuda.is_available() else "cpu"), lambda line: None))


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def require_determinism() -> None:
    """Refuse every operation whose result may differ between two runs on one device, as training.deterministic
    requires. Call it before the first product on a GPU.

    cuBLAS reads its workspace setting once, when it starts; without a fixed workspace its results depend on which
    streams ran before.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Deterministic algorithms also fill uninitialised tensors, with one kernel launch each. No code here reads such
    # tensors before it writes them.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Option numbers of mallopt(3): the free memory at the top of the heap above which it is returned to the system, and
the size above which a block gets its own mapping."""
MAX_TRIM_THRESHOLD = 2**31 - 1
MMAP_THRESHOLDS = (2**30, 2**25)
"""Thresholds for mappings. The first one that the C library accepts is used; some accept none above 32 MiB."""
USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Environment variables with which a user chooses an allocator or its options."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep the host memory that it frees, and return whether it will.

    glibc returns large freed blocks to the operating system, which clears their pages when they are allocated again.
    Every step allocates the same blocks: sharded weights and gradients of a layer, activations of a micro-batch. If
    they are kept, they cost nothing the second time, as with the caching allocator of a GPU.

    Nothing changes if the C library has no such options, or if the environment chooses otherwise.
    """
    if any(environment.get(name) for name in USER_VARIABLES):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    kept = any(set_option(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS)
    return bool(set_option(M_TRIM_THRESHOLD, MAX_TRIM_THRESHOLD)) and kept
