"""Muon over UnitStates against torch.optim.Muon and torch.optim.AdamW on the separate matrices and the rest."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.config.optimizer import MuonConfig, OptimizerConfig
from megapipe.layout.units import place
from megapipe.optim.muon import make_optimizer, orthogonalised
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.segments import WHOLE, Sharding
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import Init, ParameterSpec
from megapipe.training.loop.replica import muon_shards
from tests.support.counting_groups import CountingGroup, Traffic
from tests.support.meshes import run_threads

NORMAL = Init("normal", 0.3)
SPECS = [
    ParameterSpec("qkv", (2, 4, 3, 10), 0, NORMAL, decay=True, matrix=True),
    ParameterSpec("table", (20, 6), 0, NORMAL, decay=True, matrix=False),
    ParameterSpec("up", (2, 16, 10), 1, NORMAL, decay=True, matrix=True),
    ParameterSpec("bias", (7,), None, NORMAL, decay=False, matrix=False),
    ParameterSpec("down", (10, 16), 1, NORMAL, decay=True, matrix=True),
    ParameterSpec("whole", (5, 9), None, NORMAL, decay=True, matrix=True),
]
CONFIGS = [
    OptimizerConfig(name="muon", muon=MuonConfig(elementwise_rate=0.5)),
    OptimizerConfig(name="muon", muon=MuonConfig(momentum=0.8, nesterov=False, scale="spectral"), weight_decay=0.0),
    OptimizerConfig(name="muon", muon=MuonConfig(newton_schulz_steps=3)),
]
RATES = [1e-2, 3e-2, 2e-2, 5e-3]


def gradient_of(name: str, step: int) -> Tensor:
    """Draw the gradient of a whole parameter."""
    spec = next(spec for spec in SPECS if spec.name == name)
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(100 * step + len(name) + ord(name[0])))


def separate(name: str, whole: Tensor) -> Iterator[Tensor]:
    """The matrices of a parameter by hand, as views."""
    if name == "qkv":
        yield from (whole[:, :2], whole[:, 2], whole[:, 3])
    elif name == "up":
        yield from (whole[0], whole[1])
    else:
        yield whole


def stepped(
    config: OptimizerConfig,
    rank: int = 0,
    size: int = 1,
    group: Any = None,
    sharding: Sharding = WHOLE,
    shards: Any = None,
) -> UnitState:
    """A unit after some updates. rank, size: of a tensor group."""
    state = UnitState("unit", SPECS, tensor_rank=rank, tensor_size=size, sharding=sharding)
    state.initialize(3)
    optimizer = make_optimizer(config, tensor_group=group, shard_group=shards)
    for step, rate in enumerate(RATES):
        for segment in state.table:
            box = tuple(slice(*each) for each in zip(segment.box.starts, segment.box.stops, strict=True))
            part = gradient_of(segment.spec.name, step)[box]
            state.owned_view(state.gradients[0], segment).copy_(part)
        optimizer.update([state], state.newest + 1, rate, torch.tensor(0.25))
        state.publish()
    return state


def values(state: UnitState) -> dict[str, Tensor]:
    return {segment.spec.name: state.owned_view(state.master, segment).clone() for segment in state.table}


def torchs(config: OptimizerConfig) -> dict[str, Tensor]:
    """The same by torch, every separate matrix a parameter of its own."""
    state = UnitState("unit", SPECS)
    state.initialize(3)
    weights = values(state)
    muon = config.muon
    parts = {
        name: [torch.nn.Parameter(part.reshape(-1, part.shape[-1])) for part in separate(name, weights[name])]
        for name in ("qkv", "up", "down", "whole")
    }
    matrices = torch.optim.Muon(
        [part for each in parts.values() for part in each],
        lr=1.0,
        weight_decay=config.weight_decay,
        momentum=muon.momentum,
        nesterov=muon.nesterov,
        ns_steps=muon.newton_schulz_steps,
        adjust_lr_fn="match_rms_adamw" if muon.scale == "match_rms" else "original",
    )
    rest = {name: torch.nn.Parameter(weights[name]) for name in ("table", "bias")}
    groups = [{"params": [rest["table"]]}, {"params": [rest["bias"]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=config.betas, eps=config.epsilon, weight_decay=config.weight_decay)
    for step, rate in enumerate(RATES):
        for name, each in parts.items():
            for part, gradient in zip(each, separate(name, gradient_of(name, step) * 0.25), strict=True):
                part.grad = gradient.reshape(part.shape)
        for name, parameter in rest.items():
            parameter.grad = gradient_of(name, step) * 0.25
        matrices.param_groups[0]["lr"] = rate
        for group in adamw.param_groups:
            group["lr"] = rate * muon.elementwise_rate
        matrices.step()
        adamw.step()
    for name, each in parts.items():
        for target, part in zip(separate(name, weights[name]), each, strict=True):
            target.copy_(part.detach().view(target.shape))
    return weights | {name: parameter.detach() for name, parameter in rest.items()}


@pytest.mark.parametrize("config", CONFIGS, ids=["nesterov", "spectral", "three-steps"])
def test_equals_torchs_muon_and_adamw(config: OptimizerConfig) -> None:
    expected = torchs(config)
    for name, actual in values(stepped(config)).items():
        torch.testing.assert_close(actual, expected[name], rtol=2e-6, atol=2e-6)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 100))
def test_singular_values_come_near_one(rows: int, columns: int, seed: int) -> None:
    """U S V^T keeps U and V: against the singular value decomposition in float64, for values above a tenth of the
    norm."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    actual = orthogonalised(matrix.float(), steps=5).double()
    inside = (left.t() @ actual @ right.t()).diagonal()[singular > 0.1 * matrix.norm()]
    assert ((inside > 0.6) & (inside < 1.3)).all()
    assert torch.linalg.svdvals(actual).max() < 1.35


def on_shard(mesh: Mesh, config: OptimizerConfig) -> tuple[UnitState, Traffic]:
    """The unit of one of several replicas that share it out, and what they exchanged."""
    traffic = Traffic()
    tensor, shards = mesh.group("tensor"), CountingGroup(mesh.shard_group(mesh.size("data")), traffic)
    sharding = Sharding(1, shards.rank, shards.size, whole_matrices=True)
    return stepped(config, tensor.rank, tensor.size, tensor, sharding=sharding, shards=shards), traffic


@pytest.mark.parametrize(
    ("count", "tensor", "cut"),
    [
        (1, 2, set()),
        (2, 1, set()),
        (3, 2, set()),
        (5, 2, {"up"}),
        (7, 1, {"qkv", "up"}),
        (8, 1, {"qkv", "up", "down"}),
    ],
)
def test_shards_step_as_the_whole_does(count: int, tensor: int, cut: set[str]) -> None:
    """Bit for bit, whether a matrix is whole on one rank or cut, and tensor ranks share it or not. Only where some are
    cut is anything exchanged."""
    ranks = run_threads({"data": count, "tensor": tensor}, on_shard, CONFIGS[0])
    expected = values(stepped(CONFIGS[0]))
    seen = dict.fromkeys(expected, 0.0)
    gathered = place(SPECS, count, tensor_size=tensor).num_elements * len(RATES)
    for state, traffic in ranks:
        assert state.table.cut == cut
        counted = {each.operation: total for each, total in traffic.bytes.items()}
        assert counted == ({"all_gather": 4 * gathered} if cut else {})
        for segment in state.table:
            box = tuple(slice(*each) for each in zip(segment.box.starts, segment.box.stops, strict=True))
            extent = state.held(segment)
            wanted = expected[segment.spec.name][box].flatten()[extent.start : extent.stop]
            assert torch.equal(state.in_shard(state.master, segment), wanted), segment.spec.name
            seen[segment.spec.name] += len(extent) if segment.spec.partition_axis is not None else len(extent) / tensor
    assert seen == {spec.name: spec.num_elements for spec in SPECS}


def test_the_start_of_a_run_reports_padding_and_gathers() -> None:
    """By hand: 3 x 384 and 4 x 256 elements, of which parameters have 892; the longest matrix has 320 of them."""
    assert muon_shards([UnitState("unit", SPECS)]) is None
    reports = [muon_shards([UnitState("unit", SPECS, sharding=Sharding(1, 0, count, True))]) for count in (3, 4)]
    assert reports == [
        "muon over 3 shards: 29.1% of padding in addition to the parameters; every matrix is whole on one rank",
        "muon over 4 shards: 14.8% of padding in addition to the parameters; "
        "1 of 4 matrices are cut, whose update gathers 4,096 bytes",
    ]
