"""Runs whose ops are Triton's, interpreted, or CUDA's, emulated, against the reference; and what a run says of it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.config import ConfigError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.kernels.apex_backend import kernels as apex_kernels
from megapipe.kernels.cuda_backend import kernels as cuda_kernels
from megapipe.kernels.cuda_backend import library as cuda_library
from megapipe.kernels.cuda_backend.library import Library
from megapipe.kernels.ops import NORM, OPS
from megapipe.kernels.reference import attention as reference_attention
from megapipe.kernels.reference import norms as reference_norms
from megapipe.kernels.reference import optimizer as reference_optimizer
from megapipe.kernels.registry import REFERENCE, Backend, KernelOp, Registry
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop import replica
from megapipe.training.loop.replica import Replica
from megapipe.training.validation import described_choices, document_attention, kernel_choices, kernel_problems
from tests.kernels import apex_stand_in, emulated
from tests.kernels.cases import needs_triton
from tests.kernels.interpreter import interpret
from tests.support import gpt_runs
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_bits, check_gradients
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, run_gpt
from tests.support.meshes import run_mesh, run_threads

MODELS = {
    "gpt2": GPT2_SHAPE,
    "gpt2-dropout": replace(GPT2_SHAPE, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1),
    "llama-unfused": replace(LLAMA_SHAPE, qk_norm=True, attention="unfused"),
}
HALVES = {"whole": {}, "halves": {"two_bp": True}}
CPU = torch.device("cpu")


def configuration(corpus: str, model: ModelConfig, **schedule: object) -> PretrainConfig:
    return make_config(corpus, model, batch={"global_size": 4, "micro_size": 2}, schedule=schedule)


def on_backend(
    mesh: Mesh, config: PretrainConfig, backend: str, library: Path | None = None
) -> tuple[RankRun, set[str]]:
    """Two steps with every op of the run that has such a backend forced to it, and the choices that were made."""
    registries: list[Registry] = []

    class Recorded(Replica):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            registries.append(self.kernels)

    if backend == "triton":
        interpret()
        os.environ["TRITON_INTERPRET"] = "1"  # for the registry
    if library is not None:
        replica.OPS = on_emulated_gpu(library)  # type: ignore[attr-defined]
    gpt_runs.Replica = Recorded  # type: ignore[misc]
    demands = {choice.op: backend for choice in kernel_choices(config, mesh.device, OPS)}
    for op in list(demands):
        config.kernels = replace(config.kernels, backends={op: backend})
        if kernel_problems(config):  # there is no such backend
            del demands[op]
    config.kernels = replace(config.kernels, backends=demands)
    return run_gpt(mesh, config, 2), set(registries[0].report().splitlines())


def on_emulated_gpu(library: Path) -> Registry:
    """The registry with csrc/ built for this processor in the place of CUDA's backends."""
    loaded = Library(library, device="cpu")
    cuda_library.current = lambda: loaded  # type: ignore[assignment]
    ops = (
        ("layer_norm", NORM, reference_norms),
        ("rms_norm", NORM, reference_norms),
        ("attention_probabilities", ("apply",), reference_attention),
        ("adamw", ("step",), reference_optimizer),
    )
    cuda = Backend("cuda", cuda_kernels)
    emulated_ops = [KernelOp(name, functions, (cuda, Backend(REFERENCE, ours))) for name, functions, ours in ops]
    return Registry([*OPS.ops, *emulated_ops])


def check_runs(actual: RankRun, expected: RankRun) -> None:
    """The same training to within fp32's rounding; the second loss has seen an update."""
    losses, wanted = ([result.loss for result in run.results] for run in (actual, expected))
    assert losses == pytest.approx(wanted, rel=2e-6)
    norms, wanted_norms = ([result.gradient_norm for result in run.results] for run in (actual, expected))
    assert norms == pytest.approx(wanted_norms, rel=1e-5)
    check_gradients(assembled([actual.gradients]), assembled([expected.gradients]))


def choices_of_equal_runs(corpus: str, model: str, backend: str, library: Path | None = None) -> set[str]:
    """Check that a run on a backend is the reference's, and in halves the same run. Return its choices."""
    whole, halves = (configuration(corpus, MODELS[model], **schedule) for schedule in HALVES.values())
    expected = run_mesh({}, run_gpt, whole, 2)[0]
    [(actual, choices)] = run_mesh({}, on_backend, whole, backend, library, timeout=120)
    check_runs(actual, expected)
    [(split, _)] = run_mesh({}, on_backend, halves, backend, library, timeout=120)
    check_bits([split], actual)
    return choices


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    ["llama-unfused", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gpt2", "gpt2-dropout"))],
)
def test_a_run_on_triton_is_the_references(corpus: str, model: str) -> None:
    choices = choices_of_equal_runs(corpus, model, "triton")
    assert choices
    assert all(": triton (requested by the configuration)" in choice for choice in choices)


@emulated.needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama-unfused"])
def test_a_run_on_an_emulated_gpu_is_the_references(
    corpus: str, model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    choices = choices_of_equal_runs(corpus, model, "cuda", emulated.shared_library(tmp_path_factory))
    assert sum(": cuda (requested by the configuration)" in choice for choice in choices) >= 2


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ({}, {}),
        pytest.param({"tensor": 2}, {"parallel": {"tensor": 2, "sequence": True}}, marks=pytest.mark.slow),
        pytest.param({"data": 2}, {"parallel": {"data": 2}, "zero": {"stage": 2}}, marks=pytest.mark.slow),
    ],
)
def test_apex_accumulates_the_references_matrix_gradients(
    corpus: str, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], groups: dict[str, dict[str, object]]
) -> None:
    """In whole backwards and in halves; every micro-batch of every step calls it for four matrices of each block."""
    whole, halves = (configuration(corpus, LLAMA_SHAPE, **schedule) for schedule in HALVES.values())
    for name, values in groups.items():
        for config in (whole, halves):
            setattr(config, name, replace(getattr(config, name), **values))
    expected = run_mesh(sizes, run_gpt, whole, 2, backend="threads")
    apex_stand_in.install(monkeypatch)
    calls: list[torch.Size] = []

    def counted(x: torch.Tensor, dy: torch.Tensor, total: torch.Tensor) -> None:
        calls.append(total.shape)
        accumulate(x, dy, total)

    accumulate = apex_kernels.weight_gradient
    monkeypatch.setattr(apex_kernels, "weight_gradient", counted)
    on_cpu = KernelOp(
        "weight_gradient", ("apply",), (Backend("apex", apex_kernels), Backend(REFERENCE, reference_optimizer))
    )
    monkeypatch.setattr(replica, "OPS", Registry([*OPS.ops, on_cpu]))
    runs = []
    for config in (whole, halves):
        config.kernels = replace(config.kernels, backends={"weight_gradient": "apex"})
        runs.append(run_mesh(sizes, run_gpt, config, 2, backend="threads"))
        microbatches = config.batch.global_size // config.batch.micro_size
        assert len(calls) == 2 * microbatches * LLAMA_SHAPE.num_layers * 4 * sizes.get("tensor", 1)
        calls.clear()
    gradients = [assembled([run.gradients for run in ranks]) for ranks in (*runs, expected)]
    check_gradients(gradients[0], gradients[2])
    assert all(torch.equal(one, gradients[1][name]) for name, one in gradients[0].items())


def test_sums_of_weight_gradients_are_not_compiled(corpus: str) -> None:
    config = configuration(corpus, GPT2_SHAPE)
    config.kernels = replace(config.kernels, backends={"weight_gradient": "apex"})
    assert kernel_problems(config) == []
    with pytest.raises(ConfigError, match=r"op 'weight_gradient' is requested from backend 'apex'.*needs a GPU"):
        kernel_choices(config, CPU, OPS.with_overrides(config.kernels.backends))
    config.training = replace(config.training, compile=True)
    (problem,) = kernel_problems(config)
    assert problem.endswith("remove weight_gradient, or set training.compile false")


@pytest.mark.parametrize("model", [*MODELS.values(), POST_NORM, PRE_NORM], ids=[*MODELS, "bert", "bert-dropout"])
def test_the_reported_kernels_are_those_that_run(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: ModelConfig
) -> None:
    picked, pick = set(), Registry.pick

    def recording(self: Registry, op: str, like: torch.Tensor) -> object:
        picked.add(op)
        return pick(self, op, like)

    monkeypatch.setattr(Registry, "pick", recording)
    is_bert = isinstance(model, BertModelConfig)
    config = make_bert_config(write_corpus(tmp_path), model) if is_bert else configuration(corpus, model)
    run_threads({}, run_gpt, config, 1)
    assert {choice.op for choice in kernel_choices(config, CPU, OPS)} == picked


def test_runs_without_a_gpu_print_one_line(corpus: str) -> None:
    lines = described_choices(kernel_choices(configuration(corpus, GPT2_SHAPE), CPU, OPS), {})
    assert lines == [
        "kernels: reference for adamw, bias_gelu, gradient_norm, layer_norm, linear_cross_entropy (needs a GPU)"
    ]


def test_different_reasons_are_printed_by_backend(corpus: str) -> None:
    backends = (
        Backend("triton", reference_norms, lambda device: "is not installed"),
        Backend("cuda", reference_norms, lambda device: "was not built"),
        Backend(REFERENCE, reference_norms),
    )
    kernels = Registry([*OPS.ops, KernelOp("layer_norm", NORM, backends)], {"bias_gelu": REFERENCE, "gelu": REFERENCE})
    lines = described_choices(
        kernel_choices(configuration(corpus, GPT2_SHAPE), CPU, kernels), {"bias_gelu": REFERENCE, "gelu": REFERENCE}
    )
    assert "kernels: reference for layer_norm (triton: is not installed; cuda: was not built)" in lines
    assert "kernels: reference for bias_gelu (requested by the configuration)" in lines
    assert lines[-1] == "warning: kernels.backends names gelu, which this run never calls"


def test_wrong_demands_are_problems_of_the_configuration(corpus: str) -> None:
    config = configuration(corpus, GPT2_SHAPE)
    config.kernels = replace(config.kernels, backends={"layer_nrm": "triton", "gelu": "trition", "adamw": "triton"})
    first, second = kernel_problems(config)
    assert "there is no op 'layer_nrm'; did you mean 'layer_norm'?" in first
    assert "op 'gelu' has no backend 'trition'; did you mean 'triton'?" in second


def test_a_run_says_how_documents_are_kept_apart(tmp_path: Path) -> None:
    config = make_config("unread", replace(GPT2_SHAPE, head_size=16))
    assert document_attention(config, torch.device("cpu")) is None
    config = replace(config, data=replace(config.data, isolate_documents=True))
    cpu_warning = document_attention(config, torch.device("cpu"))
    assert cpu_warning is not None
    assert "a mask [samples, tokens, tokens] (torch's flex_attention has no backward on cpu)" in cpu_warning
    assert "flex_attention over the blocks" in str(document_attention(config, torch.device("cuda")))
    demanded = replace(config, model=replace(config.model, attention="flex"))
    with pytest.raises(ConfigError, match="'flex', but torch's flex_attention has no backward on cpu"):
        document_attention(demanded, torch.device("cpu"))
    across = replace(demanded, data=replace(config.data, isolate_documents=False))
    assert any("data.isolate_documents is false" in problem for problem in across.problems())
