"""`training.precision: auto`: bf16 where the device multiplies faster in it, else fp32.

`python -m megapipe.training.precision` prints what it would choose here.

A processor without bf16 instructions emulates them and is several times slower in bf16 than in fp32.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.spec.dtypes import Precision
from megapipe.training.matrix_product import product_seconds, product_size


def with_precision(
    config: PretrainConfig, mesh: Mesh, resumed: str | None, say: Callable[[str], None]
) -> PretrainConfig:
    """The configuration with `auto` replaced by what this run computes in, the same on every rank.

    resumed: what the checkpoint that this run goes on from was trained in; `auto` keeps it, whatever the device. The
    choice is rank 0's, so that ranks whose timings differ cannot differ in it. A collective call.
    """
    if config.training.precision != "auto":
        return config
    if resumed is not None:
        say(f"precision: {resumed}, as in the checkpoint")
        choice = cast(Precision, resumed)
    else:
        choice = mesh.world.all_gather_object(_faster(mesh.device, say) if mesh.rank == 0 else None)[0]
    return replace(config, training=replace(config.training, precision=choice))


def _faster(device: torch.device, say: Callable[[str], None]) -> Precision:
    bf16, fp32 = product_seconds(torch.bfloat16, device), product_seconds(torch.float32, device)
    choice: Precision = "bf16" if bf16 < fp32 else "fp32"
    size = product_size(device)
    say(
        f"precision: {choice} is faster (a {size} x {size} product takes {bf16 * 1e3:.2f} ms in bf16, "
        f"{fp32 * 1e3:.2f} ms in fp32)"
    )
    return choice


if __name__ == "__main__":
    print(_faster(torch.device("cuda" if torch.cuda.is_available() else "cpu"), lambda line: None))
