"""Pipeline over plain torch modules, against torch's own autograd and optimizer in one process."""

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megapipe.engine.errors import EngineError, PipelineError
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.step import StepResult
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh, MeshShape
from megapipe.schedules.actions import Kind
from tests.engine.library_models import (
    ROWS,
    SAMPLE,
    SGD,
    WIDTH,
    Block,
    Head,
    Outcome,
    Start,
    adoptable,
    batch,
    foreign,
    loss,
    merged,
    plain,
    train,
)
from tests.support.meshes import run_mesh, run_threads

CLASS_A: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("1f1b", {"two_bp": True}),
    ("interleaved_1f1b", {"chunks": 2}),
    ("modular", {"chunks": 2, "two_bp": True}),
    ("modular", {"chunks": 2}),
    ("zb_h1", {}),
    ("zb_h2", {}),
    ("zb_v", {}),
    ("zb_auto", {}),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks that are processes have one; sums of a norm's weight gradient depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def solo() -> Mesh:
    return connected_mesh(MeshShape({}), torch.device("cpu"))


def assert_same_bits(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert len(found.gradients) == len(expected.gradients)
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert torch.equal(ours[name], gradient), name
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name


def assert_close(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("schedule", "options"), CLASS_A)
def test_every_flushing_schedule_has_the_bits_of_plain_torch(
    schedule: str, options: dict[str, Any], ranks: int
) -> None:
    layers = adoptable()
    outcomes = run_threads({"pipeline": ranks}, train, layers, schedule, 6, options)
    assert_same_bits(merged(outcomes), plain(layers, 6))


@pytest.mark.filterwarnings("ignore:some parameters")
@pytest.mark.parametrize(("schedule", "options"), [("zb_h1", {}), ("zb_v", {}), ("gpipe", {"two_bp": True})])
def test_layers_that_cannot_split_get_equal_gradients(schedule: str, options: dict[str, Any]) -> None:
    layers = foreign()
    outcomes = run_threads({"pipeline": 2}, train, layers, schedule, 4, options)
    assert_same_bits(merged(outcomes), plain(layers, 4))


def test_layers_that_cannot_split_are_told_once() -> None:
    with pytest.warns(UserWarning, match="without a weight half") as told:
        train(solo(), foreign(), "zb_h1", 2)
    assert len({str(each.message) for each in told}) == 1


def test_processes_give_the_same_bits() -> None:
    layers = adoptable(2)
    outcomes = run_mesh({"pipeline": 2}, train, layers, "zb_h1", 4, backend="processes", timeout=120.0)
    assert_same_bits(merged(outcomes), plain(layers, 4))


@pytest.mark.parametrize("update", ["lazy", "eager"])
@pytest.mark.parametrize(("ranks", "num_microbatches"), [(1, 1), (2, 2), (2, 5), (4, 8)])
def test_2bw_is_its_serial_recursion(update: str, ranks: int, num_microbatches: int) -> None:
    layers = adoptable()
    arguments = (layers, "2bw", num_microbatches, {"update": update}, 4)
    outcome = merged(run_threads({"pipeline": ranks}, train, *arguments))
    assert [result.step for result in outcome.results] == [0, 1, 2, 3]
    assert_same_bits(outcome, plain(layers, num_microbatches, delay=1, steps=4))


def test_pipedream_on_one_rank_updates_after_every_micro_batch() -> None:
    layers = adoptable(2)
    outcome = train(solo(), layers, "pipedream", 1, steps=4)
    assert_same_bits(outcome, plain(layers, 1, steps=4))


@pytest.mark.parametrize(("schedule", "options"), [("1f1b", {}), ("zb_v", {}), ("2bw", {})])
def test_replicas_train_on_their_shares(schedule: str, options: dict[str, Any]) -> None:
    layers = adoptable(4)
    outcomes = run_threads({"data": 2, "pipeline": 2}, train, layers, schedule, 3, options)
    assert_close(merged(outcomes[:2]), plain(layers, 6, delay=int(schedule == "2bw")))
    merged(outcomes[::2])


def test_replicas_start_from_the_first_ones_weights() -> None:
    def start(mesh: Mesh) -> list[torch.Tensor]:
        layers = SHIFTED[mesh.coordinate("data")]
        pipeline = Pipeline(layers, mesh, loss=loss, sample=SAMPLE, microbatches=2)
        return list(pipeline.state_dict().values())

    SHIFTED = adoptable(1), adoptable(1)
    with torch.no_grad():
        for parameter in SHIFTED[1][0].parameters():
            parameter.add_(1.0)
    first, second = run_threads({"data": 2}, start)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


@pytest.mark.parametrize("data", [1, 2])
def test_modular_on_one_rank_is_layered_gradient_accumulation(data: int) -> None:
    """Stages of one unit: each layer's gradient is complete, and its reduction under way, before the next layer's."""
    layers, m = adoptable(2), 4
    pipelines: list[Pipeline] = []

    def layered(mesh: Mesh) -> Outcome:
        pipelines.append(Pipeline(layers, mesh, loss=loss, sample=SAMPLE, microbatches=m, **LAYERED))
        return train(mesh, layers, "modular", m, {"chunks": 4})

    LAYERED: dict[str, Any] = {"schedule": "modular", "chunks": 4}
    outcome = merged(run_threads({"data": data}, layered))
    if data == 1:
        assert_same_bits(outcome, plain(layers, m))
        return
    assert_close(outcome, plain(layers, m * data))
    kinds = (Kind.BACKWARD, Kind.REDUCE_GRADIENTS)
    actions = [a for a in pipelines[0].schedule.actions("body", 0) if a.kind in kinds]
    expected = [(kind, stage) for stage in (3, 2, 1, 0) for kind in (*[Kind.BACKWARD] * m, Kind.REDUCE_GRADIENTS)]
    assert [(action.kind, action.stage) for action in actions] == expected


@pytest.mark.parametrize(("schedule", "options"), [("1f1b", {}), ("zb_v", {}), ("2bw", {})])
def test_a_parameter_of_several_layers_stays_one_weight(schedule: str, options: dict[str, Any]) -> None:
    layers = adoptable(6, tied=True)
    alone = train(solo(), layers, schedule, 4, options)
    outcome = merged(run_threads({"pipeline": 4}, train, layers, schedule, 4, options))
    assert "7.project.weight" not in outcome.gradients[0]
    assert torch.equal(outcome.weights["7.project.weight"], outcome.weights["0.words.weight"])
    assert outcome.losses == alone.losses
    for name, weight in alone.weights.items():
        assert torch.equal(outcome.weights[name], weight), name
    assert_close(outcome, plain(layers, 4, delay=int(schedule == "2bw")))


class Twice(nn.Module):
    """One linear layer under two paths, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.third(self.second(self.first(x).tanh()).tanh()), *others


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_a_layer_shares_within_itself_stays_shared(schedule: str) -> None:
    torch.manual_seed(0)
    layers = [Start(), Twice(), Head()]
    outcome = train(solo(), layers, schedule, 2)
    expected = plain(layers, 2)
    assert_same_bits(outcome, expected)
    assert {"1.first.weight", "1.second.weight", "1.third.weight"} <= outcome.weights.keys()
    assert torch.equal(outcome.weights["1.third.weight"], outcome.weights["1.first.weight"])


class Listed(nn.Module):
    """Computes with its parameters out of a list that torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.weights = [self.project.weight, self.project.bias]

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.linear(x, *self.weights), *others


@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("zb_h1", 0), ("2bw", 1)])
@pytest.mark.filterwarnings("ignore:some parameters")
def test_a_parameter_that_is_also_in_a_plain_list_is_trained_there(schedule: str, delay: int) -> None:
    torch.manual_seed(0)
    layers = [Start(), Listed(), Head()]
    assert_same_bits(train(solo(), layers, schedule, 2), plain(layers, 2, delay=delay))


def test_one_module_as_two_layers_is_one_set_of_weights() -> None:
    torch.manual_seed(0)
    block = Block()
    layers = [Start(), block, block, Head()]
    outcome = merged(run_threads({"pipeline": 2}, train, layers, "1f1b", 2))
    assert_close(outcome, plain(layers, 2))
    assert torch.equal(outcome.weights["1.into.weight"], outcome.weights["2.into.weight"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_layers_without_parameters_can_stand_anywhere(schedule: str) -> None:
    def steps(mesh: Mesh) -> list[float]:
        pipeline = Pipeline(
            FLAT, mesh, loss=lambda y, t: (y - t).square().sum(), sample=x[:2], microbatches=2, schedule=schedule
        )
        return [result.loss for _ in range(2) for result in pipeline.step(x, y)]

    torch.manual_seed(0)
    FLAT = [nn.Flatten(), nn.Unflatten(1, (2, 3)), nn.Linear(3, 1), nn.Tanh(), nn.Flatten(), nn.Softplus()]
    x, y = torch.randn(4, 2, 3), torch.randn(4, 2)
    assert run_threads({"pipeline": 3}, steps) == [steps(solo())] * 3


def test_makers_of_layers_run_where_their_layer_runs_and_draw_the_same_weights_everywhere() -> None:
    def makers(made: list[int]) -> list[Any]:
        def maker(index: int, kind: type[nn.Module]) -> Any:
            def make() -> nn.Module:
                module = kind()
                if not next(module.parameters()).is_meta:
                    made.append(index)
                return module

            return make

        return [maker(index, kind) for index, kind in enumerate((Start, Block, Block, Head))]

    def build(mesh: Mesh) -> tuple[list[int], dict[str, torch.Tensor]]:
        made: list[int] = []
        pipeline = Pipeline(makers(made), mesh, loss=loss, sample=SAMPLE, microbatches=2, seed=5)
        return made, pipeline.state_dict()

    first, second = run_threads({"pipeline": 2}, build)
    assert (first[0], second[0]) == ([0, 1], [2, 3])
    made, weights = build(solo())
    assert made == [0, 1, 2, 3]
    assert weights["1.into.weight"].any()
    assert not torch.equal(weights["1.into.weight"], weights["2.into.weight"])
    assert all(torch.equal(first[1][name], weight) for name, weight in weights.items())


def test_the_given_modules_stay_and_the_result_loads_into_them() -> None:
    layers = adoptable(1)
    before = {name: value.clone() for name, value in nn.Sequential(*layers).state_dict().items()}
    outcome = train(solo(), layers, "zb_h1", 2)
    model = nn.Sequential(*layers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(outcome.weights)
    assert not torch.equal(layers[1].out.weight, before["1.out.weight"])
    assert type(layers[1].out) is nn.Linear


def test_bfloat16_layers_keep_float32_masters_and_the_bits_of_one_rank() -> None:
    layers = [layer.to(torch.bfloat16) for layer in adoptable(2)]
    alone = train(solo(), layers, "zb_h1", 4)
    outcome = merged(run_threads({"pipeline": 2}, train, layers, "zb_h1", 4))
    assert outcome.losses == alone.losses
    assert outcome.weights["1.out.weight"].dtype == torch.bfloat16
    assert outcome.gradients[0]["1.out.weight"].dtype == torch.float32
    assert all(torch.equal(outcome.weights[name], weight) for name, weight in alone.weights.items())


def test_layers_by_hand_and_clipping_and_learning_rates() -> None:
    def build(mesh: Mesh, layers_per_stage: list[int]) -> tuple[list[int], list[float]]:
        pipeline = Pipeline(adopted, mesh, loss=loss, sample=SAMPLE, microbatches=2, layers_per_stage=layers_per_stage)
        before = pipeline.state_dict()
        results = pipeline.step(*BATCH, learning_rate=0.0)
        unchanged = all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
        assert unchanged, "a rate of zero moves weights"
        return [len(stage.units) for stage in pipeline.stages.values()], [result.gradient_norm for result in results]

    adopted = adoptable(2)
    tokens = torch.arange(ROWS * 2 * 5).view(ROWS * 2, 5) % 11
    BATCH = tokens, tokens.roll(1, 1)
    first, second = run_threads({"pipeline": 2}, build, [3, 1])
    assert (first[0], second[0]) == ([3], [1])
    assert first[1] == second[1] == build(solo(), [4])[1]


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Unused(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Detaching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


class InPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2.0))


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.mask = torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.mask)


class Data(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else super().forward(x)


ERRORS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "shapes": (
        [nn.Linear(8, 4), nn.Linear(8, 4)],
        {},
        r"layer 1 \(Linear\) cannot take what layer 0 gives, \[2, 4\] f",
    ),
    "sample": ([nn.Linear(4, 4)], {}, r"layer 0 \(Linear\) cannot take what the sample is, \[2, 8\] float32"),
    "statistics": (
        [nn.Linear(8, 8), nn.BatchNorm1d(8)],
        {},
        r"layer 1 \(BatchNorm1d\) changes its buffer 'num_batches",
    ),
    "frozen": (
        [nn.Linear(8, WIDTH), Frozen()],
        {},
        r"parameter 1.weight has requires_grad=False; register it as a buf",
    ),
    "unused": ([nn.Linear(8, 8), Unused(8, 8)], {}, r"parameter 1.bias gets no gradient: nothing that layer 1"),
    "in place": ([nn.Linear(8, 8), nn.ReLU(inplace=True)], {}, r"layer 1 \(ReLU\) .* in-place operation"),
    "values": ([Data(8, 8)], {}, r"layer 0 \(Data\) cannot take"),
    "sample in place": ([InPlace(8, 8)], {}, r"layer 0 \(InPlace\) changes an input in place; .* a clone of it"),
    "plain tensor": ([Plain()], {}, "cannot take what the sample is.*meta.*register what a layer keeps as a buffer"),
    "no parameters": ([nn.Tanh(), nn.ReLU()], {}, "none of the 2 layers has a parameter"),
    "cut off": (
        [nn.Linear(8, 8), Detaching(), nn.Linear(8, 8)],
        {},
        r"parameter 0.weight gets no gradient: the layers behind layer 0 \(Linear\) drop or detach",
    ),
    "no tensor": ([nn.LSTM(8, 8)], {}, "a layer returned tuple; it must return a tensor or a tuple of tensors"),
    "maker": ([lambda: 3], {}, "made a int; it must make a torch.nn.Module"),
    "meta": ([nn.Linear(8, 8, device="meta")], {}, "layer 0 is on the meta device: pass what makes it instead"),
    "too few": ([nn.Linear(8, 8)] * 3, {"chunks": 4}, r"3 layers cannot fill 4 stages \(1 pipeline ranks, 4 each\)"),
    "by hand": ([nn.Linear(8, 8)] * 3, {"layers_per_stage": [1, 1, 2, 1]}, "must be 1 numbers .* add up to 3"),
    "dtypes": (
        [nn.Linear(8, 8), nn.LayerNorm(8).half()],
        {},
        r"several dtypes \(0.weight float32, 1.weight float16\)",
    ),
    "half": ([nn.LayerNorm(8).half()], {"sample": torch.empty(2, 8).half()}, "parameters are float16; convert"),
    "scalar": ([nn.Linear(8, 8)], {"sample": torch.tensor(1.0)}, "must be tensors whose first axis is rows"),
    "schedule": ([nn.Linear(8, 8)], {"schedule": "1f2b"}, "unknown schedule '1f2b'; did you mean '1f1b'?"),
    "clipping": ([nn.Linear(8, 8)], {"schedule": "pipedream"}, "before the norm of the step's gradients is known"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_run_is_named_before_the_first_step(case: str) -> None:
    layers, changes, message = ERRORS[case]
    arguments: dict[str, Any] = {"loss": loss, "sample": torch.empty(2, 8), "microbatches": 2, **changes}
    if "chunks" in changes:
        arguments["schedule"] = "modular"
    with pytest.raises(ValueError, match=message):
        Pipeline(layers, solo(), **arguments)


def test_ranks_with_different_layers_are_refused() -> None:
    def build(mesh: Mesh) -> None:
        Pipeline(adoptable(3 + mesh.rank), mesh, loss=loss, sample=SAMPLE, microbatches=2)

    with pytest.raises(PipelineError, match=r"rank \d was given other layers or another sample than rank \d"):
        run_threads({"pipeline": 2}, build)


def test_tensor_ranks_are_refused() -> None:
    def build(mesh: Mesh) -> None:
        Pipeline(adoptable(1), mesh, loss=loss, sample=SAMPLE, microbatches=2)

    with pytest.raises(PipelineError, match="the mesh has 2 tensor ranks, and any module is whole on its rank"):
        run_threads({"tensor": 2}, build)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    pipeline = Pipeline(adoptable(1), solo(), loss=loss, sample=SAMPLE, microbatches=2, optimizer=SGD)
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    with pytest.raises(PipelineError, match=r"inputs of shape \[3, 5\] do not fall into 2 micro-batches"):
        pipeline.step(tokens[:3], tokens)
    with pytest.raises(
        PipelineError, match=r"a micro-batch of the inputs is \[1, 5\] int64, .* built for \[2, 5\] int64"
    ):
        pipeline.step(tokens[:2], tokens)
    with pytest.raises(PipelineError, match="give it the batch's inputs"):
        pipeline.step(targets=tokens)
    assert pipeline.step(tokens, tokens)[0].step == 0, "a refused batch counts as a step"


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    pipeline = Pipeline(
        adoptable(1), solo(), loss=lambda logits, _: logits, sample=SAMPLE, microbatches=2, optimizer=SGD
    )
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"the loss has shape \[2, 5, 11\]; it must be one number"):
        pipeline.step(tokens, tokens)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_loss_without_gradient_is_refused(schedule: str) -> None:
    pipeline = Pipeline(
        adoptable(1),
        solo(),
        loss=lambda logits, targets: (logits.argmax(-1) == targets).float().sum(),
        sample=SAMPLE,
        microbatches=2,
        schedule=schedule,
    )
    with pytest.raises(EngineError, match="the loss depends on no parameter"):
        pipeline.step(*batch(0, 2))


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -1.0])
def test_a_count_that_nothing_can_be_divided_by_is_refused(share: float) -> None:
    pipeline = Pipeline(adoptable(1), solo(), loss=loss, sample=SAMPLE, microbatches=2, count=lambda targets: share)
    with pytest.raises(PipelineError, match=rf"count gave {share} for the targets \[2, 5\] int64"):
        pipeline.step(*batch(0, 2))


def test_counts_below_one_divide_like_any_other() -> None:
    def first_step(share: float) -> StepResult:
        pipeline = Pipeline(
            adoptable(1), solo(), loss=loss, sample=SAMPLE, microbatches=2, count=lambda targets: share
        )
        return pipeline.step(*batch(0, 2))[0]

    small, large = first_step(0.125), first_step(8.0)
    assert small.loss == 64.0 * large.loss
    assert small.gradient_norm == pytest.approx(64.0 * large.gradient_norm, rel=1e-6)


class Autocast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_outputs_of_another_type_than_meta_tensors_gave_are_named() -> None:
    def step(mesh: Mesh) -> None:
        pipeline = Pipeline(LAYERS, mesh, loss=lambda y: y.sum(), sample=torch.empty(2, 8), microbatches=2)
        pipeline.step(torch.zeros(4, 8))

    LAYERS = [Autocast(8, 8), nn.Linear(8, 8)]
    with pytest.raises(
        EngineError, match=r"SEND_ACTIVATION .* gives \[2, 8\] bfloat16, and \[2, 8\] float32 was agreed"
    ):
        run_threads({"pipeline": 2}, step)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("failure", [ValueError("bad batch"), KeyboardInterrupt()])
def test_a_pipeline_whose_step_failed_runs_no_other(schedule: str, failure: BaseException) -> None:
    """Its gradients are half added up: the next step would take them along."""

    def failing(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 2:
            raise failure
        return loss(logits, targets)

    calls: list[int] = []
    pipeline = Pipeline(adoptable(1), solo(), loss=failing, sample=SAMPLE, microbatches=2, schedule=schedule)
    with pytest.raises((EngineError, KeyboardInterrupt)):
        pipeline.step(*batch(0, 2))
    with pytest.raises(EngineError, match=r"failed and left gradients half added up \(.*step 0"):
        pipeline.step(*batch(0, 2))
    with pytest.raises(EngineError, match="half added up"):
        pipeline.drain()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def files_of_closed_pipelines(mesh: Mesh, schedule: str) -> list[int]:
    """Open files after each of a few pipelines that were used and closed, without the collector's help."""
    gc.disable()
    counts = []
    for _ in range(4):
        pipeline = Pipeline(adoptable(1), mesh, loss=loss, sample=SAMPLE, microbatches=2, schedule=schedule)
        pipeline.step(*batch(0, 2))
        pipeline.drain()
        pipeline.close()
        mesh.world.barrier()
        counts.append(open_files())
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_closed_pipeline_leaves_no_open_files(schedule: str) -> None:
    for counts in run_mesh({"pipeline": 2}, files_of_closed_pipelines, schedule, backend="processes", timeout=120.0):
        assert len(set(counts)) == 1, counts


def test_weights_are_not_read_while_a_step_is_under_way() -> None:
    pipeline = Pipeline(adoptable(1), solo(), loss=loss, sample=SAMPLE, microbatches=2, schedule="2bw")
    tokens = torch.zeros(4, 5, dtype=torch.int64)
    assert pipeline.step(tokens, tokens) == ()
    with pytest.raises(PipelineError, match="step 0 is under way; call drain before state_dict"):
        pipeline.state_dict()
    assert [result.step for result in pipeline.drain()] == [0]
    pipeline.state_dict()
