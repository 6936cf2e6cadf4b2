"""Runs whose blocks go through torch.compile with a backend of the test's choice."""

from megapipe.config.run import PretrainConfig
from megapipe.engine import assembly
from megapipe.engine.assembly import CompiledForward
from megapipe.parallel.mesh import Mesh
from tests.support.gpt_runs import RankRun, run_gpt


def run_compiled(mesh: Mesh, config: PretrainConfig, compiler: str | None, steps: int) -> RankRun:
    """A run whose compiled blocks count their frames: every block of a rank shares the same. None: uncompiled."""
    if compiler is None:
        return run_gpt(mesh, config, steps)
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

    counter = CompileCounterWithBackend(compiler)
    assembly.CompiledForward = lambda **options: CompiledForward(backend=counter, **options)  # type: ignore[misc, assignment]
    run = run_gpt(mesh, config, steps, timeout=200.0)
    # Recomputed code is first run without a graph, which is a frame of its own.
    assert counter.frame_count == (2 if config.recompute.method == "full" else 1)
    return run
