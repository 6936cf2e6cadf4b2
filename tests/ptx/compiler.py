"""Compile cases to PTX for sm_90: `python -m tests.ptx.compiler NAME...` prints them as JSON.

A process of its own, since an interpreted kernel cannot be compiled.
"""

import json
import sys
from typing import Any

from megapipe.kernels.triton_backend.launch import Launch
from tests.kernels.ahead_of_time import compile_for
from tests.kernels.launches import signature
from tests.ptx.cases import CASES


def compiled(launch: Launch) -> dict[str, Any]:
    """The fields of `Compiled`."""
    kernel = compile_for(launch, 90)
    arguments = [name for name, kind in signature(launch).items() if kind != "constexpr"]
    return {"ptx": kernel.asm["ptx"], "arguments": arguments, "shared": kernel.metadata.shared}


def main() -> None:
    """Compile the cases that the command line names."""
    print(json.dumps({name: compiled(CASES[name].launch()) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
