"""`megapipe doctor`: print what this installation and this host have, and what is wrong with them."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megapipe.config.command_line import tool_parser

DESCRIPTION = """\
Print the versions, devices, communication, kernels and free space that a run would find here,
and what is wrong.

The exit status is 0 if nothing is wrong, and 1 otherwise. Run it on every kind of node that a
job will use.
"""
EXAMPLES = """\
example:
  megapipe doctor
"""
DISK_BYTES = 1e9
"""Minimum free space in the current folder; one checkpoint of a model of 100 million parameters has 1.2 GB."""
SHARED_BYTES = 256e6
"""Minimum free space in /dev/shm with several GPUs. NCCL uses it to connect ranks without peer access. Docker gives a
container 64 MB by default, and NCCL's guide advises 1 GB."""
WIDTH = 1024
"""Size of the last dimension for which the kernels are chosen."""


@dataclass
class Diagnosis:
    """Lines by topic, and problems, each with a way to fix it."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, topic: str, line: str) -> None:
        """Add a line to a topic."""
        self.lines.append((topic, line))


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    tool_parser("megapipe doctor", DESCRIPTION, EXAMPLES).parse_args(list(arguments))
    findings = Diagnosis()
    missing_packages(findings)
    if not findings.problems:  # the other checks import packages
        for check in CHECKS:
            check(findings)
    width = max((len(topic) for topic, _ in findings.lines), default=0)
    for topic, line in findings.lines:
        print(f"{topic:<{width}}  {line}")
    for problem in findings.problems:
        print(f"problem: {problem}")
    if not findings.problems:
        print("no problems found")
    return 1 if findings.problems else 0


def missing_packages(findings: Diagnosis) -> None:
    """Report packages that megapipe needs and that are not installed."""
    try:
        requirements = importlib.metadata.requires("megapipe") or []
    except importlib.metadata.PackageNotFoundError:
        findings.add("package", "megapipe runs from its sources and is not installed")
        return
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name is None or ";" in requirement:  # the package belongs to an extra
            continue
        try:
            importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            findings.problems.append(f"the package {requirement} is not installed: reinstall megapipe with pip")


def versions(findings: Diagnosis) -> None:
    """Add the versions of Python, torch and the other packages that runs record."""
    from megapipe.training.resilience.run_identity import package_versions

    findings.add("versions", ", ".join(f"{name} {version}" for name, version in package_versions().items()))


def devices(findings: Diagnosis) -> None:
    """Add the CPU cores, the free memory and the GPUs.

    Report GPUs that torch cannot use, and a driver whose GPUs torch does not find.
    """
    import torch

    from megapipe.config.command_line import bytes_text
    from megapipe.training.memory_check import free_on_host

    free = free_on_host()
    memory = f", {bytes_text(free.num_bytes)} of memory free" if free is not None else ""
    findings.add("devices", f"{len(os.sched_getaffinity(0))} CPU cores{memory}")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(number)
            words = f"GPU {number}: {gpu.name}, {bytes_text(gpu.total_memory)}"
            findings.add("devices", f"{words}, compute capability {gpu.major}.{gpu.minor}")
        return
    if not Path("/proc/driver/nvidia/version").exists():
        findings.add("devices", "no NVIDIA GPU")
    elif torch.version.cuda is None:
        findings.problems.append(
            f"this host has an NVIDIA driver, but torch {torch.__version__} is built for CPUs: install one for CUDA"
        )
    else:
        findings.problems.append(
            f"this host has an NVIDIA driver, but torch {torch.__version__} finds no GPU: compare nvidia-smi's driver "
            f"with CUDA {torch.version.cuda}, and check CUDA_VISIBLE_DEVICES and the container's GPU access"
        )


def communication(findings: Diagnosis) -> None:
    """Add the backends of torch.distributed.

    Report a host whose own name has no address, because its ranks cannot connect.
    """
    import torch
    import torch.distributed as dist

    backends = ["gloo on CPUs"] if dist.is_gloo_available() else []
    if torch.cuda.is_available() and dist.is_nccl_available():
        backends.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))} on GPUs")
    findings.add("links", ", ".join(backends) or "none")
    if not backends:
        findings.problems.append(f"torch {torch.__version__} has neither gloo nor NCCL: install another build")
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        findings.problems.append(
            f"the name of this host, {host}, has no address ({error.strerror}), so ranks "
            "cannot connect: add it to /etc/hosts"
        )


def kernels(findings: Diagnosis) -> None:
    """Add the backend that each op of the kernel registry would use here, in bf16 on a GPU and in fp32 on a CPU."""
    import torch

    from megapipe.kernels import apex_backend
    from megapipe.kernels.ops import OPS
    from megapipe.training.validation import described_choices

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    findings.add("apex", (apex_backend.described() or "apex: NVIDIA's is not installed").removeprefix("apex: "))
    for line in described_choices([OPS.choice(op.name, device, dtype, WIDTH) for op in OPS.ops], {}):
        findings.add("kernels", line.removeprefix("kernels: "))
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        findings.problems.append("triton is not installed, so GPUs run slower kernels: pip install triton")


def compilers(findings: Diagnosis) -> None:
    """Add the C++ compiler and Python's headers, without which Triton cannot start on a GPU."""
    import torch

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    findings.add("compiler", f"{compiler or 'no C++ compiler'}, {'with' if headers.exists() else 'without'} Python.h")
    if torch.cuda.is_available() and (compiler is None or not headers.exists()):
        findings.problems.append(
            "triton needs a C++ compiler and Python.h: on Debian or Ubuntu, apt-get install "
            f"g++ python{sys.version_info.major}.{sys.version_info.minor}-dev"
        )


def space(findings: Diagnosis) -> None:
    """Add the free space on the disk and in shared memory. Report if it is too little for checkpoints or NCCL."""
    import torch

    from megapipe.config.command_line import bytes_text

    here = Path.cwd()
    free = shutil.disk_usage(here).free
    findings.add("disk", f"{bytes_text(free)} free in the current folder")
    if not os.access(here, os.W_OK):
        findings.problems.append(f"the current folder {here} cannot be written: start runs in another one")
    if free < DISK_BYTES:
        findings.problems.append(
            f"the current folder has {bytes_text(free)} free, "
            "too little for checkpoints: set training.directory to another disk"
        )
    if not os.path.isdir("/dev/shm"):
        return
    shared = shutil.disk_usage("/dev/shm").free
    findings.add("shared memory", f"{bytes_text(shared)} free in /dev/shm")
    if torch.cuda.device_count() > 1 and shared < SHARED_BYTES:
        findings.problems.append(
            f"/dev/shm has {bytes_text(shared)} free, too little for NCCL between {torch.cuda.device_count()} GPUs: "
            "start the container with --shm-size 1g or --ipc host"
        )


CHECKS: tuple[Callable[[Diagnosis], None], ...] = (versions, devices, communication, kernels, compilers, space)
