"""Choosing backends: preference, refusal, demand, report."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Backend, KernelError, Op, Registry


def module(**functions: object) -> ModuleType:
    """A backend's module."""
    made = ModuleType("backend")
    made.__dict__.update(functions)
    return made


def even_only(device: str, dtype: torch.dtype, width: int) -> str | None:
    """A rule such as a kernel would have."""
    return None if width % 2 == 0 else f"{width} is odd"


def registry(**overrides: str) -> Registry:
    fast = Backend("triton", module(apply=lambda x: x + 1, refusal=even_only))
    slow = Backend("reference", module(apply=lambda x: x))
    return Registry([Op("gelu", ("apply",), (fast, slow)), Op("rotary", ("apply",), (slow,))], overrides)


def test_preferred_backend_unless_it_refuses() -> None:
    ops = registry()
    assert ops.pick("gelu", torch.zeros(3, 4)).apply(0) == 1
    assert ops.pick("gelu", torch.zeros(3, 5)).apply(0) == 0


def test_report_gives_every_choice_and_reason() -> None:
    ops = registry()
    assert ops.report() == ""
    for width in (4, 5, 5):
        ops.pick("gelu", torch.zeros(2, width))
    ops.pick("rotary", torch.zeros(2, 4, dtype=torch.bfloat16))
    assert ops.report().splitlines() == [
        "gelu on cpu float32 [..., 4]: triton",
        "gelu on cpu float32 [..., 5]: reference (triton: 5 is odd)",
        "rotary on cpu bfloat16 [..., 4]: reference",
    ]


def test_a_demanded_backend_runs_or_fails() -> None:
    assert registry(gelu="reference").pick("gelu", torch.zeros(4)).apply(0) == 0
    ops = registry(gelu="triton")
    assert ops.pick("gelu", torch.zeros(4)).apply(0) == 1
    assert "demanded by the configuration" in ops.report()
    with pytest.raises(KernelError, match=r"triton.*5 is odd.*ask for 'reference'"):
        ops.pick("gelu", torch.zeros(5))


def test_unknown_names_give_the_nearest() -> None:
    with pytest.raises(KernelError, match="no op 'gellu'; did you mean 'gelu'"):
        registry().pick("gellu", torch.zeros(1))
    with pytest.raises(KernelError, match="no op 'gellu'"):
        registry(gellu="triton")
    with pytest.raises(KernelError, match="no backend 'tritn'; did you mean 'triton'"):
        registry(gelu="tritn")


def test_an_op_needs_a_reference_and_every_function() -> None:
    with pytest.raises(KernelError, match="last backend must be 'reference'"):
        Op("gelu", ("apply",), (Backend("triton", module(apply=None)),))
    with pytest.raises(KernelError, match="lacks backward"):
        Op("gelu", ("apply", "backward"), (Backend("reference", module(apply=None)),))


def test_demands_leave_the_shared_table_alone() -> None:
    demanding = OPS.with_overrides({"gelu": "reference"})
    assert demanding.choice("gelu", "cpu", torch.float32, 8).reasons == ("demanded by the configuration",)
    assert OPS.choice("gelu", "cpu", torch.float32, 8).reasons != ("demanded by the configuration",)


def test_transformers_imports_beside_our_kernels_folder() -> None:
    """transformers imports any top-level package called `kernels`: from the repository root, ours."""
    root = Path(__file__).resolve().parents[2]
    code = "import megapipe.kernels.ops; from transformers import GPT2LMHeadModel"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
