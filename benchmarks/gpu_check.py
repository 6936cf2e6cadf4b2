"""Everything that needs a GPU, in one go and under eight minutes: the tests marked `gpu`, the benchmarks, one table.

Each part has a time limit; what one leaves over goes to the next. A part that exceeds its limit is stopped and told,
with what it had found by then. What parts print goes to files, and the report is written anew after each of them, so
that nothing found is lost with a later part. csrc/ is built first, beside the first tests, where nvcc is there and the
library is not. Exit status 1 when a part failed or was stopped, 2 without a GPU.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --write results          # instead of benchmarks/results
    python benchmarks/gpu_check.py --device cpu     # tries the script: the same parts at tiny sizes, without GPU tests
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
ALL_SECONDS = 460.0
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short")
BUILD = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
OF_CSRC = "tests/gpu/test_cuda_kernels.py"
TIMED = ("tests/gpu/test_kernel_clock.py", "tests/gpu/test_trace.py")
"""These ask how long the GPU takes, and need it for themselves."""


@dataclass(frozen=True)
class Part:
    """Commands that run at once, in the repository's root, and the seconds that they may take.

    `{seconds}` in an argument becomes the limit less `spare`: what is begun by then has the rest to end in.
    """

    name: str
    commands: Sequence[Sequence[str]]
    seconds: float
    spare: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a part. output: what its commands printed."""

    name: str
    result: str
    detail: str
    seconds: float
    output: str = ""

    def __str__(self) -> str:
        return f"{self.name:<26}{self.result:<9}{self.seconds:6.0f} s  {self.detail}"


def tests_parts() -> list[Part]:
    """The tests that need a GPU, a process for each file: most of their time is the compiling of kernels."""
    marked = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    files = [str(path.relative_to(ROOT)) for path in marked]
    commands = {file: [*PYTEST, file] for file in files}
    if build_is_due():
        commands[OF_CSRC] = ["sh", "-c", f"MEGAPIPE_CUDA=1 {shlex.join(BUILD)} && {shlex.join(commands[OF_CSRC])}"]
    together = [commands[file] for file in files if file not in TIMED]
    return [Part("tests marked gpu", together, 140), Part("tests of clocks", [[*PYTEST, *TIMED]], 20)]


def build_is_due() -> bool:
    """Whether csrc/ is not built and can be."""
    sys.path.insert(0, str(ROOT))
    from megapipe.kernels.cuda_backend import build, library

    return not library.PATH.exists() and build.find_nvcc() is not None


def benchmark_parts(device: str, results: Path | None) -> list[Part]:
    """The benchmarks; the largest model, which an aim is set for, before the others."""
    on_gpu = device == "cuda"
    kernels = ["--quick", "--json", "--seconds", "{seconds}", *([] if on_gpu else ["--ops", "rms_norm", "softmax"])]
    if results is not None:
        kernels += ["--write", str(results)]
    parts = [Part("kernel_speed, quick", [_script("kernel_speed", device, kernels)], 110, spare=30)]
    sizes = [("1.3b", "bf16", 90), ("124m", "bf16", 45), ("350m", "bf16", 55)] if on_gpu else [("toy", "fp32", 60)]
    for model, precision, seconds in sizes:
        flags = ["--models", model, "--precision", precision, "--repeats", "5" if on_gpu else "2"]
        flags += ["--seconds", "{seconds}"]
        command = _script("train_step", device, flags)
        parts.append(Part(f"train_step, {model}, {precision}", [command], seconds, spare=10))
    return parts


def _script(name: str, device: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, f"benchmarks/{name}.py", "--device", device, *flags]


def run(part: Part, limit: float) -> Outcome:
    """Run a part's commands at once; their output goes to the terminal when they have ended."""
    start = time.monotonic()
    own = f"{max(limit - part.spare, 1.0):.0f}"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    details, results, outputs = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, command in enumerate(part.commands):
            log = Path(folder, str(number))  # a pipe would be full one day, and its process wait until it is read
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [argument.replace("{seconds}", own) for argument in command],
                    cwd=ROOT,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that a compiler's own processes can be stopped with it
                )
            running.append((process, log))
        for process, log in running:
            try:
                process.wait(timeout=max(0.0, start + limit - time.monotonic()))
                results.append("ok" if process.returncode == 0 else "FAILED")
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                results.append("stopped")
            output = log.read_text("utf-8", errors="replace")
            print(output, flush=True)
            outputs.append(output)
            told = detail(output)
            details.append(told if results[-1] != "stopped" else f"after {limit:.0f} s: {told}")
    result = "FAILED" if "FAILED" in results else "stopped" if "stopped" in results else "ok"
    return Outcome(part.name, result, "; ".join(details), time.monotonic() - start, "\n".join(outputs))


def detail(output: str) -> str:
    """A benchmark's own summary from its last JSON line, or the last line of all."""
    lines = output.strip().splitlines() or [""]
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return str(json.loads(line)["summary"])
            except (ValueError, KeyError):  # cut off, or another program's
                continue
    return lines[-1]


def run_all(parts: Sequence[Part], all_seconds: float, report: Path | None = None) -> list[Outcome]:
    """One after the other. A part may use what those before it left over, and gets less once they took too much.

    report: file that is written anew after each.
    """
    deadline = time.monotonic() + all_seconds
    found: list[Outcome] = []
    for index, part in enumerate(parts):
        left = deadline - time.monotonic()
        later = sum(each.seconds for each in parts[index + 1 :])
        limit = min(left, max(part.seconds, left - later))
        if limit <= 0:
            found.append(Outcome(part.name, "stopped", "before it began: the time was up", 0.0))
        else:
            print(f"--- {part.name}, at most {limit:.0f} s", flush=True)
            found.append(run(part, limit))
        if report is not None:
            report.write_text(document(found), encoding="utf-8")
    return found


def device_name() -> str:
    """The GPU's own name."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU; the figures mean nothing"


def document(outcomes: Sequence[Outcome]) -> str:
    """The table in Markdown, with what training printed. Kernels have a file of their own."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    table = "\n".join(str(outcome) for outcome in outcomes)
    parts = [
        f"# GPU check on {device_name()}",
        f"{datetime.date.today()}, {versions}. `{shlex.join(['python', 'benchmarks/gpu_check.py', *sys.argv[1:]])}`",
        f"```\n{table}\n```",
    ]
    for outcome in outcomes:
        if outcome.name.startswith("train_step"):
            lines = [line for line in outcome.output.splitlines() if not line.startswith("{")]
            parts.append(f"## {outcome.name}\n\n```\n" + "\n".join(lines).strip() + "\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Run every part and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="of the results; a GPU's go to benchmarks/results"
    )
    chosen = parser.parse_args()
    on_gpu = chosen.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("error: no NVIDIA GPU is visible to torch; run this on a machine that has one", file=sys.stderr)
        return 2
    results = chosen.write or (ROOT / "benchmarks/results" if on_gpu else None)
    report = None
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        report = results / f"gpu_check_{re.sub(r'[^a-z0-9]+', '_', device_name().lower()).strip('_')}.md"
    parts = [*(tests_parts() if on_gpu else []), *benchmark_parts(chosen.device, results)]
    outcomes = run_all(parts, ALL_SECONDS, report)
    print(f"{device_name()}, torch {torch.__version__}")
    print("\n".join(str(outcome) for outcome in outcomes))
    return 0 if all(outcome.result == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
