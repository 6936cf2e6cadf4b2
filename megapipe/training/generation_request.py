"""Resolve a checkpoint and prompts, as given on a command line, to a configuration, a tokenizer and token ids."""

from collections.abc import Iterable
from dataclasses import replace
from json import dumps
from pathlib import Path

from megapipe.checkpoint.directory import newest_whole
from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest import RunState
from megapipe.checkpoint.manifest_file import MANIFEST
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.errors import ConfigError
from megapipe.config.load import Config, parse_as
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.errors import DataError
from megapipe.data.manifest import read_manifest
from megapipe.data.shard_tokenizer import tokenizer_of_shard
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.parallel.launch import DeviceChoice
from megapipe.spec.layers import tensor_problems


class PromptError(ValueError):
    """A prompt that the model cannot continue. The message names the prompt, the rule, and how to fix it."""


def find_checkpoint(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, else the newest complete checkpoint in it.

    Raises CheckpointError if there is none.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"no checkpoint: {directory} is not a folder; name the folder of a run or of a checkpoint"
        )
    if (directory / MANIFEST).is_file():
        return directory
    checkpoint = newest_whole(directory / "checkpoints") or newest_whole(directory)
    if checkpoint is None:
        raise CheckpointError(
            f"no complete checkpoint in {directory}: a run keeps them in folders such as checkpoints/step-00000100; "
            "a run saves its last step unless checkpoint.at_end is false, and others with --checkpoint.every N"
        )
    return checkpoint


def any_trained_config(run: RunState) -> PretrainConfig:
    """Return the configuration of the run that saved a checkpoint, with the precision it used. Raises ConfigError."""
    return _config_as(BertPretrainConfig if _is_bert(run) else PretrainConfig, run)


def trained_config(run: RunState) -> PretrainConfig:
    """Return the same for a GPT checkpoint."""
    if _is_bert(run):
        raise ConfigError(
            "the checkpoint is a BERT, which cannot continue text: use megapipe fill-mask, or name a GPT checkpoint"
        )
    return _config_as(PretrainConfig, run)


def trained_bert_config(run: RunState) -> BertPretrainConfig:
    """Return the same for a BERT checkpoint."""
    if not _is_bert(run):
        raise ConfigError(
            "the checkpoint is a GPT, which cannot fill gaps: use megapipe generate, or name a BERT checkpoint"
        )
    return _config_as(BertPretrainConfig, run)


def _is_bert(run: RunState) -> bool:
    return "norm_position" in run.config.get("model", {})


def _config_as(kind: type[Config], run: RunState) -> Config:
    config = parse_as(kind, ["--config", dumps(run.config), f"--training.precision={run.precision}"])
    problems = config.model.problems()
    if problems:
        raise ConfigError(problems)
    return config


def on_layout(
    config: PretrainConfig, world_size: int, *, tensor: int, pipeline: int | None, device: DeviceChoice
) -> PretrainConfig:
    """Return the same model on another layout. pipeline: None uses all processes that `tensor` leaves.

    Raises ConfigError for a layout that does not fit the model.
    """
    pipeline = max(1, world_size // tensor) if pipeline is None else pipeline
    problems = tensor_problems(config.model, tensor)
    layers = config.model.num_layers + 2
    if pipeline > layers:
        problems.append(
            f"{pipeline} pipeline ranks exceed the {layers} layers of the model (embedding, {layers - 2} blocks, head)"
            f"; every rank needs at least one: use at most {layers}"
        )
    if tensor * pipeline != world_size:
        problems.append(
            f"tensor {tensor} x pipeline {pipeline} = {tensor * pipeline} ranks, but {world_size} were started: start "
            f"torchrun with --nproc_per_node {tensor * pipeline}, or change --tensor or --pipeline"
        )
    if problems:
        raise ConfigError(problems)
    return replace(config, parallel=ParallelConfig(tensor=tensor, pipeline=pipeline, data=1, device=device))


def find_tokenizer(name: str | None, data_prefix: str) -> Tokenizer:
    """Return the tokenizer called `name`, or the one of the training data if `name` is None.

    Raises DataError if the training data name no tokenizer, or a tokenizer other than `name`.
    """
    manifest = read_manifest(data_prefix) if data_prefix else None
    if name is None:
        if manifest is None:
            raise DataError(
                f"the model was trained on {data_prefix or 'a shard'}, but there is no manifest next to it that names "
                "the tokenizer: set --tokenizer"
            )
        tokenizer = _shards_tokenizer(tokenizer_of_shard(data_prefix, manifest))
    else:
        tokenizer = open_tokenizer(name)
    if manifest is not None:
        manifest.check_tokenizer(tokenizer.spec, tokenizer.fingerprint())
    return tokenizer


def _shards_tokenizer(name: str) -> Tokenizer:
    try:
        return open_tokenizer(name)
    except DataError as error:
        raise DataError(f"the training shard names its tokenizer {name!r}, but {error}; or set --tokenizer") from error


def all_prompts(texts: Iterable[str], files: Iterable[str]) -> list[str]:
    """Return the prompts of a command line, those in files last. Raises PromptError for none or an unreadable file."""
    prompts = [*texts, *(_content(Path(file)) for file in files)]
    if not prompts:
        raise PromptError("nothing to generate: give a prompt with --prompt or --prompt-file")
    return prompts


def is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogates, which replace invalid UTF-8 bytes of a command line."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encoded(prompts: Iterable[str], tokenizer: Tokenizer, model: ModelConfig) -> list[list[int]]:
    """Return the token ids of the prompts; an empty prompt becomes an end-of-document token.

    Raises PromptError for a prompt that cannot be encoded, is too long, or has a token outside the model's vocabulary.
    """
    encodings = []
    for number, prompt in enumerate(prompts, start=1):
        if not is_utf8(prompt):
            raise PromptError(f"prompt {number} is not UTF-8 text")
        tokens = tokenizer.encode(prompt)
        if not tokens:
            if tokenizer.end_of_document is None:
                raise PromptError(
                    f"prompt {number} is empty, and the tokenizer has no end-of-document token to start with"
                )
            tokens = [tokenizer.end_of_document]
        if max(tokens) >= model.vocabulary_size:
            raise PromptError(
                f"prompt {number} has token {max(tokens)} but the model's vocabulary is {model.vocabulary_size}: set "
                "--tokenizer to the one that it was trained with"
            )
        if len(tokens) >= model.max_positions:
            raise PromptError(
                f"prompt {number} has {len(tokens)} tokens, but the model has only {model.max_positions} "
                f"positions: shorten it to at most {model.max_positions - 1} tokens"
            )
        encodings.append(tokens)
    return encodings


def _content(file: Path) -> str:
    try:
        return file.read_text("utf-8").removesuffix("\n")
    except OSError as error:
        raise PromptError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
