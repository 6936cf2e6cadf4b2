"""Compile cases to PTX for sm_90: `python -m tests.ptx.compiler NAME...` prints them as JSON.

A process of its own, since an interpreted kernel cannot be compiled.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megapipe.kernels.triton_backend.launch import OPTIONS, Specimen
from tests.ptx.cases import CASES


def compiled(specimen: Specimen) -> dict[str, Any]:
    """The fields of `Compiled`."""
    launch, signature = specimen.launch, specimen.signature()
    attributes = {(index,): [["tt.divisibility", 16]] for index in specimen.divisible()}
    source = ASTSource(launch.kernel, signature, specimen.constants(), attributes)
    kernel = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": launch.num_warps, **OPTIONS})
    arguments = [name for name, kind in signature.items() if kind != "constexpr"]
    return {"ptx": kernel.asm["ptx"], "arguments": arguments, "shared": kernel.metadata.shared}


def main() -> None:
    """Compile the cases that the command line names."""
    print(json.dumps({name: compiled(Specimen(name, CASES[name].launch(), 0, 0)) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
