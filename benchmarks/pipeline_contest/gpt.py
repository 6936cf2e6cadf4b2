"""A race with real stages: the layers of a small GPT in megapipe's engine and in torch.distributed.pipelining."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.assembly import Assembly, Holding, ModelTable
from megapipe.engine.stage import Stage
from megapipe.engine.transfers import LinkPool
from megapipe.layers.context import MicrobatchContext
from megapipe.layout.stages import lay_out
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from megapipe.spec.layers import model_layers
from pipeline_contest.measure import in_turns
from pipeline_contest.orders import Race
from pipeline_contest.ours import fed
from pipeline_contest.setting import Step
from pipeline_contest.sleeping import Meter

MODEL = ModelConfig(
    vocabulary_size=2048, num_layers=6, hidden_size=192, num_heads=6, max_positions=128, tie_embeddings=False
)
SAMPLES, TOKENS = 2, 128


@dataclass(frozen=True)
class GptFigure:
    """Median seconds of a step of each contestant, and the median over rounds of megapipe's time divided by
    torch's."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    seconds: float
    torch_seconds: float
    ratio: float


def race_gpt(mesh: Mesh, pool: LinkPool, race: Race, num_microbatches: int, repeats: int) -> GptFigure:
    """Measure forward and backward of one step, without an optimizer. A collective call. Both contestants must have
    the schedule."""
    config = PretrainConfig(model=MODEL)
    config.batch = replace(config.batch, micro_size=SAMPLES)
    config.data = replace(config.data, sequence_length=TOKENS)
    num_ranks = mesh.size("pipeline")
    layout = lay_out(model_layers(MODEL), MODEL, num_ranks * race.chunks, TOKENS)
    schedule = build(race.name, num_ranks, num_microbatches, units_per_stage=layout.units_per_stage)
    stages = Assembly(ModelTable.of(config, layout, mesh), Holding(), mesh, schedule.header).stages
    contexts = _contexts(num_microbatches)
    run = fed(mesh, schedule, stages, contexts, pool).run
    steps = {"megapipe": run, "torch": _torch_step(mesh, race, stages, contexts)}
    samples = in_turns(mesh.world, Meter(), steps, repeats)
    times = {name: [sample.seconds for sample in rounds] for name, rounds in samples.items()}
    ratios = [a / b for a, b in zip(times["megapipe"], times["torch"], strict=True)]
    return GptFigure(
        race.name,
        num_ranks,
        num_microbatches,
        statistics.median(times["megapipe"]),
        statistics.median(times["torch"]),
        statistics.median(ratios),
    )


class _TorchStage(nn.Module):
    """A stage that runs its units in order. Micro-batches must arrive in ascending order."""

    def __init__(self, stage: Stage, contexts: Sequence[MicrobatchContext]) -> None:
        super().__init__()
        self._units = [versions[0] for versions in stage.units]
        self._parameters_of = nn.ModuleList(unit for unit in self._units if isinstance(unit, nn.Module))
        self._contexts = contexts
        self._takes_tokens = not stage.inputs
        self._next = 0

    def forward(self, x: Tensor) -> Tensor:
        context = self._contexts[self._next % len(self._contexts)]
        self._next += 1
        tensors: tuple[Tensor, ...] = () if self._takes_tokens else (x,)
        for unit in self._units:
            tensors = unit(*tensors, context=context)
        return tensors[0]


def _torch_step(mesh: Mesh, race: Race, stages: dict[int, Stage], contexts: Sequence[MicrobatchContext]) -> Step:
    num_stages = mesh.size("pipeline") * race.chunks
    hidden = torch.empty(SAMPLES, TOKENS, MODEL.hidden_size, requires_grad=True)
    loss = torch.empty((), requires_grad=True)
    first = torch.zeros(SAMPLES)
    parts = [
        PipelineStage(
            _TorchStage(stage, contexts),
            index,
            num_stages,
            mesh.device,
            input_args=hidden if index else first,
            output_args=loss if index == num_stages - 1 else hidden,
        )
        for index, stage in stages.items()
    ]
    count = len(contexts)
    schedule = race.peer(
        parts if race.chunks > 1 else parts[0], count, loss_fn=lambda output, target: output, scale_grads=False
    )
    inputs = (first.repeat(count),) if 0 in stages else ()
    target = torch.zeros(count) if num_stages - 1 in stages else None

    def step() -> None:
        losses: list[Any] | None = None if target is None else []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)

    return step


def _contexts(num_microbatches: int) -> list[MicrobatchContext]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL.vocabulary_size, (num_microbatches, SAMPLES, TOKENS + 1), generator=generator)
    return [MicrobatchContext(tokens=part[:, :-1], labels=part[:, 1:], training=False) for part in tokens]
