"""Everything that needs a GPU, in one go and under eight minutes: the tests marked `gpu`, the benchmarks, one table.

Each part has a time limit; what one leaves over goes to the next. A part that exceeds its limit is stopped and told,
with what it had printed. Exit status 1 when a part failed or was stopped, 2 without a GPU.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --device cpu     # tries the script: the same parts at tiny sizes, without GPU tests
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
ALL_SECONDS = 470.0
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Part:
    """Commands that run at once, in the repository's root, and the seconds that they may take."""

    name: str
    commands: Sequence[Sequence[str]]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    name: str
    result: str
    detail: str
    seconds: float


def tests_part() -> Part:
    """The tests that need a GPU, a process for each file: most of their time is the compiling of kernels."""
    marked = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    return Part("tests marked gpu", [[*PYTEST, str(path.relative_to(ROOT))] for path in marked], 170)


def benchmark_parts(device: str) -> list[Part]:
    """The benchmarks; the largest model, which an aim is set for, before the others."""
    on_gpu = device == "cuda"
    kernels = ["--quick", "--json", *(["--seconds", "90", "--write"] if on_gpu else ["--ops", "rms_norm", "softmax"])]
    parts = [Part("kernel_speed, quick", [_script("kernel_speed", device, kernels)], 110)]
    sizes = [("1.3b", "bf16", 80), ("124m", "bf16", 50), ("350m", "bf16", 60)] if on_gpu else [("toy", "fp32", 60)]
    for model, precision, seconds in sizes:
        flags = ["--models", model, "--precision", precision, "--repeats", "5" if on_gpu else "2"]
        parts.append(Part(f"train_step, {model}, {precision}", [_script("train_step", device, flags)], seconds))
    return parts


def _script(name: str, device: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, f"benchmarks/{name}.py", "--device", device, *flags]


def run(part: Part, limit: float) -> Outcome:
    """Run a part's commands at once; their output goes to the terminal when they have ended."""
    start = time.monotonic()
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that a compiler's own processes can be stopped with it
        )
        for command in part.commands
    ]
    details, results = [], []
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(0.0, start + limit - time.monotonic()))
            results.append("ok" if process.returncode == 0 else "FAILED")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            results.append("stopped")
        print(output, flush=True)
        last = (output.strip().splitlines() or [""])[-1]
        details.append(detail(last) if results[-1] != "stopped" else f"after {limit:.0f} s: {last}")
    result = "FAILED" if "FAILED" in results else "stopped" if "stopped" in results else "ok"
    return Outcome(part.name, result, "; ".join(details), time.monotonic() - start)


def detail(line: str) -> str:
    """A benchmark's own summary from its JSON line, or a test run's closing line."""
    if not line.startswith("{"):
        return line
    return str(json.loads(line)["summary"])


def run_all(parts: Sequence[Part], all_seconds: float) -> list[Outcome]:
    """One after the other. A part may use what those before it left over, and gets less once they took too much."""
    deadline = time.monotonic() + all_seconds
    found = []
    for index, part in enumerate(parts):
        left = deadline - time.monotonic()
        later = sum(each.seconds for each in parts[index + 1 :])
        limit = min(left, max(part.seconds, left - later))
        if limit <= 0:
            found.append(Outcome(part.name, "stopped", "before it began: the time was up", 0.0))
            continue
        print(f"--- {part.name}, at most {limit:.0f} s", flush=True)
        found.append(run(part, limit))
    return found


def main() -> int:
    """Run every part and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print("error: no NVIDIA GPU is visible to torch; run this on a machine that has one", file=sys.stderr)
        return 2
    parts = [*([tests_part()] if device == "cuda" else []), *benchmark_parts(device)]
    outcomes = run_all(parts, ALL_SECONDS)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU; the figures mean nothing"
    print(f"{name}, torch {torch.__version__}")
    for outcome in outcomes:
        print(f"{outcome.name:<26}{outcome.result:<9}{outcome.seconds:6.0f} s  {outcome.detail}")
    return 0 if all(outcome.result == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
