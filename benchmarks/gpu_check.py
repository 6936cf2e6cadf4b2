"""Run everything that needs a GPU, and write a report: tests marked `gpu`, benchmarks, and checks of several ranks.

This takes under eight minutes on one GPU. With two or more, checks of links, groups, schedules and layouts follow,
each in a run of torchrun. Each part has a time limit; time that a part does not use is available to later parts. A
part that exceeds its limit is stopped, and its output so far is reported. The report is rewritten after each part.
csrc/ is built alongside the first tests, if nvcc exists and the library does not.

The results of finished parts are kept: a second start continues after the last of them, also after a crash of the
machine. A part that failed, was stopped, or was running when the check ended is only repeated with --again. Results of
another device, revision, or version of torch, and of before apex or nvcc was installed, are not used.

The exit status is 1 if a part failed or was stopped, and 2 without a GPU.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --again                  # what did not pass; --again all: everything
    python benchmarks/gpu_check.py --write results          # instead of benchmarks/results
    python benchmarks/gpu_check.py --device cpu     # tries the script: the same parts at tiny sizes, without GPU tests
"""

import argparse
import datetime
import getpass
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapipe.kernels import apex_backend, preferences  # noqa: E402
from megapipe.kernels.cuda_backend import build, library  # noqa: E402
from megapipe.kernels.ops import OPS  # noqa: E402
from megapipe.kernels.preferences import MeasuredPreference, Preferences  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
ALL_SECONDS = 460.0
"""Seconds for all parts that need one GPU."""
RANKS_SECONDS = 60.0
"""Seconds for each part that needs two or more GPUs."""
FAILED_LINES = 60
"""Number of last lines of output that the report shows for a part that did not pass."""
ALL_SIZES_SECONDS = 1500.0
KERNELS = "kernel_speed"
RUNNING, OK, FAILED, STOPPED = "running", "ok", "FAILED", "stopped"
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short")
BUILD = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
OF_CSRC = "tests/gpu/test_cuda_kernels.py"
TIMED = ("tests/gpu/test_kernel_clock.py", "tests/gpu/test_trace.py")
"""Tests that measure times of the GPU, so no other test may run at the same time."""


@dataclass(frozen=True)
class Part:
    """Commands that run at the same time, in the root of the repository, and the seconds that they may take.

    `{seconds}` in an argument is replaced by the limit minus `spare`, the seconds that are left for what has started.
    """

    name: str
    commands: Sequence[Sequence[str]]
    seconds: float
    spare: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a part. output: output of its commands."""

    name: str
    result: str
    detail: str
    seconds: float
    output: str = ""

    def __str__(self) -> str:
        return f"{self.name:<26}{self.result:<9}{self.seconds:6.0f} s  {self.detail}"


def tests_parts() -> list[Part]:
    """Return the tests that need a GPU, with a process for each file, because they mostly wait for compilers."""
    marked = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))
    files = [str(path.relative_to(ROOT)) for path in marked]
    commands = {file: [*PYTEST, file] for file in files}
    if build_is_due():
        commands[OF_CSRC] = ["sh", "-c", f"MEGAPIPE_CUDA=1 {shlex.join(BUILD)} && {shlex.join(commands[OF_CSRC])}"]
    parallel = [commands[file] for file in files if file not in TIMED]
    return [Part("tests marked gpu", parallel, 140), Part("tests of clocks", [[*PYTEST, *TIMED]], 20)]


def build_is_due() -> bool:
    """Return whether csrc/ is not built but can be built."""
    return not library.PATH.exists() and build.find_nvcc() is not None


def benchmark_parts(device: str, results: Path | None, all_sizes: bool = False) -> list[Part]:
    """Return the benchmarks. The largest model, which has an aim, comes before the others.

    all_sizes: measure all sizes of every op, for `ALL_SIZES_SECONDS`, instead of one size.
    """
    on_gpu = device == "cuda"
    kernels = ["--json", "--seconds", "{seconds}", *([] if on_gpu else ["--ops", "rms_norm", "softmax"])]
    kernels += [] if all_sizes else ["--quick"]
    if results is not None:  # the default folder needs no path, because the file contains the command
        kernels += ["--write", *([] if results == RESULTS else [str(results)])]
    kernel_seconds = ALL_SIZES_SECONDS if all_sizes else 110
    parts = [Part(KERNELS, [_script("kernel_speed", device, kernels)], kernel_seconds, spare=30)]
    sizes = [("1.3b", "bf16", 90), ("124m", "bf16", 45), ("350m", "bf16", 55)] if on_gpu else [("toy", "fp32", 60)]
    for model, precision, seconds in sizes:
        flags = ["--models", model, "--precision", precision, "--repeats", "5" if on_gpu else "2"]
        flags += ["--seconds", "{seconds}"]
        command = _script("train_step", device, flags)
        parts.append(Part(f"train_step, {model}, {precision}", [command], seconds, spare=10))
    return parts


def ranks_parts(device: str) -> list[Part]:
    """Return the parts that several ranks run together: on GPUs one part for each check, on a CPU one for all."""
    ranks = torch.cuda.device_count() if device == "cuda" else 2
    if ranks < 2:
        return []
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = [*start, "benchmarks/ranks_check.py", "--device", device, "--checks"]
    if device == "cpu":
        return [Part("2 ranks on gloo", [[*run, "all"]], 120)]
    from benchmarks.ranks_check import checks  # imports all of training, for two seconds

    return [Part(f"{ranks} ranks: {check.name}", [[*run, check.name]], RANKS_SECONDS) for check in checks(ranks)]


def _environment() -> dict[str, str]:
    """Return the environment of programs that import megapipe from this repository."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _script(name: str, device: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, f"benchmarks/{name}.py", "--device", device, *flags]


def run(part: Part, limit: float) -> Outcome:
    """Run a part's commands at the same time, and print their output when they have ended."""
    start = time.monotonic()
    command_seconds = f"{max(limit - part.spare, 1.0):.0f}"
    details, results, outputs = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, command in enumerate(part.commands):
            log = Path(folder, str(number))  # not a pipe, because a process waits when its pipe is full
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [argument.replace("{seconds}", command_seconds) for argument in command],
                    cwd=ROOT,
                    env=_environment(),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that processes of a compiler can be stopped too
                )
            running.append((process, log))
        for process, log in running:
            try:
                process.wait(timeout=max(0.0, start + limit - time.monotonic()))
                results.append(OK if process.returncode == 0 else FAILED)
            except subprocess.TimeoutExpired:
                _kill(process.pid)
                process.wait()
                results.append(STOPPED)
            output = log.read_text("utf-8", errors="replace")
            print(output, flush=True)
            outputs.append(output)
            line = detail(output)
            details.append(line if results[-1] != STOPPED else f"after {limit:.0f} s: {line}")
    result = FAILED if FAILED in results else STOPPED if STOPPED in results else OK
    return Outcome(part.name, result, "; ".join(details), time.monotonic() - start, "\n".join(outputs))


def _kill(process: int) -> None:
    """Kill a process, its group, and all processes that they started: the ranks of torchrun are in other sessions."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            parents[int(path.parent.name)] = int(path.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    started = {process}
    while more := {child for child, parent in parents.items() if parent in started} - started:
        started |= more
    os.killpg(process, signal.SIGKILL)
    for child in started - {process}:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def detail(output: str) -> str:
    """Return the summary in a benchmark's last JSON line, or else the last line of the output."""
    lines = output.strip().splitlines() or [""]
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return str(json.loads(line)["summary"])
            except (ValueError, KeyError):  # the line is cut off, or from another program
                continue
    return lines[-1]


class Progress:
    """The outcomes of finished parts in a file, so that a later start of the same check continues after them.

    setting: device, versions and revision; a file with another setting is not used. note: the reason why earlier
    results are not used, or None.
    """

    def __init__(self, path: Path, setting: Mapping[str, str]) -> None:
        self.path = path
        self.setting = dict(setting)
        self.note: str | None = None
        self._outcomes: dict[str, Outcome] = {}
        with suppress(FileNotFoundError):
            self._read(path.read_text("utf-8"))

    def _read(self, text: str) -> None:
        try:
            values = json.loads(text)
            changed = [key for key, value in self.setting.items() if values["setting"].get(key) != value]
            outcomes = {name: Outcome(**fields) for name, fields in values["parts"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.note = f"{self.path.name} cannot be read and is replaced ({type(error).__name__})"
            return
        if changed:
            self.note = f"earlier results are not used: another {', '.join(changed)}"
            return
        for name, outcome in outcomes.items():
            crashed = Outcome(name, FAILED, "the check ended while this part was running", outcome.seconds)
            self._outcomes[name] = crashed if outcome.result == RUNNING else outcome

    def finished(self, name: str, again: str | None) -> Outcome | None:
        """Return the outcome of a part in an earlier start; None if the part has to run.

        again: repeat `failed` parts or `all` parts; None repeats none.
        """
        outcome = self._outcomes.get(name)
        if outcome is None or again == "all" or (again == "failed" and outcome.result != OK):
            return None
        return outcome

    def store(self, outcome: Outcome) -> None:
        """Store an outcome. The file is replaced as a whole."""
        self._outcomes[outcome.name] = outcome
        parts = {name: asdict(each) for name, each in self._outcomes.items()}
        new_file = self.path.with_suffix(".new")
        new_file.write_text(json.dumps({"setting": self.setting, "parts": parts}, indent=1), encoding="utf-8")
        new_file.replace(self.path)


def run_all(
    parts: Sequence[Part],
    all_seconds: float,
    report: Path | None = None,
    progress: Progress | None = None,
    again: str | None = None,
) -> list[Outcome]:
    """Run the parts in order. A part may use time that earlier parts left, and gets less if they took too much.

    report: file that is rewritten after each part. progress: outcomes of earlier starts, which are only repeated as
    `again` says.
    """
    earlier = {} if progress is None else {part.name: progress.finished(part.name, again) for part in parts}
    waiting = [part for part in parts if earlier.get(part.name) is None]
    deadline = time.monotonic() + all_seconds
    outcomes: list[Outcome] = []
    for part in parts:
        outcome = earlier.get(part.name)
        if outcome is not None:
            print(f"--- {part.name}: {outcome.result} in an earlier start", flush=True)
        else:
            waiting.remove(part)
            remaining = deadline - time.monotonic()
            limit = min(remaining, max(part.seconds, remaining - sum(each.seconds for each in waiting)))
            outcome = _run_within(part, limit, progress)
        outcomes.append(outcome)
        if report is not None:
            report.write_text(document(outcomes), encoding="utf-8")
    return outcomes


def _run_within(part: Part, limit: float, progress: Progress | None) -> Outcome:
    if limit <= 0:
        return Outcome(part.name, STOPPED, "not started: no time was left", 0.0)
    print(f"--- {part.name}, at most {limit:.0f} s", flush=True)
    if progress is not None:
        progress.store(Outcome(part.name, RUNNING, "", 0.0))
    outcome = run(part, limit)
    if progress is not None:
        progress.store(outcome)
    return outcome


def measured_preferences(output: str, device: str) -> Preferences | None:
    """Return the order of backends by the figures that kernel_speed.py printed; None if no op has two measured
    backends.

    If there are times with the backward, they are used. The times of all cases of an op and width are added. A backend
    is left out if it failed or is missing in one of the cases, or if it is only used on request.
    """
    lines = [line for line in output.splitlines() if line.startswith('{"benchmark": "kernel_speed"')]
    figures: list[dict[str, Any]] = json.loads(lines[-1])["figures"] if lines else []
    allowed = {op.name: {each.name for each in op.backends if not each.only_requested} for op in OPS.ops}
    races: dict[tuple[str, str, int], dict[tuple[str, int], dict[str, float | None]]] = {}
    for figure in figures:
        if figure["contestant"] in allowed[figure["op"]]:
            dtype, width = figure["picked"]
            cases = races.setdefault((figure["op"], dtype, width), {})
            # The figure with the backward comes after the figure of the forward, and replaces it.
            cases.setdefault((figure["case"], figure["rows"]), {})[figure["contestant"]] = figure["seconds"]
    rows = []
    for (op, dtype, width), cases in sorted(races.items()):
        totals = {}
        for backend in set.intersection(*(set(times) for times in cases.values())):
            seconds = [times[backend] for times in cases.values()]
            if None not in seconds:
                totals[backend] = sum(each for each in seconds if each is not None)
        if len(totals) > 1:
            rows.append(
                MeasuredPreference(op, dtype, width, tuple(sorted(totals, key=lambda name: (totals[name], name))))
            )
    if not rows:
        return None
    return Preferences(device, f"{datetime.date.today()} with {versions()}", tuple(rows))


def device_name() -> str:
    """Return the name of the GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU; the figures mean nothing"


def versions() -> str:
    """Return the versions of Python, torch, CUDA and Triton."""
    text = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    with suppress(importlib.metadata.PackageNotFoundError):
        text += f", triton {importlib.metadata.version('triton')}"
    return text


def revision() -> str:
    """Return the commit of this repository, with `changed` if files other than results differ; `unknown` without
    git."""
    paths = ["--", ".", ":(exclude)benchmarks/results", ":(exclude)kernels/measured"]
    try:
        commit, changes = (
            subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", *paths])
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit.strip() + (", changed" if changes else "")


def setting() -> dict[str, str]:
    """Return everything that results depend on; earlier results with other values are not used."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "device": device_name(),
        "number of GPUs": str(devices),
        "versions": versions(),
        "revision": revision(),
        "apex": (apex_backend.described() or "apex: not installed").removeprefix("apex: "),
        "csrc/": "built, or nvcc is there" if library.PATH.exists() or build.find_nvcc() else "no nvcc",
    }


def machine() -> list[str]:
    """Return lines about the GPUs, and about what is built for them."""
    lines = [f"{key}: {value}" for key, value in setting().items()]
    if torch.cuda.is_available():
        lines.append(f"compute capability: {'.'.join(map(str, torch.cuda.get_device_capability()))}")
        lines.append(f"memory: {torch.cuda.get_device_properties(0).total_memory / 1e9:.1f} GB")
        lines.append(f"NCCL: {'.'.join(map(str, torch.cuda.nccl.version()))}")
        for query in (["--query-gpu=driver_version", "--format=csv,noheader"], ["topo", "-m"]):
            with suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, check=True, timeout=30)
                lines.append(f"nvidia-smi {query[0]}:\n{done.stdout.strip()}")
    lines.append(f"library of csrc/: {'built' if library.PATH.exists() else 'not built'}")
    return lines


def anonymous(text: str) -> str:
    """Return the text without paths and without names of users and hosts."""
    private = {str(ROOT): ".", sys.prefix: "<python>", sys.base_prefix: "<python>", str(Path.home()): "~"}
    private |= {tempfile.gettempdir(): "<tmp>", socket.gethostname(): "<host>"}
    with suppress(OSError, KeyError):
        private[getpass.getuser()] = "<user>"
    for name in sorted(private, key=len, reverse=True):
        if len(name) > 2:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", lambda _, name=name: private[name], text)
    return text


def document(outcomes: Sequence[Outcome]) -> str:
    """Return the report in Markdown: the machine, a table, the output of training, and the last lines of failed parts.

    The results of kernels are in a separate file.
    """
    table = "\n".join(str(outcome) for outcome in outcomes)
    command = shlex.join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]])
    parts = [
        f"# GPU check on {device_name()}",
        f"{datetime.date.today()}, {versions()}. `{command}`",
        "```\n" + "\n".join(machine()) + "\n```",
        f"```\n{table}\n```",
    ]
    for outcome in outcomes:
        lines = [line for line in outcome.output.splitlines() if not line.startswith("{")]
        if outcome.name.startswith("train_step") or outcome.result != OK:
            shown = lines if outcome.result == OK else lines[-FAILED_LINES:]
            parts.append(f"## {outcome.name}\n\n```\n" + "\n".join(shown).strip() + "\n```")
    return anonymous("\n\n".join(parts)) + "\n"


def main() -> int:
    """Run every part and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="folder for the results; on a GPU, by default benchmarks/results"
    )
    parser.add_argument(
        "--again",
        nargs="?",
        choices=["failed", "all"],
        const="failed",
        help="repeat the parts that did not pass (failed, also without a value) or all parts",
    )
    parser.add_argument("--all-sizes", action="store_true", help="every size of each op, 25 minutes longer at most")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("error: no NVIDIA GPU is visible to torch; run this on a machine that has one", file=sys.stderr)
        return 2
    results = options.write or (RESULTS if on_gpu else None)
    report = progress = None
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        report = results / f"gpu_check_{preferences.slug(device_name())}.md"
        progress = Progress(report.with_suffix(".json"), setting())
        if progress.note is not None:
            print(progress.note)
    parts = [*(tests_parts() if on_gpu else []), *benchmark_parts(options.device, results, options.all_sizes)]
    rank_parts = ranks_parts(options.device)
    seconds = ALL_SECONDS + sum(part.seconds for part in rank_parts) + options.all_sizes * ALL_SIZES_SECONDS
    outcomes = run_all([*parts, *rank_parts], seconds, report, progress, options.again)
    if results is not None:
        write_preferences(outcomes, preferences.file_of(device_name()) if options.write is None else None, results)
    print(f"{device_name()}, torch {torch.__version__}")
    print("\n".join(str(outcome) for outcome in outcomes))
    return 0 if all(outcome.result == OK for outcome in outcomes) else 1


def write_preferences(outcomes: Sequence[Outcome], path: Path | None, results: Path) -> None:
    """Write the measured preferences of kernels. path: file that every run reads; None writes to the folder
    `results`."""
    orders = [measured_preferences(outcome.output, device_name()) for outcome in outcomes if outcome.name == KERNELS]
    if not orders or orders[0] is None:
        return
    path = path or results / f"kernels_{preferences.slug(device_name())}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(orders[0].text(), encoding="utf-8")
    print(f"the fastest backends are in {path.name}; {preferences.VARIABLE}=none ignores them")


if __name__ == "__main__":
    raise SystemExit(main())
