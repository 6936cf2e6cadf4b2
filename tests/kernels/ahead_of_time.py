"""Compile the specimens of a module's kernels for GPUs that need not be there, and look at the machine code.

`python -m tests.kernels.ahead_of_time MODULE` prints one line per specimen and architecture and exits with 1 if one
spills registers, asks for more than a GPU has, or reads or writes a tensor in short pieces. It runs in a process of
its own: an interpreted kernel cannot be compiled.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megapipe.kernels.triton_backend.launch import OPTIONS, Launch
from tests.kernels.launches import constants, divisible, signature
from tests.kernels.specimens import Specimen, specimens

ARCHITECTURES = (80, 90, 100)
_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may have (CUDA C++ programming guide, compute capabilities)."""
_MOST_WARPS = 32


@dataclass(frozen=True)
class MachineCode:
    """Resources of a compiled kernel. stack: bytes of it per thread. local: spills, in instructions. shared: bytes.

    wide_loads, wide_stores: 128-bit instructions that read global memory, to registers or shared memory, and write it.
    """

    registers: int
    stack: int
    local: int
    shared: int
    wide_loads: int
    wide_stores: int


def compile_for(launch: Launch, architecture: int) -> Any:
    """Triton's kernel of a launch for `architecture`, 80 for sm_80 and so on."""
    attributes = {(index,): [["tt.divisibility", 16]] for index in divisible(launch)}
    source = ASTSource(launch.kernel, signature(launch), constants(launch), attributes)
    options = {"num_warps": launch.num_warps, **OPTIONS}
    return triton.compile(source, GPUTarget("cuda", architecture, 32), options)


def machine_code(launch: Launch, architecture: int) -> MachineCode:
    kernel = compile_for(launch, architecture)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path))
        code = _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(path))
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    return MachineCode(
        registers=int(registers),
        stack=int(stack),
        local=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared=kernel.metadata.shared,
        wide_loads=len(re.findall(r"\bLDG(?:STS)?\.E\S*\.128\b", code)),
        wide_stores=len(re.findall(r"\bSTG\.E\S*\.128\b", code)),
    )


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def problems(specimen: Specimen, code: MachineCode, architecture: int) -> list[str]:
    """Return the problems of the machine code, in words."""
    faults = []
    if specimen.launch.num_warps > _MOST_WARPS:
        faults.append(f"{specimen.launch.num_warps} warps, above {_MOST_WARPS}")
    if code.shared > _SHARED[architecture]:
        faults.append(f"{code.shared} bytes of shared memory, above {_SHARED[architecture]}")
    if code.stack or code.local:
        faults.append(f"spills: {code.stack} bytes of stack, {code.local} local accesses")
    if code.wide_loads < specimen.loads:
        faults.append(f"{code.wide_loads} 128-bit loads for {specimen.loads} tensors")
    if code.wide_stores < specimen.stores:
        faults.append(f"{code.wide_stores} 128-bit stores for {specimen.stores} tensors")
    return faults


def check(case: tuple[Specimen, int]) -> tuple[bool, str]:
    """(whether all is well, a line about it)."""
    specimen, architecture = case
    code = machine_code(specimen.launch, architecture)
    wrong = problems(specimen, code, architecture)
    line = f"{specimen.name} sm_{architecture}: {code.registers} registers, {specimen.launch.num_warps} warps"
    return not wrong, f"{line}: {'; '.join(wrong) or 'good'}"


def module_of(specimen: Specimen) -> str:
    """Return the file name of its kernel, without .py."""
    return str(specimen.launch.kernel.fn.__module__.rpartition(".")[2])


def main() -> int:
    """Check all specimens of the module that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="file name within kernels/triton_backend, without .py")
    name = parser.parse_args().module
    chosen = [specimen for specimen in specimens() if module_of(specimen) == name]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(check, product(chosen, ARCHITECTURES)))
    print("\n".join(line for _, line in results))
    return 0 if all(good for good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
