"""Compare Seq1F1B with 1F1B on four pipeline ranks: peak memory of a real GPT, and step time of sleeping stages.

Memory: a GPT trains two steps on sequences of 8,192 tokens. A rank's peak is its largest resident memory in the second
step, minus the memory before the step; every schedule has new processes. Time: stages sleep in proportion to the
tokens of a slice, so that four ranks fit on two cores. "allowed" is the step time that the order allows if only stages
took time. Schedules take turns, and times are medians of the repeats.

    python benchmarks/sequence_slices.py
    python benchmarks/sequence_slices.py --tokens 2048 --slices 2 4 8
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from pipeline_contest.measure import in_turns
from pipeline_contest.orders import finish
from pipeline_contest.ours import sleeping
from pipeline_contest.setting import Setting
from pipeline_contest.sleeping import Meter

from megapipe.calibration.layers import samples_for
from megapipe.calibration.machine import on_ranks
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.engine.transfers import LinkPool
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import Schedule, build
from megapipe.training.loop.batches import open_loader
from megapipe.training.loop.replica import Replica

RANKS = 4
MIB = 2**20


def config_of(slices: int, tokens: int, microbatches: int) -> PretrainConfig:
    """Return the configuration of a small GPT on four pipeline ranks. slices: slices per sequence; 1 means 1F1B."""
    config = PretrainConfig(
        model=ModelConfig(vocabulary_size=1024, num_layers=RANKS, hidden_size=128, num_heads=2, max_positions=tokens)
    )
    config.data.sequence_length = tokens
    config.batch.micro_size, config.batch.global_size = 1, microbatches
    config.parallel.pipeline, config.parallel.data, config.parallel.device = RANKS, 1, "cpu"
    config.schedule.name = "seq1f1b" if slices > 1 else "1f1b"
    if slices > 1:
        config.schedule.slices = slices
    return config


def peak_growth(mesh: Mesh, config: PretrainConfig) -> int:
    """Return the largest number of bytes by which this rank's memory grew in its second step."""
    mesh = connected_mesh(MeshShape({"pipeline": RANKS}), mesh.device)
    replica = Replica(config, mesh)
    batch = open_loader(config, mesh, replica, samples_for(config)).load(0)
    before = 0
    for step in range(2):
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current size
        replica.engine.run(StepInput(step, batch.contexts, batch.token_counts, 1e-4))
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Return a size of this process, in bytes. name: its name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def sliced(slices: int, microbatches: int) -> Schedule:
    """Return 1F1B for one slice, else Seq1F1B."""
    return build("seq1f1b", RANKS, microbatches, slices=slices) if slices > 1 else build("1f1b", RANKS, microbatches)


def step_times(
    mesh: Mesh, counts: list[int], microbatches: int, seconds: float, floats: int, repeats: int
) -> dict[str, tuple[float, float]]:
    """Return, for each number of slices, the median seconds of a step, and the seconds that the order allows."""
    mesh, meter = connected_mesh(MeshShape({"pipeline": RANKS}), mesh.device), Meter()
    pool, steps, allowed = LinkPool(mesh, "shared_memory", 120.0), {}, {}
    for slices in counts:
        schedule = sliced(slices, microbatches)
        setting = Setting(mesh, microbatches * slices, seconds / slices, torch.zeros(1, floats // slices), meter)
        steps[str(slices)], allowed[slices] = sleeping(setting, schedule, pool).run, finish(schedule, seconds)
    samples = in_turns(mesh.world, meter, steps, repeats)
    return {
        name: (statistics.median(each.seconds - each.late for each in rounds), allowed[int(name)])
        for name, rounds in samples.items()
    }


def main() -> None:
    """Measure, and print a line for each number of slices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, nargs="+", default=[4], help="parts of a sequence")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--microbatches", type=int, default=8, help="sequences of a step")
    parser.add_argument("--milliseconds", type=float, default=40.0, help="forward of a whole sequence")
    parser.add_argument("--kilofloats", type=int, default=256, help="message of a whole sequence")
    parser.add_argument("--repeats", type=int, default=7, help="repeats, of which the median counts")
    options = parser.parse_args()
    counts = [1, *options.slices]
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # returns the memory of freed tensors to the system
    times = on_ranks(
        RANKS,
        "cpu",
        step_times,
        counts,
        options.microbatches,
        options.milliseconds / 1e3,
        options.kilofloats * 1024,
        options.repeats,
    )[0]
    print(f"{RANKS} ranks, {options.microbatches} micro-batches, {options.tokens:,} tokens")
    print(f"{'schedule':<18}{'step s':>9}{'allowed':>9}   peak growth of each rank, MiB")
    facts: list[dict[str, Any]] = []
    for slices in counts:
        peaks = on_ranks(RANKS, "cpu", peak_growth, config_of(slices, options.tokens, options.microbatches))
        name, (seconds, allowed) = f"seq1f1b, {slices}" if slices > 1 else "1f1b", times[str(slices)]
        print(f"{name:<18}{seconds:>9.3f}{allowed:>9.3f}   " + "  ".join(f"{each / MIB:.0f}" for each in peaks))
        facts.append({"slices": slices, "seconds": seconds, "allowed": allowed, "peaks": peaks})
    print(json.dumps({"benchmark": "sequence_slices", "torch": torch.__version__, "figures": facts}))


if __name__ == "__main__":
    main()
