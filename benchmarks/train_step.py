"""Tokens per second of one training step: megapipe beside Hugging Face's GPT2LMHeadModel and a plain torch GPT.

All contestants have the same size, dtype, micro-batches, gradient clip and AdamW, and take turns, so that a change of
the machine's load meets all of them. A second part lays a two-rank megapipe pipeline beside one rank with as many
threads. The last line of the output is one JSON object.

    python benchmarks/train_step.py --repeats 9
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from plain_gpt import PlainGpt, Shape
from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.costs.gpt import gpt_layers
from megapipe.engine.step import StepInput
from megapipe.layers.context import MicrobatchContext
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh, MeshShape
from megapipe.training.replica import Replica

Step = Callable[[], None]
LEARNING_RATE, CLIP, BETAS, DECAY = 1e-4, 1.0, (0.9, 0.95), 0.1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def configuration(shape: Shape, arguments: argparse.Namespace, pipeline: int) -> PretrainConfig:
    """The megapipe run that equals the peers'."""
    config = PretrainConfig(
        model=ModelConfig(
            vocabulary_size=shape.vocabulary_size,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            max_positions=shape.sequence_length,
        )
    )
    config.data = replace(config.data, prefix="unused", sequence_length=shape.sequence_length)
    config.batch = replace(
        config.batch, global_size=arguments.micro_size * arguments.microbatches, micro_size=arguments.micro_size
    )
    config.parallel = replace(config.parallel, pipeline=pipeline, device=arguments.device)
    config.training = replace(config.training, precision=arguments.precision)
    return config


def batch(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) of every micro-batch, the same for all contestants."""
    generator = torch.Generator().manual_seed(0)
    size = (arguments.microbatches, arguments.micro_size, shape.sequence_length + 1)
    tokens = torch.randint(shape.vocabulary_size, size, generator=generator).to(device)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def megapipe_step(mesh: Mesh, shape: Shape, arguments: argparse.Namespace) -> Step:
    """A step of this rank's part of megapipe."""
    config = configuration(shape, arguments, mesh.size("pipeline"))
    replica = Replica(config, mesh, gpt_layers(config.model))
    contexts = [
        MicrobatchContext(
            tokens=tokens,
            labels=labels,
            loss_mask=torch.ones(labels.shape, device=mesh.device),
            ordinals=torch.arange(len(tokens)),
        )
        for tokens, labels in batch(shape, arguments, mesh.device)
    ]
    count = float(arguments.microbatches * arguments.micro_size * shape.sequence_length)
    steps = iter(range(10**9))

    def step() -> None:
        replica.engine.run(StepInput(next(steps), contexts, count, LEARNING_RATE))

    return step


def peer_step(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: list[tuple[Tensor, Tensor]],
    dtype: torch.dtype,
) -> Step:
    """A step as a user's own loop takes it: accumulate, clip, AdamW with torch's fused kernel.

    bf16 keeps fp32 weights and computes under autocast, the usual way.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
        fused=True,
    )

    def step() -> None:
        for tokens, labels in batches:
            with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                value = loss(tokens, labels)
            (value / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def hugging_face(shape: Shape, device: torch.device) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """GPT2LMHeadModel with exact GELU and no dropout, its faster attention, and its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocabulary_size,
        n_positions=shape.sequence_length,
        n_embd=shape.hidden_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        bos_token_id=None,
        eos_token_id=None,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).to(device)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1))

    return model, loss


def timed(step: Step, device: torch.device) -> float:
    """Seconds of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def alternate(contestants: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds by contestant; two rounds of warm-up are not counted, and the order turns from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for round_ in range(repeats + 2):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            elapsed = contestants[name]()
            if round_ >= 2:
                seconds[name].append(elapsed)
    return seconds


def report(title: str, seconds: dict[str, list[float]], tokens: int) -> dict[str, dict[str, float]]:
    """Print a table and return it: median tokens/s and the interval from the slowest to the fastest quarter."""
    print(title)
    rows = {}
    for name, values in seconds.items():
        quarters = statistics.quantiles(values, n=4)
        rows[name] = {
            "tokens_per_second": round(tokens / statistics.median(values), 1),
            "lower_quartile": round(tokens / quarters[2], 1),
            "upper_quartile": round(tokens / quarters[0], 1),
        }
        row = rows[name]
        print(
            f"  {name:<22}{row['tokens_per_second']:>12,.0f} tokens/s  "
            f"({row['lower_quartile']:,.0f} to {row['upper_quartile']:,.0f})"
        )
    return rows


def paired_ratio(seconds: dict[str, list[float]], ours: str) -> float:
    """Median over rounds of (the fastest peer's seconds / ours): above 1, we are faster."""
    peers = [values for name, values in seconds.items() if name != ours]
    best = min(peers, key=statistics.median)
    return round(statistics.median(b / o for b, o in zip(best, seconds[ours], strict=True)), 4)


def pipeline_seconds(shape: Shape, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """One rank with two threads and a pipeline of two ranks with one thread each, in turns."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank, (world, threads) in enumerate([(2, 1), (2, 1), (1, 2)]):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank % 2, world, threads, str(Path(folder) / "store"), shape, arguments, theirs)
            )
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()

        def together(members: list[int]) -> float:
            start = time.perf_counter()
            for member in members:
                pipes[member].send(True)
            for member in members:
                pipes[member].recv()
            return time.perf_counter() - start

        seconds = alternate(
            {"two ranks, 1f1b": lambda: together([0, 1]), "one rank": lambda: together([2])}, arguments.repeats
        )
        for pipe in pipes:
            pipe.send(False)
        for process in processes:
            process.join()
    return seconds


def _rank(
    rank: int, world: int, threads: int, store: str, shape: Shape, arguments: argparse.Namespace, pipe: Connection
) -> None:
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    step = megapipe_step(connected_mesh(MeshShape({"pipeline": world}), torch.device("cpu")), shape, arguments)
    pipe.send(True)
    while pipe.recv():
        step()
        pipe.send(True)
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    """Measure, print tables, end with one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary-size", type=int, default=8192)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--micro-size", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--precision", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of one process on the CPU")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = Shape(
        arguments.vocabulary_size,
        arguments.num_layers,
        arguments.hidden_size,
        arguments.num_heads,
        arguments.sequence_length,
    )
    device, dtype = torch.device(arguments.device), DTYPES[arguments.precision]
    batches = batch(shape, arguments, device)
    tokens = arguments.microbatches * arguments.micro_size * shape.sequence_length
    plain = PlainGpt(shape).to(device)
    steps = {
        "megapipe": megapipe_step(connected_mesh(MeshShape({}), device), shape, arguments),
        "plain torch": peer_step(plain, plain, batches, dtype),
        "transformers": peer_step(*hugging_face(shape, device), batches, dtype),
    }
    seconds = alternate({name: lambda s=step: timed(s, device) for name, step in steps.items()}, arguments.repeats)
    result = {
        "benchmark": "train_step",
        "arguments": vars(arguments),
        "torch": torch.__version__,
        "one_process": report(f"one process, {arguments.precision}, {arguments.threads} thread(s)", seconds, tokens),
        "ratio_to_best_peer": paired_ratio(seconds, "megapipe"),
    }
    print(f"  megapipe over the best peer: {result['ratio_to_best_peer']}")
    if device.type == "cpu":
        seconds = pipeline_seconds(shape, arguments)
        result["pipeline"] = report("two threads in all", seconds, tokens)
        result["pipeline_ratio"] = paired_ratio(seconds, "two ranks, 1f1b")
        print(f"  two ranks over one: {result['pipeline_ratio']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
