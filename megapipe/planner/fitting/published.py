"""Published rows: what authors ran, and how fast it was.

FLOPs are counted as each source counts them: Narayanan et al. (2021) with what is recomputed, Megatron-LM's later
table without.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megapipe.config.data import DataConfig
from megapipe.config.errors import ConfigError
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.run import BatchConfig, PretrainConfig, TrainingConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.config.zero import ZeroConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.cost.assumptions import Assumptions
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import estimate
from megapipe.schedules.generators.registry import find_generator

H100_TABLE = "Megatron-LM, table of training speed on H100"
"""Of its README, where it is a picture; four more rows stand there, which could not be read."""
SC21 = "Narayanan et al. 2021, arXiv 2104.04473, table 1"
"""Five rows were read in the paper, the others in two transcriptions of it, which agree with one another and with
these five."""
MICRO_SIZES = (1, 2, 4, 8)
"""Samples of a micro-batch that are tried."""


@dataclass(frozen=True)
class PublishedRow:
    """One row of a table.

    sizes: heads, hidden size, layers. tensor, pipeline, devices, batch: of the run. tflops: per device and second, in
    1e12, counted as `counts` says: FLOPs of the model, or executed ones, with what is recomputed.
    """

    name: str
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    devices: int
    batch: int
    tflops: float
    source: str


@dataclass(frozen=True)
class PublishedTable:
    """Rows that were run alike.

    rows: those that parameters are fitted to. told: others, which they are not fitted to but foretell. counts: which
    FLOPs its figures count. base: what all runs have in common. pieces: tensor ranks gather and scatter tokens in as
    many pieces as there are ranks, beside their products.
    """

    name: str
    hardware: str
    title: str
    rows: tuple[PublishedRow, ...]
    told: tuple[PublishedRow, ...]
    counts: Literal["model", "executed"]
    base: PretrainConfig
    assumptions: Assumptions
    pieces: bool = False

    def runs(self) -> "tuple[PublishedRun, ...]":
        """Rows to fit to."""
        return tuple(PublishedRun(self, row) for row in self.rows)

    def told_runs(self) -> "tuple[PublishedRun, ...]":
        """Rows to foretell."""
        return tuple(PublishedRun(self, row) for row in self.told)


@dataclass(frozen=True)
class PublishedRun:
    """A row of a table, as `fit` takes it: its speed is in TFLOP/s and device."""

    table: PublishedTable
    row: PublishedRow

    @property
    def name(self) -> str:
        """The model's size."""
        return self.row.name

    @property
    def source(self) -> str:
        """Where the figure stands."""
        return self.row.source

    def predict(self, hardware: Hardware) -> Estimate:
        """The fastest run that fits of all that the row leaves open. Raises ConfigError where none does."""
        found = [estimate(each, hardware, assumptions=self.table.assumptions) for each in self.candidates()]
        fitting = [each for each in found if each.fits]
        if not fitting:
            raise ConfigError(
                f"row {self.name}: none of {len(found)} layouts fits the memory of {hardware.name!r}; use devices "
                "with more memory"
            )
        return min(fitting, key=lambda each: each.step_seconds)

    def speeds(self, estimate: Estimate) -> tuple[float, float]:
        """Predicted and published TFLOP/s and device."""
        flops = estimate.model_flops if self.table.counts == "model" else estimate.executed_flops
        return flops / estimate.step_seconds / estimate.world_size / 1e12, self.row.tflops

    def candidates(self) -> Iterator[PretrainConfig]:
        """The row's run with every micro-batch size and number of chunks that it may have had: no table names them."""
        row, base = self.row, self.table.base
        data = row.devices // (row.tensor * row.pipeline)
        model = replace(base.model, num_layers=row.layers, hidden_size=row.hidden, num_heads=row.heads)
        sequence = base.parallel.sequence and row.tensor > 1
        for micro_size in MICRO_SIZES:
            if row.batch % (micro_size * data):
                continue
            for chunks in _chunk_counts(row, row.batch // (micro_size * data)):
                parallel = ParallelConfig(
                    tensor=row.tensor,
                    pipeline=row.pipeline,
                    data=data,
                    sequence=sequence,
                    sequence_chunks=row.tensor if self.table.pieces and sequence else 1,
                    layers_per_stage=_even_stages(row, chunks),
                )
                interleaved = ScheduleConfig(name=find_generator(ScheduleConfig.name).looped, chunks=chunks)
                yield replace(
                    base,
                    model=model,
                    batch=BatchConfig(global_size=row.batch, micro_size=micro_size),
                    parallel=parallel,
                    schedule=interleaved if row.pipeline > 1 else ScheduleConfig(),
                )


def _chunk_counts(row: PublishedRow, microbatches: int) -> tuple[int, ...]:
    """Stages a rank: several where layers and micro-batches divide, as interleaving needs."""
    if row.pipeline == 1:
        return (1,)
    several = [
        chunks for chunks in range(2, row.layers // row.pipeline + 1) if row.layers % (row.pipeline * chunks) == 0
    ]
    return tuple(several) if several and microbatches % row.pipeline == 0 else ()


def _even_stages(row: PublishedRow, chunks: int) -> list[int]:
    """As many blocks in each stage; embedding and head besides in the first and the last."""
    stages = row.pipeline * chunks
    sizes = [row.layers // stages] * stages
    sizes[0] += 1
    sizes[-1] += 1
    return sizes


def _model(vocabulary: int, positions: int, *, attention: Literal["unfused", "sdpa"], dropout: float) -> ModelConfig:
    return ModelConfig(
        vocabulary_size=vocabulary,
        max_positions=positions,
        activation="gelu_tanh",
        attention=attention,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        embedding_dropout=dropout,
    )


A100 = PublishedTable(
    name="sc21",
    hardware="a100-80",
    title="GPT on A100: " + SC21,
    rows=(
        PublishedRow("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137.0, SC21),
        PublishedRow("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142.0, SC21),
        PublishedRow("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138.0, SC21),
        PublishedRow("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148.0, SC21),
        PublishedRow("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163.0, SC21),
    ),
    told=(
        PublishedRow("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138.0, SC21),
        PublishedRow("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135.0, SC21),
        PublishedRow("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140.0, SC21),
        PublishedRow("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155.0, SC21),
        PublishedRow("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163.0, SC21),
    ),
    counts="executed",
    base=PretrainConfig(
        model=_model(51200, 2048, attention="unfused", dropout=0.1),
        data=DataConfig(sequence_length=2048),
        training=TrainingConfig(precision="fp16"),
        recompute=RecomputeConfig(method="full"),
    ),
    assumptions=Assumptions(scattered_sends=True, waits_for_sends=True, megatron_kernels=True),
)
H100 = PublishedTable(
    name="h100",
    hardware="h100",
    title="GPT on H100: " + H100_TABLE,
    rows=(
        PublishedRow("1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8, H100_TABLE),
        PublishedRow("16B", 48, 6144, 32, 4, 1, 192, 192, 489.1, H100_TABLE),
        PublishedRow("70B", 64, 8192, 84, 8, 2, 768, 384, 419.7, H100_TABLE),
        PublishedRow("177B", 96, 12288, 96, 8, 6, 2304, 1152, 432.8, H100_TABLE),
        PublishedRow("462B", 144, 18432, 112, 8, 16, 6144, 3072, 459.9, H100_TABLE),
    ),
    told=(),
    counts="model",
    base=PretrainConfig(
        model=_model(131072, 4096, attention="sdpa", dropout=0.0),
        data=DataConfig(sequence_length=4096),
        training=TrainingConfig(precision="bf16"),
        zero=ZeroConfig(stage=1),
        parallel=ParallelConfig(sequence=True),
    ),
    pieces=True,
    assumptions=Assumptions(gathers_beside_forward=True, megatron_kernels=True),
)
TABLES = {table.name: table for table in (A100, H100)}
"""By name."""
