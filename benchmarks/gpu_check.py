"""Everything that needs a GPU, in one go: the tests marked `gpu`, then the benchmarks, then one table.

Each part has a time limit, so that the whole ends within eight minutes. Exit status 1 when a part failed, 2 without
a GPU.

    python benchmarks/gpu_check.py
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = [sys.executable, "benchmarks/train_step.py", "--device", "cuda", "--repeats", "7"]
SHAPE = ["--num-layers", "12", "--hidden-size", "768", "--num-heads", "12", "--sequence-length", "1024"]
PARTS: list[tuple[str, list[str], int]] = [
    ("tests marked gpu", [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests"], 240),
    ("train_step, GPT-2 124M, bf16", [*BENCHMARK, *SHAPE, "--vocabulary-size", "50304", "--precision", "bf16"], 120),
    ("train_step, GPT-2 124M, fp32", [*BENCHMARK, *SHAPE, "--vocabulary-size", "50304", "--precision", "fp32"], 110),
]


def run(command: list[str], limit: int) -> tuple[str, str, float]:
    """(result, detail, seconds) of one part; its output goes to the terminal as well."""
    start = time.perf_counter()
    try:
        finished = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return "timed out", f"after {limit} s", time.perf_counter() - start
    print(finished.stdout, flush=True)
    lines = finished.stdout.strip().splitlines() or [""]
    return "ok" if finished.returncode == 0 else "FAILED", detail(lines[-1]), time.perf_counter() - start


def detail(line: str) -> str:
    """The figure of a benchmark's JSON line, or a test run's closing line."""
    if not line.startswith("{"):
        return line
    result = json.loads(line)
    return (
        f"{result['one_process']['megapipe']['tokens_per_second']:,.0f} tokens/s, "
        f"{result['ratio_to_best_peer']} of the best peer"
    )


def main() -> int:
    """Run every part and print the table."""
    if not torch.cuda.is_available():
        print("error: no NVIDIA GPU is visible to torch; run this on a machine that has one", file=sys.stderr)
        return 2
    rows = [(name, *run(command, limit)) for name, command, limit in PARTS]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, result, figure, seconds in rows:
        print(f"{name:<32}{result:<11}{seconds:6.0f} s  {figure}")
    return 0 if all(row[1] == "ok" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
