"""Measured preferences: which file is used, what it changes about the choice of a backend, and what a run says."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megapipe.kernels import preferences
from megapipe.kernels.preferences import VARIABLE, MeasuredPreference, PreferenceError, Preferences, find, parse
from megapipe.kernels.registry import REFERENCE, Backend, KernelOp, Registry
from megapipe.training.validation import described_choices

GPU = "NVIDIA H100 80GB HBM3"
MEASURED = Preferences(
    GPU,
    "2026-11-23 with torch 2.13",
    (
        MeasuredPreference("gelu", "bfloat16", 1024, ("cuda", "triton")),
        MeasuredPreference("gelu", "bfloat16", 16384, ("apex", "triton", "cuda")),
        MeasuredPreference("rotary", "bfloat16", 64, ("apex", "triton")),
    ),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A default folder of its own, and a GPU that torch says is there."""
    monkeypatch.setattr(preferences, "FOLDER", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    preferences.current.cache_clear()
    yield tmp_path
    preferences.current.cache_clear()


def registry(overrides: dict[str, str] | None = None) -> Registry:
    """Three backends of gelu, of which one takes even widths alone, and two of rotary."""

    def module(**functions: object) -> ModuleType:
        made = ModuleType("backend")
        made.__dict__.update(gelu=lambda x: x, rotary=lambda x: x, **functions)
        return made

    even = module(refusal=lambda device, dtype, width: f"{width} is odd" if width % 2 else None)
    fallback = Backend(REFERENCE, module())
    gelu = (Backend("triton", module()), Backend("cuda", even), Backend("apex", module()), fallback)
    rotary = (Backend("triton", module()), Backend("apex", module(), only_requested=True), fallback)
    ops = [KernelOp("gelu", ("apply",), gelu), KernelOp("rotary", ("apply",), rotary)]
    return Registry(ops, overrides, lambda: preferences.current().preferences)


def chosen(kernels: Registry, width: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
    return kernels.choice("gelu", device, dtype, width).backend


def test_the_nearest_measured_size_decides(folder: Path) -> None:
    (folder / "nvidia_h100_80gb_hbm3.yaml").write_text(MEASURED.text())
    kernels = registry()
    widths = {2: "cuda", 4094: "cuda", 4098: "apex", 10**9: "apex", 1023: "triton"}
    assert {width: chosen(kernels, width) for width in widths} == widths
    assert kernels.choice("gelu", "cuda", torch.bfloat16, 2).reasons == ("the fastest measured on this GPU",)
    assert kernels.choice("gelu", "cuda", torch.bfloat16, 1023).reasons == ("cuda: 1023 is odd",)
    assert chosen(kernels, 1024, dtype=torch.float32) == "triton"  # not measured
    assert chosen(kernels, 1024, device="cpu") == "triton"
    assert kernels.choice("rotary", "cuda", torch.bfloat16, 64).backend == "triton"
    assert chosen(kernels.with_overrides({"gelu": "triton"}), 1024) == "triton"
    assert chosen(kernels.with_overrides({"rotary": "triton"}), 1024) == "cuda"
    lines = described_choices([kernels.choice("gelu", "cuda", torch.bfloat16, 1024)], {})
    assert lines == [
        "kernels: cuda for gelu (the fastest measured on this GPU)",
        "kernels: order of backends from nvidia_h100_80gb_hbm3.yaml, measured 2026-11-23 with torch 2.13",
    ]


def test_without_a_file_the_table_decides_in_silence(folder: Path) -> None:
    assert chosen(registry(), 1024) == "triton"
    assert preferences.current() == preferences.LoadedPreferences()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("version: [", "it is not YAML"),
        ("- 1", "it has no version"),
        ("version: 0\ndevice: x", "it has version 0 instead of 1"),
        ("version: 1\ndevice: x\nmeasured: y", "it does not have the fields of version 1 ('fastest')"),
        (MEASURED.text().replace("width: 1024", "width: 0"), "width is 0"),
        (MEASURED.text().replace("[cuda, triton]", "cuda"), "backends are 'cuda'"),
        (MEASURED.text().replace(GPU, "NVIDIA A100"), f"it was measured on NVIDIA A100, and this is {GPU}"),
    ],
)
def test_unusable_files_are_ignored_with_one_line(folder: Path, text: str, note: str) -> None:
    (folder / "nvidia_h100_80gb_hbm3.yaml").write_text(text)
    assert chosen(registry(), 1024) == "triton"
    (line,) = described_choices([registry().choice("gelu", "cuda", torch.bfloat16, 64)], {})[1:]
    assert line.startswith("kernels: ignored nvidia_h100_80gb_hbm3.yaml: ")
    assert note in line
    assert "\n" not in line


def test_the_variable_names_a_file_or_none(folder: Path) -> None:
    (folder / "mine.yaml").write_text(MEASURED.text())
    assert find(GPU, {VARIABLE: str(folder / "mine.yaml")}).preferences == MEASURED
    missing = f"ignored other.yaml: No such file or directory; run make gpu-check again, or set {VARIABLE}=none"
    switched_off = f"preferences are switched off by {VARIABLE}"
    for value, note in (("none", switched_off), (str(folder / "other.yaml"), missing)):
        unused = find(GPU, {VARIABLE: value})
        assert (unused.preferences, unused.note) == (None, note)


def test_files_are_written_and_read_alike() -> None:
    assert parse(MEASURED.text()) == MEASURED
    with pytest.raises(PreferenceError, match="fields of version 1"):
        parse(MEASURED.text().replace("op: gelu", "op: [gelu]"))
