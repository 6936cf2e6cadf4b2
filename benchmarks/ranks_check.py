"""Check the communication of ranks on this machine: links, groups, and all schedules and layouts against one device.

gpu_check.py runs these checks on two or more GPUs. Ranks on a CPU, which use gloo, run the same code. Each command is
one run:

    torchrun --nproc-per-node 2 benchmarks/ranks_check.py --checks links groups
    torchrun --nproc-per-node 2 benchmarks/ranks_check.py --device cpu --checks all

Rank 0 prints a line and a JSON object for each check. A rank that fails prints a JSON object and ends the run.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megapipe.cli.main import end_after
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import DIMENSIONS, MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.data.shard_writer import ShardWriter
from megapipe.engine.step import StepInput
from megapipe.parallel.collectives import all_to_all
from megapipe.parallel.groups import Group
from megapipe.parallel.in_process import in_process_meshes, run_in_process
from megapipe.parallel.launch import connected_mesh, joined
from megapipe.parallel.links import Edge
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import make_links
from megapipe.schedules.registry import GENERATORS
from megapipe.training.loop.batches import open_loader, open_samples
from megapipe.training.loop.replica import Replica

STEPS = 2
TOLERANCE = 1e-5
"""Largest relative difference of losses and gradient norms in fp32. Ranks sum in another order than one device."""
TIMEOUT = 120.0

Results = list[tuple[float, float]]
"""Loss and gradient norm of every step."""


class Different(RuntimeError):
    """The results of the ranks differ from the expected results."""


@dataclass(frozen=True)
class Check:
    """A check.

    sizes: sizes of the mesh that it needs. run: runs the check on every rank, and returns a line for the report.
    """

    name: str
    sizes: dict[str, int]
    run: Callable[[Mesh], str]


def checks(ranks: int) -> list[Check]:
    """Return all checks for this number of ranks, the simplest first."""
    grid = {"data": 2, "pipeline": ranks // 2} if ranks % 2 == 0 and ranks > 2 else {"pipeline": ranks}
    all_checks = [Check("links", {"pipeline": ranks}, check_links), Check("groups", grid, check_groups)]
    for name in (each for each in GENERATORS if len(GENERATORS[each].placed(2, {}).routes) == 1):
        all_checks.append(Check(name, {"pipeline": ranks}, _training({"schedule": {"name": name}})))
    for name, dimension, groups in (
        ("tensor", "tensor", {}),
        ("sequence parallel", "tensor", {"parallel": {"sequence": True}}),
        ("context, ring", "context", {}),
        ("context, all to all", "context", {"parallel": {"context_attention": "all_to_all"}}),
        *((f"ZeRO {stage}", "data", {"zero": {"stage": stage}}) for stage in range(4)),
    ):
        all_checks.append(Check(name, {dimension: ranks}, _training(groups)))
    if ranks % 2 == 0:
        paired = {"tensor": 2, "pipeline": ranks // 2}
        all_checks.append(Check("pairs", paired, _training({"schedule": {"name": "dualpipe_v"}})))
    if ranks % 4 == 0:
        mixed = {"tensor": 2, "pipeline": 2, "data": ranks // 4}
        all_checks.append(Check("tensor, pipeline, data", mixed, _training({"zero": {"stage": 1}})))
    return all_checks


def check_links(mesh: Mesh) -> str:
    """Send messages of one element and of 4 MB between all ordered pairs of ranks, both directions at once."""
    ranks, rank = mesh.size("pipeline"), mesh.coordinate("pipeline")
    max_elements = 1 << 20
    pairs = [(one, other) for one in range(ranks) for other in range(ranks) if one != other]
    links = make_links(mesh, [Edge(*pair, maximum_bytes=4 * max_elements) for pair in pairs], timeout=TIMEOUT)
    messages = 0
    for size in (1, max_elements, 1):
        transfers, expected = [], []
        for edge, link in links.items():
            message = torch.arange(size, device=mesh.device, dtype=torch.float32) + 1000 * edge.source
            if edge.source == rank:
                transfers.append(link.send(message + edge.destination))
            else:
                received = torch.empty_like(message)
                transfers.append(link.receive(received))
                expected.append((edge, received, message + rank))
        for transfer in transfers:
            transfer.wait()
        for edge, received, expected_values in expected:
            _same(str(edge), received, expected_values)
        messages += len(pairs)
    for link in links.values():
        link.close()
    return f"{messages} messages over {len(pairs)} links"


def check_groups(mesh: Mesh) -> str:
    """Run every collective in the world and in each group of the mesh, with one element per rank and with 4 MB."""
    dimensions = [group for group in map(mesh.group, DIMENSIONS) if group.size > 1 and group is not mesh.world]
    groups = [mesh.world, mesh.second_world(), *dimensions]
    for group in groups:
        for size in (1, (1 << 20) // group.size):
            _check_group(group, size, mesh.device)
    names = ", ".join(f"{group.name} of {group.size}" for group in groups)
    return f"all-reduce, all-gather, reduce-scatter, all-to-all, shift, broadcast: {names}"


def _check_group(group: Group, size: int, device: torch.device) -> None:
    """Check all collectives of a group. Rank r has numbers that start at r, so that every result is known.

    size: number of elements of each rank.
    """
    numbers = torch.arange(size, device=device, dtype=torch.float32)
    mine, rank, count = numbers + group.rank, group.rank, group.size
    everyone = torch.stack([numbers + rank for rank in range(count)])
    total = numbers * count + sum(range(count))
    reduced = mine.clone()
    group.all_reduce(reduced)
    _same("all-reduce", reduced, total)
    _same("all-gather", group.all_gather(mine), everyone)
    _same("started all-gather", group.start_all_gather(mine)(), everyone)
    for_all = torch.stack([mine + 10 * rank for rank in range(count)])
    _same("reduce-scatter", group.reduce_scatter(for_all), total + 10 * rank * count)
    _same("started reduce-scatter", group.start_reduce_scatter(for_all)(), total + 10 * rank * count)
    whole = torch.zeros(count * size, device=device)
    group.gather_into(whole, mine).wait()
    _same("gather into a buffer", whole, everyone.flatten())
    summed = for_all.flatten().clone()
    group.reduce_into_part(summed).wait()
    _same("reduce into a part", group.own_part(summed), total + 10 * rank * count)
    _same("all-to-all", all_to_all(for_all, group), everyone + 10 * rank)
    shifted = torch.empty_like(mine)
    group.shift(mine, shifted).wait()
    _same("shift", shifted, numbers + (rank - 1) % count)
    sent = mine.clone()
    group.broadcast(sent, count - 1)
    _same("broadcast", sent, numbers + count - 1)


def _same(name: str, actual: Tensor, expected: Tensor) -> None:
    if not torch.equal(actual, expected):
        wrong = int((actual != expected).sum())
        raise Different(f"{name}: {wrong} of {expected.numel()} elements are wrong")


def _training(groups: dict[str, dict[str, Any]]) -> Callable[[Mesh], str]:
    """Return a check that trains on the ranks and on one device, and compares the results.

    groups: fields of the configuration to change, by group.
    """

    def run(mesh: Mesh) -> str:
        with tempfile.TemporaryDirectory() as folder:
            config = configuration(mesh, folder, groups)
            results = trained(mesh, config)
            expected = on_one_device(mesh, config) if mesh.rank == 0 else []
        return compared(results, mesh.world.all_gather_object(expected)[0])

    return run


def configuration(mesh: Mesh, folder: str, groups: dict[str, dict[str, Any]]) -> PretrainConfig:
    """Return a small fp32 run whose layers, heads and tokens divide by the number of ranks."""
    ranks = mesh.world_size
    prefix = Path(folder) / "corpus"
    generator = np.random.default_rng(0)
    with ShardWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add_document([(generator.beta(1, 3, size=8 * ranks) * 61).astype(np.uint16)])
        writer.commit()
    model = ModelConfig(
        vocabulary_size=61, num_layers=2 * ranks, hidden_size=16 * ranks, num_heads=ranks, max_positions=4 * ranks
    )
    config = PretrainConfig(model=model)
    config.data = replace(config.data, prefix=str(prefix), split="90,5,5", sequence_length=4 * ranks)
    config.batch = replace(config.batch, global_size=4 * ranks, micro_size=1)
    config.optimizer = replace(config.optimizer, learning_rate=5e-3, warmup_steps=1)
    config.training = replace(config.training, steps=STEPS)
    config.parallel = replace(config.parallel, timeout_seconds=TIMEOUT)
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})


def trained(mesh: Mesh, config: PretrainConfig) -> Results:
    """Run STEPS steps, and return their losses and gradient norms on this rank."""
    config = replace(config, parallel=replace(config.parallel, **mesh.shape.sizes))
    replica = Replica(config, mesh)
    loader = open_loader(config, mesh, replica, open_samples(config, "train"))
    results = []
    for step in range(STEPS):
        batch = loader.load(step * config.batch.global_size)
        step_input = StepInput(step, batch.contexts, batch.token_counts, config.optimizer.learning_rate)
        result = replica.engine.run(step_input)
        results.append((result.loss, result.gradient_norm))
    return results


def on_one_device(mesh: Mesh, config: PretrainConfig) -> Results:
    """Return the results of the same run on only the device of this rank.

    Schedules whose results differ from those of a single process (class B, delayed updates) run with their ranks as
    threads.
    """
    plain = replace(config.parallel, sequence=False)
    if GENERATORS[config.schedule.name].numerical_class == "A":
        alone = replace(config, parallel=plain, schedule=replace(config.schedule, name="gpipe"))
        alone = replace(alone, zero=replace(config.zero, stage=0))
        return trained(_alone(mesh), alone)
    meshes = in_process_meshes(mesh.shape.sizes, mesh.device, TIMEOUT)
    results: list[Results] = run_in_process(meshes, trained, config)
    return results[0]


def _alone(mesh: Mesh) -> Mesh:
    return in_process_meshes({}, mesh.device)[0]


def compared(results: Results, expected: Results) -> str:
    """Return the difference of the results in words. Raises Different if it exceeds the tolerance."""
    difference = 0.0
    for one, other in zip(results, expected, strict=True):
        for name, value, expected_value in zip(("loss", "gradient norm"), one, other, strict=True):
            if not math.isclose(value, expected_value, rel_tol=TOLERANCE):
                raise Different(f"{name} {value!r} on the ranks, {expected_value!r} on one device")
            difference = max(difference, abs(value / expected_value - 1))
    bits = "the same bits as" if results == expected else f"within {difference:.1e} of"
    return f"{STEPS} steps, {bits} one device; losses {', '.join(f'{loss:.4f}' for loss, _ in results)}"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--checks", nargs="+", default=["all"], metavar="NAME")
    return parser.parse_args()


def main() -> None:
    """Run all requested checks in one world."""
    options = arguments()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        sys.exit(f"error: {ranks} rank was started, and the checks need at least 2; start with torchrun")
    by_name = {check.name: check for check in checks(ranks)}
    unknown = [name for name in options.checks if name not in by_name and name != "all"]
    if unknown:
        sys.exit(f"error: there is no check {unknown[0]!r} for {ranks} ranks; choose from {'; '.join(by_name)}")
    selected = list(by_name.values()) if "all" in options.checks else [by_name[name] for name in options.checks]
    # The first check's layout decides how many hardware queues a GPU has, as in training (docs/nccl.md).
    with joined(selected[0].sizes, options.device, TIMEOUT) as world:
        run_checks(world, selected)


def run_checks(world: Mesh, selected: Sequence[Check]) -> None:
    """Run checks in order until one fails. The last JSON object that is printed has the result."""
    for number, check in enumerate(selected, 1):
        if world.rank == 0:
            print(f"{check.name}: started", flush=True)
        try:
            line = check.run(connected_mesh(MeshShape(check.sizes), world.device, TIMEOUT))
        except Exception as error:
            print(json.dumps({"summary": f"{check.name}, rank {world.rank}: {error}"}), flush=True)
            raise
        if world.rank == 0:
            print(f"{check.name}: {line}", flush=True)
            print(json.dumps({"summary": line if len(selected) == 1 else f"{number} passed"}), flush=True)


if __name__ == "__main__":
    end_after(main)
