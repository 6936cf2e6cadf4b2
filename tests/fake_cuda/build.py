"""Compiles the shim and loads it; this has to happen before torch is imported."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.cpp")


def compiled_shim() -> Path:
    """The compiled shim in the folder for temporary files, named after everything that it depends on.

    Raises RuntimeError with the compiler's output if it does not compile.
    """
    specification = importlib.util.find_spec("torch")
    assert specification is not None
    assert specification.origin is not None
    torch = Path(specification.origin).parent
    compiler = os.environ.get("CXX", "c++")
    version = (torch / "version.py").read_bytes()
    name = hashlib.sha256(SOURCE.read_bytes() + version + compiler.encode() + str(torch).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"megapipe-fake-cuda-{os.getuid()}"
    library = folder / f"shim-{name}.so"
    if library.exists():
        return library
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library.name
        command = [
            *(compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-w"),
            *(f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"),
            *(str(SOURCE), "-o", str(made)),
            *(f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile:\n{done.stderr}")
        made.rename(library)
    return library


@functools.cache
def shim() -> ctypes.CDLL:
    """The loaded shim."""
    library = ctypes.CDLL(str(compiled_shim()))
    for name, result, arguments in (
        ("fake_cuda_stream", ctypes.c_int64, []),
        ("fake_cuda_set_stream", None, [ctypes.c_int64]),
        ("fake_cuda_device", ctypes.c_int64, []),
        ("fake_cuda_set_device", None, [ctypes.c_int64]),
        ("fake_cuda_connect", None, [*[ctypes.c_void_p] * 3, ctypes.c_int64]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
