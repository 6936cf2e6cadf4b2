"""Trains models of Hugging Face families on a layout, and by a plain loop over transformers' own models.

The plain loop has one process, transformers' model and loss, torch's clipping and torch.optim.AdamW. A run starts from
the same folder (`init_from`), and is compared by its losses, the gradients of its first step, the logits of the model
that it exports, and the text that it generates.
"""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megapipe.config import ConfigError
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.conversion.formats import Contents, StoredTensor, TargetOptions
from megapipe.conversion.hugging_face import HuggingFaceSource, HuggingFaceTarget
from megapipe.engine.step import StepInput
from megapipe.inference.generation import Limits, generate
from megapipe.inference.settings import SamplingSettings
from megapipe.inference.trained_model import LoadedModel
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.parallel.in_process import in_process_meshes
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.checkpoints import Checkpointer
from megapipe.training.loop.replica import Replica
from megapipe.training.validation import validate
from tests.distributed.layout_cases import FULL, NOTHING, Groups, context, schedule, sequence, zero
from tests.inference.test_generate import filled_with
from tests.models.hugging_face import CONFIGS, ENCODERS, case_of, gradients_of, tame
from tests.models.test_bert_hugging_face import case_of as bert_of
from tests.support.bert_runs import make_bert_config, write_corpus
from tests.support.gpt_runs import (
    Shard,
    assembled,
    keep_first_gradients,
    load_batches,
    make_config,
    shards,
    write_shard,
)
from tests.support.meshes import Backend, run_mesh
from tests.support.ranks import run_ranks

STEPS, BATCH, LENGTH = 30, 4, 24
NEW_TOKENS = 12
PROMPTS = [[5, 1, 4], [7, 3, 9, 2]]
LAYOUTS: dict[str, tuple[dict[str, int], Groups]] = {
    "one process": ({}, NOTHING),
    "recompute full": ({}, FULL),
    "tensor 2": ({"tensor": 2}, NOTHING),
    "tensor 2, sequence": ({"tensor": 2}, sequence()),
    "pipeline 2, 1f1b": ({"pipeline": 2}, schedule("1f1b")),
    "pipeline 2, zb_h1": ({"pipeline": 2}, schedule("zb_h1")),
    "context 2, ring": ({"context": 2}, context("ring")),
    "context 2, all_to_all": ({"context": 2}, context("all_to_all")),
    "data 2": ({"data": 2}, NOTHING),
    "data 2, zero 3": ({"data": 2}, zero(3)),
}
"""Name of a layout -> sizes of its mesh, and what it changes."""
SAME_BITS = ("recompute full", "pipeline 2, 1f1b", "pipeline 2, zb_h1")
"""Layouts that reorder no sum, so that their numbers are those of one process."""
PAIRED = {"bert": "post", "megatron-bert": "pre", "albert": "shared"}
"""Families that are trained with sentence pairs -> form of their case."""
TOLERANCES = {"losses": 5e-6, "gradients": 1e-4, "logits": 1e-5, "text": 0.0}
"""Largest differences, relative to the loss, to a parameter's largest gradient, and to the largest logit."""


class Outcome(NamedTuple):
    """Results of a run. losses: of each step. gradients: of the first, by our names. logits: of the trained model
    on `probe`. text: tokens that the trained model continues PROMPTS with; None for a BERT."""

    losses: list[float]
    gradients: dict[str, Tensor]
    logits: Tensor
    text: list[list[int]] | None


class Family(NamedTuple):
    """A model of a family on disk, and how it is trained. model_type: its name in transformers."""

    model_type: str
    folder: Path
    config: PretrainConfig


def family_cases() -> dict[str, str]:
    """Return model_type -> the first case of its family."""
    cases: dict[str, str] = {}
    for name, (prefix, _) in (CONFIGS | ENCODERS).items():
        cases.setdefault(getattr(transformers, f"{prefix}Config").model_type, name)
    return {**cases, **PAIRED}


def written(folder: Path, model_types: Iterable[str], steps: int = STEPS) -> list[Family]:
    """Write shards and models of families into a folder."""
    corpus, sentences, cases = write_shard(folder), write_corpus(folder), family_cases()
    groups = {
        "batch": {"global_size": BATCH, "micro_size": 2},
        # With a smaller epsilon, rounding would move a weight as far as a gradient does.
        "optimizer": {"epsilon": 1e-4, "decay": "constant", "warmup_steps": 0, "learning_rate": 1e-3},
        "training": {"steps": steps, "directory": str(folder / "runs")},
    }
    folders = []
    for model_type in model_types:
        path = folder / model_type
        config: PretrainConfig
        if model_type in PAIRED:
            theirs: nn.Module = bert_of(form=PAIRED[model_type]).theirs
        else:
            theirs = case_of(cases[model_type]).theirs
        tame(theirs)
        theirs.save_pretrained(path)
        model: Any = HuggingFaceSource(path).contents.model
        if "bert" in model_type:
            alone = replace(sentences, pairs="none")
            config = make_bert_config(sentences if model_type in PAIRED else alone, model, **groups)
        else:
            if model.num_experts and model.expert_balance_rate:
                # transformers does not move the router's biases; a rate below any rounding does not either.
                model = replace(model, expert_balance_rate=1e-30)
            config = make_config(corpus, model, **groups, data={"sequence_length": LENGTH})
        folders.append(Family(model_type, path, replace(config, init_from=str(path))))
    return folders


# The plain loop.


def run_transformers(families: Sequence[Family]) -> dict[str, Outcome]:
    """Train families by the plain loop, in a process with one thread."""
    # One rank: on others, transformers would write no files.
    return run_ranks(1, train_each, families, timeout=900.0)[0]


def train_each(rank: int, families: Sequence[Family]) -> dict[str, Outcome]:
    """Train families by the plain loop."""
    return {family.model_type: train_transformers(family) for family in families}


def train_transformers(family: Family) -> Outcome:
    """Train by the plain loop."""
    theirs = opened(family.folder)
    trained = {name: each for name, each in theirs.named_parameters() if each.requires_grad}
    # Biases of experts are matrices, with a row for each expert.
    matrices = [each for name, each in trained.items() if each.dim() > 1 and not name.endswith("bias")]
    vectors = [each for name, each in trained.items() if each.dim() == 1 or name.endswith("bias")]
    settings = family.config.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
    )
    losses, gradients = [], {}
    for microbatches in batches(family.config):
        optimizer.zero_grad()
        loss = loss_of(theirs, microbatches)
        loss.backward()
        if not gradients:
            gradients = gradients_of(theirs)
        assert settings.clip_norm is not None
        nn.utils.clip_grad_norm_(trained.values(), settings.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return Outcome(losses, gradients, logits_of(theirs), None if "bert" in family.model_type else text_of(theirs))


def opened(folder: Path) -> Any:
    """Return a model of a folder, without dropout."""
    (kind,) = transformers.AutoConfig.from_pretrained(folder).architectures
    theirs = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_("correction_bias" not in name)
    for module in theirs.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # its row is trained, since its token may also take the place of a hidden one
    return theirs


def batches(config: PretrainConfig) -> Iterable[list[MicrobatchContext]]:
    """Yield the micro-batches of every step of a run, whole."""
    (mesh,) = in_process_meshes({})
    everything: Any = SimpleNamespace(is_first=True, is_last=True)
    config = replace(config, parallel=replace(config.parallel, data=1))
    for batch in load_batches(everything, config, mesh, config.training.steps):
        yield list(batch.contexts)


def loss_of(theirs: Any, microbatches: Sequence[MicrobatchContext]) -> Tensor:
    """Return the mean loss of tokens; of a BERT, the sum of the means over hidden tokens and sentence pairs."""
    if not isinstance(microbatches[0], BertContext):
        tokens, labels, mask = (
            torch.cat([getattr(each, name) for each in microbatches]) for name in ("tokens", "labels", "loss_mask")
        )
        return weighted(theirs(tokens).logits, labels, mask) / mask.sum()
    terms, counts = [], []
    for each in microbatches:
        assert isinstance(each, BertContext)
        assert each.tokens is not None
        assert each.lengths is not None
        assert each.positions is not None
        visible = (torch.arange(each.tokens.shape[1]) < each.lengths[:, None]).long()
        given = {"token_type_ids": each.token_types} if "type_vocab_size" in theirs.config else {}
        if "Roberta" in type(theirs).__name__:
            # By itself it leaves tokens with the id of padding out when it numbers the others.
            given["position_ids"] = theirs.config.pad_token_id + 1 + torch.arange(LENGTH).expand_as(each.tokens)
        output = theirs(input_ids=each.tokens, attention_mask=visible, **given)
        logits, pairs = heads_of(output)
        rows = logits.gather(1, each.positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
        sentences = [] if pairs is None else [(pairs, each.sentence_labels, each.sentence_weights)]
        predicted = [(rows, each.labels, each.loss_mask), *sentences]
        terms.append(torch.stack([weighted(*one) for one in predicted]))
        counts.append(torch.stack([weights.sum() for *_, weights in predicted]))  # type: ignore[union-attr]
    return (sum(terms) / sum(counts)).sum()  # type: ignore[union-attr,return-value]


def heads_of(output: Any) -> tuple[Tensor, Tensor | None]:
    """Return the logits of tokens, and those of sentence pairs if there are any, of what a model returned."""
    if "prediction_logits" not in output:
        return output.logits, None
    return output.prediction_logits, output.sop_logits if "sop_logits" in output else output.seq_relationship_logits


def weighted(logits: Tensor, labels: Tensor | None, weights: Tensor | None) -> Tensor:
    """Return the sum of the losses of predictions, each times its weight."""
    assert labels is not None
    assert weights is not None
    losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


def logits_of(theirs: Any) -> Tensor:
    """Return the logits for random tokens; of a BERT those of tokens."""
    tokens = torch.randint(61, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return heads_of(theirs(tokens))[0]


def text_of(theirs: Any) -> list[list[int]]:
    """Return the most likely continuation of each prompt by transformers."""
    theirs.generation_config.eos_token_id = None
    return [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]


# Runs on layouts.


def on_layout(config: PretrainConfig, layout: str) -> PretrainConfig:
    """Return the run of a layout."""
    sizes, groups = LAYOUTS[layout]
    shape = {name: sizes.get(name, 1) for name in ("data", "pipeline", "context", "tensor")}
    groups = {**groups, "parallel": {**groups.get("parallel", {}), **shape, "timeout_seconds": 60.0}}
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})


def refusal(config: PretrainConfig, layout: str) -> str | None:
    """Return the first line with which a layout refuses a run."""
    try:
        validate(on_layout(config, layout), MeshShape(LAYOUTS[layout][0]).world_size)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return None


def run_layout(layout: str, families: Sequence[Family], backend: Backend = "processes") -> dict[str, Outcome]:
    """Train families on a layout, one after the other by one set of ranks."""
    return run_mesh(LAYOUTS[layout][0], train_all, layout, families, backend=backend, timeout=900.0)[0]


def train_all(mesh: Mesh, layout: str, families: Sequence[Family]) -> dict[str, Outcome]:
    """Train families on this rank."""
    return {family.model_type: train(mesh, layout, family) for family in families}


def train(mesh: Mesh, layout: str, family: Family) -> Outcome:
    """Train a family on this rank, export it, and generate text."""
    config = on_layout(family.config, layout)
    with Checkpointer(config, mesh) as checkpointer:
        replica = Replica(config, mesh)
        assert checkpointer.restore(replica) is None
    gradients = keep_first_gradients(replica)
    losses = []
    for step, batch in enumerate(load_batches(replica, config, mesh, config.training.steps)):
        given = StepInput(step, batch.contexts, batch.token_counts, config.optimizer.learning_rate)
        losses.append(replica.engine.run(given).loss)
    states = replica.states()
    weights = whole(mesh, shards(states, [state.master for state in states]))
    logits = logits_of(exported(config, weights)) if mesh.rank == 0 else torch.empty(0)
    return Outcome(losses, whole(mesh, list(gradients.values())), logits, generated(mesh, config, weights))


def whole(mesh: Mesh, parts: list[Shard]) -> dict[str, Tensor]:
    """Return whole tensors by name from the shards of all ranks."""
    return assembled(mesh.world.all_gather_object(parts))


def exported(config: PretrainConfig, weights: dict[str, Tensor]) -> Any:
    """Return the model that transformers loads from an export of these weights."""
    described = tuple(StoredTensor(name, "weights", tuple(each.shape), "F32") for name, each in weights.items())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exported"
        target = HuggingFaceTarget(path, Contents(config.model, described), TargetOptions())
        for tensor in described:
            target.add(tensor, weights[tensor.name])
        target.finish()
        return opened(path)


def generated(mesh: Mesh, config: PretrainConfig, weights: dict[str, Tensor]) -> list[list[int]] | None:
    """Continue the prompts, on the layout if generation has it, else on one process."""
    if isinstance(config, BertPretrainConfig):
        return None
    sizes = {name: mesh.size(name) for name in ("tensor", "pipeline")}
    if MeshShape(sizes).world_size < mesh.world_size:
        sizes, mesh = {}, in_process_meshes({})[0]
    plain = PretrainConfig(model=config.model, data=replace(config.data, sequence_length=config.model.max_positions))
    plain.parallel = replace(plain.parallel, data=1, **sizes)
    limits = Limits(max_new_tokens=NEW_TOKENS, vocabulary_size=config.model.vocabulary_size)
    loaded = LoadedModel(plain, mesh, filled_with(weights))
    texts = generate(loaded, PROMPTS, 1, SamplingSettings(temperature=0.0), limits)
    return [text.generated for text in texts]


# Comparison.


def differences(actual: Outcome, expected: Outcome) -> dict[str, float]:
    """Return the largest relative difference of each quantity; of texts 1 if any token differs, else 0."""
    names = {name for name in actual.gradients if not name.endswith("router.bias")}
    assert names == names & expected.gradients.keys()
    pairs = [(actual.gradients[name], expected.gradients[name]) for name in names]
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(actual.losses, expected.losses, strict=True)),
        "gradients": max(relative(a, b) for a, b in pairs),
        "logits": relative(actual.logits, expected.logits),
        "text": float(actual.text != expected.text),
    }


def may_differ(model_type: str, layout: str) -> bool:
    """Return whether a layout reorders sums. The gradients of blocks with the same weights are summed by stage."""
    return layout not in SAME_BITS or (model_type == "albert" and "pipeline" in layout)


def same_bits(actual: Outcome, alone: Outcome) -> bool:
    """Return whether a layout gave the losses, first gradients and logits of one process, bit for bit."""
    gradients = actual.gradients.keys() == alone.gradients.keys() and all(
        torch.equal(gradient, alone.gradients[name]) for name, gradient in actual.gradients.items()
    )
    return gradients and actual.losses == alone.losses and torch.equal(actual.logits, alone.logits)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest element."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())
