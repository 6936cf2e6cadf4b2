"""From a configuration, a mesh and a schedule to this rank's stages: the one place where model and layout meet."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from megapipe.config.recompute import RecomputedPart
from megapipe.config.run import PretrainConfig
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.engine.stages import StageBuilder
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.layers.compiled import CompiledForward, CompiledUnit
from megapipe.layers.fp8 import Fp8Products
from megapipe.layers.linear import AccumulatingProducts, Linear
from megapipe.layers.shared_samples import keep_rings_out_of_graphs, share_samples
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, StageLayout
from megapipe.layout.token_order import ContextAttention
from megapipe.models.gpt import Block
from megapipe.parallel.groups import Group
from megapipe.parallel.host_weights import HostWeights
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.sharding import WHOLE, Sharding
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.schedule import Header
from megapipe.spec.parameters import ParameterSpec, tied_names
from megapipe.training.families import family_of

BUILDING_SECONDS = 2.0
"""Building a model that takes longer than this prints its progress."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Assembly:
    """Builds the stages that a schedule places on this rank, with weights drawn from the seed.

    kernels: which backends run the layers' ops. sharding: what replicas share out of a unit's state; of a tied weight,
    whose gradients are summed over several stages, that is master weights and moments alone.
    """

    def __init__(
        self,
        config: PretrainConfig,
        mesh: Mesh,
        layout: StageLayout,
        header: Header,
        kernels: Registry = OPS,
        sharding: Sharding = WHOLE,
        built: Callable[[], None] = lambda: None,
    ) -> None:
        """built: called after each unit of this rank has its initial weights."""
        self._config = config
        self._built = built
        self._mesh = mesh
        self._layout = layout
        self._header = header
        self._kernels = kernels
        self._sharding = sharding
        self._tied = frozenset(tied_names(layout.layers))
        self._rank = mesh.coordinate("pipeline")
        self._family = family_of(config)
        self._dtype = DTYPES[config.training.precision]
        self._copies = max(header.versions_per_stage[stage] for stage in header.stages_on(self._rank))

    def stages(self) -> dict[int, Stage]:
        """Stage id -> Stage, ready to run."""
        layers, ranges = self._layout.layers, self._layout.ranges
        boundaries = [self.boundary()] * (len(ranges) - 1)
        return StageBuilder(self._header, self._rank, layers, ranges, boundaries, self._twins, self._state).stages()

    def boundary(self) -> tuple[TensorSpec, ...]:
        """What crosses every stage boundary: the residual stream [micro_size, tokens, hidden_size].

        Tokens are the sample's, or this rank's share of them under context and sequence parallelism.
        """
        config = self._config
        tokens = config.data.sequence_length // (self._mesh.size("context") * config.parallel.sequence_shards)
        shape = (config.batch.micro_size, tokens, config.model.hidden_size)
        return (TensorSpec(shape, self._dtype),)

    def _twins(self, index: int) -> list[nn.Module]:
        layer = self._layout.layers[index]
        tensor, build = self._mesh.group("tensor"), self._family.build
        return [build(layer, tensor, VOCABULARY_ALIGNMENT, self._kernels) for _ in range(self._copies)]

    def _state(self, name: str, specs: list[ParameterSpec], num_uses: int) -> UnitState:
        tensor, tied = self._mesh.group("tensor"), name in self._tied
        stage = min(self._sharding.stage, 1 if tied else self._config.zero.stage_of(name))
        sharding = replace(self._sharding, stage=stage)
        if self._config.offload.weights and not tied:
            own = HostWeights(
                name,
                specs,
                compute_dtype=self._dtype,
                device=self._mesh.device,
                tensor_rank=tensor.rank,
                tensor_size=tensor.size,
                alignment=VOCABULARY_ALIGNMENT,
                master_weights=self._config.training.master_weights,
            )
            self._draw(own)
            return own
        state = UnitState(
            name,
            specs,
            compute_dtype=self._dtype,
            device=self._mesh.device,
            tensor_rank=tensor.rank,
            tensor_size=tensor.size,
            alignment=VOCABULARY_ALIGNMENT,
            num_versions=self._copies,
            num_uses=num_uses,
            gradient_buffers=self._header.gradient_buffers,
            master_weights=self._config.training.master_weights,
            sharding=sharding,
            in_host=self._config.offload.optimizer,
        )
        self._draw(state)
        return state

    def _draw(self, state: UnitState) -> None:
        """Fill in the initial weights; on the meta device there is nothing to fill."""
        if self._mesh.device.type != "meta":
            state.initialize(self._config.training.seed)
        self._built()


def building_progress(
    say: Callable[[str], None] | None, layout: StageLayout, stages: Iterable[int]
) -> Callable[[], None]:
    """Return a function to call after each built unit. It prints the progress after two seconds, and then whenever the
    time has doubled. stages: of this rank. say: None prints nothing."""
    if say is None:
        return lambda: None
    total = sum(len(layout.ranges[stage]) for stage in stages)
    start, done, next_line = time.monotonic(), 0, BUILDING_SECONDS

    def built() -> None:
        nonlocal done, next_line
        done += 1
        seconds = time.monotonic() - start
        if done < total and seconds >= next_line:
            next_line = 2 * seconds
            left = seconds / done * (total - done)
            say(f"building the model: {done} of {total} layers on rank 0, about {left:.0f} s left")

    return built


def recompute_parts(stages: Iterable[Stage], parts: Collection[RecomputedPart]) -> None:
    """Let the transformer blocks of these stages make some of their activations again in their backward."""
    for stage in stages:
        for unit in stage.units:
            for twin in unit:
                if isinstance(twin, Block):
                    twin.recompute(parts)


def share_samples_of(stages: Iterable[Stage], group: Group, kind: ContextAttention) -> None:
    """Let the transformer blocks of these stages attend to tokens that the other ranks of a context group hold."""
    for stage in stages:
        for unit in stage.units:
            for twin in unit:
                if isinstance(twin, Block):
                    share_samples(twin.attention, group, kind)


def use_accumulating_products(stages: Mapping[int, Stage], kernels: Registry) -> None:
    """Let the linear layers of these stages add their weight gradients through the kernel registry, if requested."""
    if not kernels.is_requested("weight_gradient"):
        return
    products = AccumulatingProducts(kernels)
    twins = (twin for stage in stages.values() for unit in stage.units for twin in unit)
    for twin in twins:
        for module in twin.modules() if isinstance(twin, nn.Module) else ():
            if isinstance(module, Linear):
                module.products = products


def use_fp8(stages: Mapping[int, Stage], layout: StageLayout, config: PretrainConfig, group: Group) -> None:
    """Let the transformer blocks of these stages, but for the first and last that are kept, multiply in fp8."""
    training = config.training
    if training.fp8 == "none":
        return
    products = Fp8Products(training.fp8, group)
    chosen = range(training.fp8_first_kept, config.model.num_layers - training.fp8_last_kept)
    for number, stage in stages.items():
        for unit, index in zip(stage.units, layout.ranges[number], strict=True):
            layer = layout.layers[index]
            modules = (module for twin in unit if isinstance(twin, nn.Module) for module in twin.modules())
            for module in modules if layer.kind == "block" and layer.index in chosen else ():
                if isinstance(module, Linear):
                    module.products = products


def compile_blocks(stages: Sequence[Stage]) -> None:
    """Let the transformer blocks of these stages run through one torch.compile, each as one graph unless samples are
    shared in a ring. Nothing is compiled yet."""
    twins = (twin for stage in stages for twins in stage.units for twin in twins)
    whole = [keep_rings_out_of_graphs(twin) for twin in twins if isinstance(twin, Block)]
    forward = CompiledForward(fullgraph=all(whole))
    for stage in stages:
        stage.units = [
            [CompiledUnit(twin, forward) if isinstance(twin, Block) else twin for twin in twins]
            for twins in stage.units
        ]
