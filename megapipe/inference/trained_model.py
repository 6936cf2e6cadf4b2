"""Load a trained model and prompts, and run the model's forward passes over growing texts."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from json import dumps
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.directory import whole_checkpoint
from megapipe.checkpoint.hugging_face import CONFIG, is_hugging_face, load_hugging_face
from megapipe.checkpoint.manifest import MANIFEST, TOKENIZER
from megapipe.checkpoint.manifest import read_manifest as read_run_manifest
from megapipe.checkpoint.save_and_load import load_weights
from megapipe.checkpoint.storage import read_json
from megapipe.config import ConfigError
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.load import kind_of, parse_as
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import MeshShape, ParallelConfig, ScheduleConfig
from megapipe.config.run import PretrainConfig
from megapipe.data import DataError
from megapipe.data.manifest import read_manifest, tokenizer_of_shard
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.engine.assembly import Assembly, Holding, ModelTable, residual_stream
from megapipe.engine.engine import Engine
from megapipe.engine.step import StepInput
from megapipe.inference.settings import PromptError
from megapipe.layout.stages import StageLayout, lay_out, layers_of
from megapipe.models.gpt_decoding import DecodingContext, cache_slots, decoding_layer
from megapipe.parallel.launch import joined
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule, build
from megapipe.spec.layers import tensor_problems
from megapipe.spec.model_folder import with_model_folders


@dataclass(frozen=True)
class TrainedModel:
    """Weights on disk.

    path: of the checkpoint. config: of the run that saved it. step: the step after which it was saved; None for a
    Hugging Face folder. tokenizer: name of the model's own tokenizer; None for the one of the training data.
    """

    path: Path
    config: PretrainConfig
    step: int | None
    tokenizer: str | None

    def load(self, states: Sequence[UnitState], mesh: Mesh) -> None:
        """Load the weights into the states of this rank; a collective call. Raises CheckpointError."""
        if self.step is None:
            load_hugging_face(self.path, states, self.config.model, mesh)
        else:
            load_weights(self.path, states, mesh)

    def __str__(self) -> str:
        return f"{self.path} (step {self.step})" if self.step is not None else str(self.path)


def read_trained(folder: str) -> TrainedModel:
    """Return the model in a folder: of a run, of a checkpoint, or of Hugging Face transformers.

    Raises CheckpointError if there is none, and ConfigError for a model that megapipe cannot express.
    """
    directory = Path(folder)
    if is_hugging_face(directory) and not (directory / MANIFEST).is_file():
        return _of_hugging_face(directory)
    path = whole_checkpoint(directory)
    run = read_run_manifest(path).run
    kind = BertPretrainConfig if "sentence_head" in run.config.get("model", {}) else PretrainConfig
    config = parse_as(kind, ["--config", dumps(run.config), f"--training.precision={run.precision}"])
    _check_model(config)
    named = config.data.tokenizer if isinstance(config, BertPretrainConfig) else ""
    tokenizer = str(path / TOKENIZER) if (path / TOKENIZER).is_dir() else named or None
    return TrainedModel(path, config, run.step, tokenizer)


_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def _of_hugging_face(folder: Path) -> TrainedModel:
    """Return the model of a folder, in the precision of its weights."""
    words = with_model_folders(["--model", str(folder)])
    config = parse_as(kind_of(words), words)
    described = read_json(folder / CONFIG)
    stored = described.get("dtype") or described.get("torch_dtype")
    config.training.precision = _PRECISIONS.get(str(stored), "fp32")  # type: ignore[assignment]  # words of the table
    config.data.sequence_length = min(config.data.sequence_length, config.model.max_positions)
    _check_model(config)
    return TrainedModel(folder, config, None, str(folder))


def connected(config: PretrainConfig) -> AbstractContextManager[Mesh]:
    """Connect this rank with the other ranks for the duration of the block."""
    return joined(MeshShape.of(config.parallel).sizes, device=config.parallel.device)


def check_is_gpt(trained: TrainedModel) -> None:
    """Raise ConfigError for a BERT."""
    if trained.config.model.kind != "gpt":
        raise ConfigError(
            "the checkpoint is a BERT, which cannot continue text: use megapipe fill-mask, or name a GPT checkpoint"
        )


def bert_config(trained: TrainedModel) -> BertPretrainConfig:
    """Return the configuration of a BERT. Raises ConfigError for a GPT."""
    if not isinstance(trained.config, BertPretrainConfig):
        raise ConfigError(
            "the checkpoint is a GPT, which cannot fill gaps: use megapipe generate, or name a BERT checkpoint"
        )
    return trained.config


def _check_model(config: PretrainConfig) -> None:
    problems = config.model.problems()
    if problems:
        raise ConfigError(problems)


def on_layout(config: PretrainConfig, parallel: ParallelConfig) -> PretrainConfig:
    """Return the configuration with another layout. Raises ConfigError if it does not fit the model."""
    problems = tensor_problems(config.model, parallel.tensor)
    layers = config.model.num_layers + 2
    if parallel.pipeline > layers:
        problems.append(
            f"{parallel.pipeline} pipeline ranks exceed the {layers} layers of the model (embedding, {layers - 2} "
            f"blocks, head); every rank needs at least one: use at most {layers}"
        )
    if problems:
        raise ConfigError(problems)
    return replace(config, parallel=parallel)


def find_tokenizer(name: str | None, data_prefix: str) -> Tokenizer:
    """Return the tokenizer called `name`, or the one of the training data if `name` is None.

    Raises DataError if the training data name no tokenizer, or a tokenizer other than `name`.
    """
    manifest = read_manifest(data_prefix) if data_prefix else None
    if name is not None:
        tokenizer = open_tokenizer(name)
    elif manifest is None:
        raise DataError(
            f"the model was trained on {data_prefix or 'a shard'}, "
            "but there is no manifest next to it that names the tokenizer: set --tokenizer"
        )
    else:
        named = tokenizer_of_shard(data_prefix, manifest)
        try:
            tokenizer = open_tokenizer(named)
        except DataError as error:
            raise DataError(
                f"the training shard names its tokenizer {named!r}, but {error}; or set --tokenizer"
            ) from error
    if manifest is not None:
        manifest.check_tokenizer(tokenizer.spec, tokenizer.fingerprint)
    return tokenizer


def encoded(prompts: Iterable[str], tokenizer: Tokenizer, model: ModelConfig) -> list[list[int]]:
    """Return the token ids of the prompts; an empty prompt becomes an end-of-document token.

    Raises PromptError for a prompt that cannot start a text, is too long, or has a token outside the model's
    vocabulary.
    """
    encodings = []
    for number, prompt in enumerate(prompts, start=1):
        tokens = tokenizer.encode(prompt)
        if not tokens:
            if tokenizer.end_of_document is None:
                raise PromptError(
                    f"prompt {number} is empty, and the tokenizer has no end-of-document token to start with"
                )
            tokens = [tokenizer.end_of_document]
        if max(tokens) >= model.vocabulary_size:
            raise PromptError(
                f"prompt {number} has token {max(tokens)} but the model's vocabulary is "
                f"{model.vocabulary_size}: set --tokenizer to the one that it was trained with"
            )
        if len(tokens) >= model.max_positions:
            raise PromptError(
                f"prompt {number} has {len(tokens)} tokens, but the model has only {model.max_positions} "
                f"positions: shorten it to at most {model.max_positions - 1} tokens"
            )
        encodings.append(tokens)
    return encodings


Restore = Callable[[Sequence[UnitState]], object]
"""Loads trained weights into the unit states of this rank."""


FULL_TOKENS = 256
"""Minimum number of tokens for an efficient micro-batch; with fewer, reading the weights takes most of the time."""


@dataclass(frozen=True)
class Split:
    """The texts of a pass in `num_microbatches` micro-batches of `rows` texts each; the last one is padded."""

    num_microbatches: int
    rows: int

    @classmethod
    def of(cls, num_texts: int, width: int) -> "Split":
        """Split texts with `width` new tokens each. The split does not depend on the layout, so all layouts compute
        the same bits."""
        num_microbatches = -(-num_texts // -(-FULL_TOKENS // width))
        return cls(num_microbatches, -(-num_texts // num_microbatches))

    @property
    def total(self) -> int:
        """Number of rows of all micro-batches."""
        return self.num_microbatches * self.rows


class LoadedModel:
    """This rank's stages of a trained model with weights only: gradients and optimizer state are freed.

    config: configuration of the training run, with the pipeline and tensor sizes of `mesh`.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh, restore: Restore) -> None:
        self.config = config
        self.mesh = mesh
        layers = layers_of(config)
        num_stages = config.parallel.pipeline
        self.layout: StageLayout = lay_out(layers, config.model, num_stages, config.data.sequence_length)
        model = ModelTable.of(config, self.layout, mesh)
        holding = Holding(parallel=config.parallel, master_weights=config.training.master_weights)
        self.assembly = Assembly(model, holding, mesh, self.schedule(1).header)
        restore(self.assembly.states)
        self.assembly.keep_weights_alone()

    @cached_property
    def last_rank(self) -> int:
        """World rank of the last stage, the first of its tensor group."""
        return self.mesh.shape.rank_of({"pipeline": self.schedule(1).rank_of(len(self.layout.ranges) - 1)})

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return a schedule with forwards only. All such schedules have the same order of stages."""
        return build(
            ScheduleConfig.name,
            self.config.parallel.pipeline,
            num_microbatches,
            mode="forward",
            units_per_stage=self.layout.units_per_stage,
            tied_groups=self.layout.tied,
        )


class Passes:
    """Forward passes of `num_texts` texts of up to `capacity` tokens. Every rank makes the same calls in the same
    order.

    widths: allowed numbers of new tokens per text in a pass.
    """

    def __init__(self, model: LoadedModel, num_texts: int, capacity: int, widths: Collection[int]) -> None:
        self._model = model
        self._splits = {width: Split.of(num_texts, width) for width in widths}
        rows = max(split.total for split in self._splits.values())
        reaches = {each.attention_reach for each in model.config.model.kinds_of_layers.values()}
        self._slots = cache_slots(reaches, capacity, max(widths))
        self._units = {
            number: [
                [decoding_layer(twins[0], rows=rows, capacity=capacity, slots=self._slots)] for twins in stage.units
            ]
            for number, stage in model.assembly.stages.items()
        }
        self._engines: dict[int, Engine] = {}

    def run(self, tokens: Tensor, positions: Tensor, last: Tensor, targets: Tensor | None = None) -> Tensor | None:
        """Return the logits [n, v] after one token of each text; None if another rank has the last stage.

        tokens, positions: int64 [n, s], the s new tokens of each of the n texts, and their positions; the earlier
        tokens of a text were in earlier passes. last: int64 [n], index within s of the token whose logits are
        returned; tokens after it are padding. Below 0 for a text that ended in an earlier pass, whose logits mean
        nothing; s or more if the text continues. targets: int64 [n, s]; with them, the result is float32 [n, s, 2]
        (see `DecodingHead`).
        """
        num_texts, width = tokens.shape
        split = self._splits[width]
        length = int(positions.max()) + 1
        # The last text is repeated to fill the last micro-batch, in rows of the caches that no text uses.
        source = torch.arange(split.total).clamp(max=num_texts - 1)
        tokens, positions, last = (each[source].to(self._model.mesh.device) for each in (tokens, positions, last))
        if targets is not None:
            targets = targets[source].to(self._model.mesh.device)
        contexts = []
        for first in range(0, split.total, split.rows):
            rows = slice(first, first + split.rows)
            wanted = None if targets is None else targets[rows]
            contexts.append(
                DecodingContext.of(
                    rows, tokens[rows], positions[rows], last[rows], length=length, slots=self._slots, targets=wanted
                )
            )
        result = self._engine(width).run(StepInput(0, contexts, token_counts=()))
        return torch.cat([logits for (logits,) in result.outputs])[:num_texts] if result.outputs else None

    def _engine(self, width: int) -> Engine:
        """Return the engine for `width` new tokens of every text. It is connected at its first use."""
        if width not in self._engines:
            split = self._splits[width]
            boundary = residual_stream(self._model.config, split.rows, width, requires_grad=False)
            schedule = self._model.schedule(split.num_microbatches)
            self._engines[width] = self._model.assembly.engine(schedule, boundary=boundary, units=self._units)
        return self._engines[width]
