"""csrc/ compiles without warnings, spills or short accesses, and loads; when an installation builds it."""

import os
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

from megapipe.kernels.cuda_backend import build
from megapipe.kernels.cuda_backend.library import CudaError, Library
from tests.kernels.cases import needs_triton
from tests.kernels.emulated import SOURCES

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")

BUILDS = [
    pytest.param(*each, marks=() if each[1] == 90 else pytest.mark.exhaustive)
    for each in product(SOURCES, (80, 90, 100))
]


def compiled(source: Path, architecture: int, folder: Path) -> tuple[Path, str]:
    """(library of one file for one architecture, what ptxas said about its kernels)."""
    nvcc = build.find_nvcc()
    assert nvcc is not None
    output = folder / f"{source.stem}.so"
    command = [*build.command(nvcc, [source], output, [architecture]), "-Xptxas", "-v"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return output, done.stderr


def machine_code(library: Path) -> dict[str, str]:
    """Kernel -> its instructions, by the tools that triton brings."""
    import triton

    tool = Path(triton.knobs.nvidia.cuobjdump.path)
    environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    dump = subprocess.run([tool, "-sass", library], env=environment, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"\n\s+Function : (\S+)\n", dump)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@needs_nvcc
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("source", "architecture"), BUILDS, ids=lambda part: getattr(part, "stem", str(part)))
def test_machine_code(source: Path, architecture: int, tmp_path: Path) -> None:
    """No warning, no spill; kernels that take aligned rows read and write them 16 bytes at a time."""
    library, report = compiled(source, architecture, tmp_path)
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert used
    assert set(used) == {("0", "0", "0")}, report
    # Mangled names end their template arguments in Lb1E where accesses are vectors.
    vectors = {name: code for name, code in machine_code(library).items() if "Lb1E" in name and "Lb0ELb1E" not in name}
    assert vectors
    for name, code in vectors.items():
        assert re.search(r"LDG\.E\S*\.128", code), name
        assert re.search(r"STG\.E\S*\.128", code), name


@needs_nvcc
@pytest.mark.slow
def test_a_whole_build_loads_and_reports_errors(tmp_path: Path) -> None:
    """For every architecture. A machine without a GPU gets CUDA's own words for it."""
    output = tmp_path / "built.so"
    build.build(SOURCES, output)
    library = Library(output)
    assert library.norm_slabs(4096, 1024) == 512
    with pytest.raises(CudaError, match="softmax_input_gradient failed: invalid argument"):
        library.launch_plain("softmax_input_gradient", 0, 0, 0, -1, 1, 1.0, 0, stream=0)


@needs_nvcc
def test_a_compiler_s_message_reaches_the_user(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.cu"
    wrong.write_text("int broken(")
    with pytest.raises(build.BuildError, match=r"nvcc failed:(.|\n)*wrong\.cu"):
        build.build([wrong], tmp_path / "wrong.so")


@pytest.mark.parametrize(
    ("demand", "nvcc", "gpu", "reason"),
    [
        *((None, "nvcc", True, None), ("1", "nvcc", False, None)),
        (None, "nvcc", False, "no GPU was found"),
        (None, None, True, "nvcc was not found"),
        ("0", "nvcc", True, "MEGAPIPE_CUDA=0"),
        ("1", None, True, build.BuildError("there is no nvcc: put it on the PATH")),
        ("yes", "nvcc", True, build.BuildError("MEGAPIPE_CUDA is 'yes'; 1 builds")),
    ],
)
def test_when_an_installation_builds_them(
    demand: str | None, nvcc: str | None, gpu: bool, reason: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """build.py is also run by its path, so its own names are replaced."""
    monkeypatch.delenv("MEGAPIPE_CUDA", raising=False)
    if demand is not None:
        monkeypatch.setenv("MEGAPIPE_CUDA", demand)
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(build, "has_gpu", lambda: gpu)
    if isinstance(reason, build.BuildError):
        with pytest.raises(build.BuildError, match=str(reason)):
            build.reason_to_skip()
    else:
        assert (build.reason_to_skip() or "").startswith(str(reason or ""))
