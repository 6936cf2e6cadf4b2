"""Choosing backends: preference, refusal, demand, measured order, report."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megapipe.kernels import preferences, triton_backend
from megapipe.kernels.ops import OPS
from megapipe.kernels.preferences import VARIABLE, MeasuredPreference, PreferenceError, Preferences, find, parse
from megapipe.kernels.registry import Backend, KernelError, KernelOp, Registry
from megapipe.training.validation import described_choices


def module(**functions: object) -> ModuleType:
    """A backend's module."""
    made = ModuleType("backend")
    made.__dict__.update(functions)
    return made


def even_only(device: str, dtype: torch.dtype, width: int) -> str | None:
    """A rule such as a kernel would have."""
    return None if width % 2 == 0 else f"{width} is odd"


def op(backend: str, *functions: str) -> KernelOp:
    return KernelOp("gelu", functions, (Backend(backend, module(gelu=None)),))


def registry(**overrides: str) -> Registry:
    fast = Backend("triton", module(gelu=lambda x: x + 1, refusal=even_only))
    slow = Backend("reference", module(gelu=lambda x: x, rotary=lambda x: x))
    return Registry([KernelOp("gelu", ("apply",), (fast, slow)), KernelOp("rotary", ("apply",), (slow,))], overrides)


def test_preferred_backend_unless_it_refuses_and_its_report() -> None:
    ops = registry()
    assert ops.report() == ""
    for width, result in ((4, 1), (5, 0), (5, 0)):
        assert ops.pick("gelu", torch.zeros(2, width)).apply(0) == result
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
    assert "requested by the configuration" in ops.report()
    with pytest.raises(KernelError, match=r"triton.*5 is odd.*request 'reference'"):
        ops.pick("gelu", torch.zeros(5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: registry().pick("gellu", torch.zeros(1)), "no op 'gellu'; did you mean 'gelu'"),
        (lambda: registry(gellu="triton"), "no op 'gellu'"),
        (lambda: registry(gelu="tritn"), "no backend 'tritn'; did you mean 'triton'"),
        (lambda: op("triton", "apply"), "last backend must be 'reference'"),
        (lambda: op("reference", "apply", "backward"), "lacks gelu_backward"),
    ],
)
def test_unknown_names_and_incomplete_ops_are_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        wrong()


def test_demands_leave_the_shared_table_alone() -> None:
    demanding = OPS.with_overrides({"gelu": "reference"})
    assert demanding.choice("gelu", "cpu", torch.float32, 8).reasons == ("requested by the configuration",)
    assert OPS.choice("gelu", "cpu", torch.float32, 8).reasons != ("requested by the configuration",)


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """A registry with a backend that is given by name; its module, `backend_of_test`, has this source."""

    def made(source: str, unavailable: Callable[[str], str | None] | None = None) -> Registry:
        (tmp_path / "backend_of_test.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "backend_of_test", raising=False)
        backends = Backend("triton", "backend_of_test", unavailable), Backend("reference", module(gelu=lambda x: x))
        return Registry([KernelOp("gelu", ("apply",), backends)])

    return made


def test_named_modules_are_imported_at_their_first_tensor(lazy: Callable[..., Registry]) -> None:
    ops = lazy("def gelu(x): return x + 1", lambda device: "needs a GPU" if device == "cpu" else None)
    assert ops.pick("gelu", torch.zeros(4)).apply(0) == 0
    assert "backend_of_test" not in sys.modules
    assert ops.pick("gelu", torch.zeros(4, device="meta")).apply(0) == 1
    assert "backend_of_test" in sys.modules
    assert ops.report().splitlines() == [
        "gelu on cpu float32 [..., 4]: reference (triton: needs a GPU)",
        "gelu on meta float32 [..., 4]: triton",
    ]


def test_modules_that_cannot_be_imported_are_skipped_and_reported(lazy: Callable[..., Registry]) -> None:
    ops = lazy("import no_such_library")
    assert ops.pick("gelu", torch.zeros(4)).apply(0) == 0
    assert "(triton: cannot be imported: No module named 'no_such_library')" in ops.report()
    with pytest.raises(KernelError, match=r"requested from backend 'triton'.*no_such_library"):
        ops.with_overrides({"gelu": "triton"}).pick("gelu", torch.zeros(4))
    with pytest.raises(KernelError, match="'triton' of op 'gelu' lacks gelu"):
        lazy("other = 1").pick("gelu", torch.zeros(4))


@pytest.mark.parametrize(
    ("device", "installed", "capability", "reason"),
    [
        ("cpu", True, (9, 0), "needs a GPU"),
        ("mps", True, (9, 0), "runs on NVIDIA GPUs, not on mps"),
        ("cuda", False, (9, 0), "triton is not installed; pip install 'triton>=3.6'"),
        ("cuda", True, None, "needs a GPU"),
        ("cuda", True, (7, 5), "needs compute capability 8.0 or above, not 7.5"),
        ("cuda", True, (9, 0), None),
    ],
)
def test_why_triton_cannot_run(
    device: str,
    installed: bool,
    capability: tuple[int, int] | None,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_backend, "installed", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert triton_backend.unavailable(device) == reason


def test_cpu_picks_kernels_only_for_interpretation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    tensor = torch.zeros(2, 8)
    assert OPS.with_overrides({}).pick("layer_norm", tensor) == OPS.reference("layer_norm")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert OPS.with_overrides({}).choice("layer_norm", "cpu", torch.float32, 8).backend == "triton"
    exact = OPS.with_overrides({}).choice("layer_norm", "cpu", torch.float64, 8)
    assert str(exact).startswith("layer_norm on cpu float64 [..., 8]: reference (triton: takes float32, bfloat16 and")


def test_the_table_of_ops_needs_no_triton() -> None:
    """Neither to be imported, nor to pick the reference."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from megapipe.kernels.ops import OPS\n"
        "print(OPS.pick('softmax', torch.ones(1)).forward.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "megapipe.kernels.reference.attention"


@pytest.mark.slow
def test_transformers_imports_in_the_root_of_the_repository() -> None:
    """transformers imports any top-level package called `kernels`: from the repository root, ours."""
    root = Path(__file__).resolve().parents[2]
    code = "import megapipe.kernels.ops; from transformers import GPT2LMHeadModel"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)


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


def measured(overrides: dict[str, str] | None = None) -> Registry:
    """Three backends of gelu, of which one takes even widths alone, and two of rotary."""
    plain = {"gelu": lambda x: x, "rotary": lambda x: x}
    cuda, fallback = Backend("cuda", module(**plain, refusal=even_only)), Backend("reference", module(**plain))
    triton, apex = (Backend(name, module(**plain)) for name in ("triton", "apex"))
    requested = Backend("apex", module(**plain), only_requested=True)
    ops = [
        KernelOp("gelu", ("apply",), (triton, cuda, apex, fallback)),
        KernelOp("rotary", ("apply",), (triton, requested, fallback)),
    ]
    return Registry(ops, overrides, lambda: preferences.current().preferences)


def chosen(kernels: Registry, width: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str:
    return kernels.choice("gelu", device, dtype, width).backend


def test_the_nearest_measured_size_decides(folder: Path) -> None:
    (folder / "nvidia_h100_80gb_hbm3.yaml").write_text(MEASURED.text())
    kernels = measured()
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
    assert chosen(measured(), 1024) == "triton"
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
    assert chosen(measured(), 1024) == "triton"
    (line,) = described_choices([measured().choice("gelu", "cuda", torch.bfloat16, 64)], {})[1:]
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
