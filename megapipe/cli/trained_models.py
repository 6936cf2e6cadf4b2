"""The commands that use a trained model: generate, fill-mask and evaluate."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.config import ConfigError
from megapipe.config.command_line import ProgressBar, exit_status, positive, tool_parser, with_hyphens
from megapipe.config.field_types import real_number, whole_number
from megapipe.inference.settings import SamplingSettings, all_prompts, check_gaps, stop_problems

if TYPE_CHECKING:
    from megapipe.config.parallel import ParallelConfig
    from megapipe.config.run import PretrainConfig
    from megapipe.data.samples import SplitName
    from megapipe.data.tokenizers import Tokenizer
    from megapipe.inference.trained_model import TrainedModel
    from megapipe.training.loop.batches import Samples

GENERATE_DESCRIPTION = """\
Generate text with a trained GPT. Texts go to standard output, all other messages to standard
error.

The command runs as one process, or with torchrun on any number of pipeline and tensor ranks,
no matter which layout trained the model:
  torchrun --nproc_per_node 4 -m megapipe generate --tensor 2 --checkpoint runs/gpt --prompt "..."
A text depends only on checkpoint, prompt, seed and settings; layouts and other prompts only
change rounding. It ends at an end-of-document token, before a --stop string, after
--max-new-tokens tokens, or at the model's last position. Keys and values are cached, so that a
new token needs only its own forward pass.
"""
GENERATE_EXAMPLES = """\
examples:
  megapipe generate --checkpoint runs/quickstart --prompt "def main(" --prompt "import " --temperature 0.8 --top-p 0.95
  megapipe generate --checkpoint runs/quickstart/checkpoints/step-00000400 --prompt-file prompt.txt --temperature 0
  megapipe generate --checkpoint runs/quickstart --prompt "def " --min-p 0.1 --repetition-penalty 1.1 --stop "def "
"""
FILL_MASK_DESCRIPTION = """\
Fill in the gaps of a text, written [MASK], with a trained BERT: one token per gap, each
independently.

The command prints each text with the most likely tokens filled in, followed by the candidates
for every gap. A token that starts with ## continues the word before it. It runs as one
process, no matter which layout trained the model.
"""
FILL_MASK_EXAMPLES = """\
examples:
  megapipe fill-mask --checkpoint runs/bert --text "def __init__([MASK], name):"
  megapipe fill-mask --checkpoint runs/bert/checkpoints/step-00000400 --text "for i [MASK] range([MASK]):" --top-k 3
"""
EVALUATE_DESCRIPTION = """\
Print the loss, the perplexity and, for a BERT, the accuracies of a trained model on a data
shard.

By default the shard is the one that the model was trained on, and its validation split is
used, as in evaluations during training. The numbers do not depend on the layout that trained
the model, nor on the layout of the evaluation. Memory holds both weights and gradients.

With --tasks, the command prints the metrics of tasks of lm-eval instead, and holds weights
only. That needs pip install '.[evaluation]' in megapipe's folder.
"""
EVALUATE_EXAMPLES = """\
examples:
  megapipe evaluate --checkpoint runs/quickstart
  megapipe evaluate --checkpoint runs/quickstart --split test --json
  megapipe evaluate --checkpoint runs/quickstart/checkpoints/step-00000400 --data-prefix data/other_text_document
  torchrun --nproc_per_node 4 -m megapipe evaluate --checkpoint runs/gpt --tensor 2
  megapipe evaluate --checkpoint runs/quickstart --tasks hellaswag,lambada_openai --samples 100
"""


def generate(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 0, 2 for a wrong command line or unusable input, 130 for Ctrl-C."""
    arguments = generate_parser().parse_args(with_hyphens(argv))
    return _run(_generate, arguments)


def generate_parser() -> argparse.ArgumentParser:
    """Return the parser; it reports wrong values with status 2. Rules that depend on the model are checked later."""
    parser = _parser("generate", GENERATE_DESCRIPTION, GENERATE_EXAMPLES)
    for flag, metavar, about in (
        ("--prompt", "TEXT", "text to continue; '' starts a new document"),
        ("--prompt-file", "FILE", "UTF-8 file with one prompt, without its final newline"),
        ("--stop", "TEXT", "end a text before this string, after the prompt and across tokens"),
    ):
        help_text = f"{about}; may be repeated"
        parser.add_argument(flag, action="append", default=[], metavar=metavar, help=help_text)
    for flag, kind, default, metavar, about in (
        ("--num-samples", positive, 1, "N", "texts per prompt"),
        ("--max-new-tokens", positive, 128, "N", "new tokens per text"),
        ("--batch-size", positive, 32, "N", "texts generated at once; fewer take less memory"),
        ("--seed", whole_number, 0, "S", "seed of the random numbers"),
        ("--temperature", real_number, 1.0, "T", "divisor of the logits; 0 takes the likeliest token"),
        ("--top-p", real_number, 1.0, "P", "use the likeliest tokens with a total probability of P"),
        ("--min-p", real_number, 0.0, "P", "use tokens at least P times as likely as the likeliest"),
        (
            "--repetition-penalty",
            real_number,
            1.0,
            "X",
            "make tokens that the prompt or the text has less likely: "
            "divide their positive logits by X, multiply their negative ones by X",
        ),
    ):
        help_text = f"{about} (default {default:g})"
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=help_text)
    parser.add_argument("--top-k", type=whole_number, metavar="K", help="use the K likeliest tokens (default: all)")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="bytes, or the path of a tokenizer (default: the one of the training data)",
    )
    _add_layout(parser)
    return parser


def _generate(arguments: argparse.Namespace) -> None:
    names = SamplingSettings.__dataclass_fields__
    settings = SamplingSettings(**{name: getattr(arguments, name) for name in names})
    problems = settings.problems() + stop_problems(arguments.stop)
    if problems:
        raise ConfigError(problems)
    prompts = all_prompts(arguments.prompt, arguments.prompt_file)

    # Imported here because torch takes seconds, and a wrong flag should not wait for it.
    from megapipe.inference import trained_model as request
    from megapipe.inference.generation import Limits, StopStrings, generate
    from megapipe.inference.trained_model import LoadedModel

    trained, config, tokenizer = _gpt(arguments)
    tokens = request.encoded(prompts, tokenizer, config.model)
    limits = Limits(
        max_new_tokens=arguments.max_new_tokens,
        vocabulary_size=min(tokenizer.vocabulary_size, config.model.vocabulary_size),
        end_of_document=tokenizer.end_of_document,
        stop=StopStrings(tuple(arguments.stop), tokenizer),
        batch_size=arguments.batch_size,
    )
    with request.connected(config) as mesh:
        if mesh.rank == 0:
            print(f"{trained}, tokenizer {tokenizer.spec}", file=sys.stderr, flush=True)
            if trained.config.parallel.context > 1:
                shared = f"parallel.context {trained.config.parallel.context}"
                print(f"trained with {shared}; generating with parallel.context 1", file=sys.stderr, flush=True)
        model = LoadedModel(config, mesh, lambda states: trained.load(states, mesh))
        total = len(tokens) * arguments.num_samples * limits.max_new_tokens
        with closing(ProgressBar("generating", total, "tokens", log=True)) as progress:
            report = progress.advance if mesh.rank == 0 else lambda _: None
            texts = generate(model, tokens, arguments.num_samples, settings, limits, report)
        if mesh.rank == 0:
            for text in texts:
                if len(texts) > 1:
                    print(f"--- prompt {text.prompt + 1}, sample {text.sample + 1} ---")
                print(text.decoded(tokenizer), flush=True)


def fill_mask(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 0, 2 for a wrong command line or unusable input, 130 for Ctrl-C."""
    arguments = fill_mask_parser().parse_args(with_hyphens(argv))
    return _run(_fill_mask, arguments)


def fill_mask_parser() -> argparse.ArgumentParser:
    """Return the parser; it reports wrong values with status 2. Rules that depend on the model are checked later."""
    parser = _parser("fill-mask", FILL_MASK_DESCRIPTION, FILL_MASK_EXAMPLES)
    parser.add_argument(
        "--text", action="append", required=True, metavar="TEXT", help="text with gaps; may be repeated"
    )
    parser.add_argument("--top-k", type=positive, default=5, metavar="K", help="candidates per gap (default 5)")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="vocabulary of a BERT or RoBERTa (default: the model's own)",
    )
    return parser


def _fill_mask(arguments: argparse.Namespace) -> None:
    for text in arguments.text:
        check_gaps(text)

    # Imported here because torch takes seconds, and a wrong text should not wait for it.
    import os

    from megapipe.config.parallel import ParallelConfig
    from megapipe.inference import trained_model as request
    from megapipe.inference.generation import encoded_gaps, fill
    from megapipe.inference.trained_model import LoadedModel
    from megapipe.parallel.launch import LaunchEnvironment

    world_size = LaunchEnvironment.read(os.environ).world_size
    if world_size > 1:
        raise ConfigError(
            [f"{world_size} ranks were started, but this command runs as one process: start it without torchrun"]
        )
    trained = request.read_trained(arguments.checkpoint)
    bert = request.bert_config(trained)
    config = request.on_layout(bert, ParallelConfig(data=1, device=arguments.device))
    tokenizer = request.find_tokenizer(arguments.tokenizer or trained.tokenizer, bert.data.prefixes[0])
    texts = [(text, encoded_gaps(text, tokenizer, bert)) for text in arguments.text]
    size = min(tokenizer.vocabulary_size, bert.model.vocabulary_size)
    if arguments.top_k > size:
        raise ConfigError(f"--top-k is {arguments.top_k}; it must be at most {size}, the tokens of the vocabulary")
    with request.connected(config) as mesh:
        model = LoadedModel(config, mesh, lambda states: trained.load(states, mesh))
        print(f"{trained}, tokenizer {tokenizer.spec}", file=sys.stderr, flush=True)
        for text, tokens in texts:
            filled = fill(model, tokenizer, text, tokens, arguments.top_k)
            print(filled.text)
            for number, candidates in enumerate(filled.gaps, start=1):
                shown = ", ".join(f"{each.piece} {each.probability:.1%}" for each in candidates)
                print(f"  gap {number}: {shown}", flush=True)


def evaluate(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 0, 2 for a wrong command line or unusable input, 130 for Ctrl-C."""
    arguments = evaluate_parser().parse_args(with_hyphens(argv))
    return _run(_evaluate if arguments.tasks is None else _evaluate_tasks, arguments)


def evaluate_parser() -> argparse.ArgumentParser:
    """Return the parser; it reports wrong values with status 2. Rules that depend on the model are checked later."""
    parser = _parser("evaluate", EVALUATE_DESCRIPTION, EVALUATE_EXAMPLES)
    splits = ["train", "validation", "test"]
    about = "split of the training data (default validation); not with --data-prefix"
    parser.add_argument("--split", choices=splits, help=about)
    for flag, metavar, about in (
        ("--data-prefix", "PREFIX", "another shard of the same tokenizer, without .bin or .idx; all of it is used"),
        ("--tasks", "NAME[,NAME]", "tasks of lm-eval, or paths of their YAML files, instead of a shard"),
        ("--tasks-folder", "DIR", "folder of YAML files, the only tasks to name (default: the tasks of lm-eval)"),
        ("--tokenizer", "NAME", "tokenizer of the texts of --tasks (default: the one of the training data)"),
    ):
        parser.add_argument(flag, metavar=metavar, help=about)
    for flag, about in (
        ("--samples", "the first N samples, or documents of each task, only (default: all)"),
        ("--batch-size", "samples per micro-batch (default: batch.micro_size; tasks: 32)"),
    ):
        parser.add_argument(flag, type=positive, metavar="N", help=about)
    _add_layout(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _evaluate(arguments: argparse.Namespace) -> None:
    if arguments.tasks_folder is not None or arguments.tokenizer is not None:
        raise ConfigError("--tasks-folder and --tokenizer are for --tasks; name tasks, or leave them out")
    if arguments.data_prefix is not None and arguments.split is not None:
        raise ConfigError("--split selects a split of the training data; leave it or --data-prefix out")

    import json
    from dataclasses import asdict

    from megapipe.config.parallel import MeshShape
    from megapipe.inference import trained_model as request
    from megapipe.training.loop.batches import open_samples
    from megapipe.training.loop.replica import Replica
    from megapipe.training.loop.steps import Evaluator
    from megapipe.training.observe.display import evaluation_line
    from megapipe.training.validation import validate

    parallel = _layout(arguments)
    trained = request.read_trained(arguments.checkpoint)
    config = request.on_layout(trained.config, parallel)
    split: SplitName = arguments.split or "validation"
    if arguments.data_prefix is not None:
        config = _on_shard(config, arguments.data_prefix)
    elif not config.data.prefixes[0]:
        raise ConfigError("a Hugging Face folder names no training data: set --data-prefix to a shard")
    samples = open_samples(config, split)
    config = _in_batches(config, samples, arguments.samples, arguments.batch_size or trained.config.batch.micro_size)
    validate(config, MeshShape.of(config.parallel).world_size)
    with request.connected(config) as mesh:
        replica = Replica(config, mesh)
        trained.load(replica.states(), mesh)
        if mesh.rank == 0 and not arguments.json:
            used = f"{config.evaluation.samples:,} of {len(samples):,} samples of {', '.join(config.data.prefixes)}"
            print(f"{trained.path}, {used}", file=sys.stderr, flush=True)
        total = config.evaluation.samples
        with closing(ProgressBar("evaluating", total, "samples", log=True)) as progress:
            report = (lambda done: progress.update(done * total)) if mesh.rank == 0 else lambda _: None
            record = Evaluator(config, mesh, replica, samples).run(trained.step or 0, report=report)
        assert record is not None  # no signal stops it here
        if mesh.rank != 0:
            return
        if arguments.json:
            facts = {"checkpoint": str(trained.path), "data": config.data.prefixes, "split": split}
            print(json.dumps(facts | {"samples": config.evaluation.samples} | asdict(record)))
        else:
            print(evaluation_line(record, "loss" if arguments.data_prefix else f"{split} loss"))


def _evaluate_tasks(arguments: argparse.Namespace) -> None:
    if arguments.data_prefix is not None or arguments.split is not None:
        raise ConfigError("--tasks has its own texts; leave out --data-prefix and --split, or --tasks")
    folder = arguments.tasks_folder
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"--tasks-folder {folder} is not a folder; name one with YAML files of tasks")

    import json

    from megapipe.inference import trained_model as request
    from megapipe.inference.evaluation import Tasks
    from megapipe.inference.trained_model import LoadedModel

    trained, config, tokenizer = _gpt(arguments)
    tasks = Tasks(arguments.tasks.split(","), folder)
    with request.connected(config) as mesh:
        model = LoadedModel(config, mesh, lambda states: trained.load(states, mesh))
        results = tasks.evaluate(model, tokenizer, batch_size=arguments.batch_size or 32, limit=arguments.samples)
        if mesh.rank != 0:
            return
        if arguments.json:
            print(json.dumps({"checkpoint": str(trained.path), "tasks": results}, default=str))
            return
        for task, metrics in results.items():
            for name, value in metrics.items():
                if isinstance(value, float):
                    print(f"{task}: {name.removesuffix(',none')} {value:.4f}", flush=True)


def _run(command: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """Run a command, unless its --checkpoint is not a folder, and return the exit status."""

    def run() -> None:
        if not Path(arguments.checkpoint).is_dir():
            raise ConfigError(
                f"no checkpoint: {arguments.checkpoint} is not a folder; "
                "name the folder of a run, of a checkpoint, or of a Hugging Face model"
            )
        command(arguments)

    try:
        return exit_status(run)
    except Exception as error:
        from megapipe.training.resilience.failures import status_of  # with torch

        return status_of(error)


def _gpt(arguments: argparse.Namespace) -> "tuple[TrainedModel, PretrainConfig, Tokenizer]":
    """Return the model of --checkpoint, its configuration on the layout of the flags, and its tokenizer.

    Raises ConfigError for a BERT.
    """
    from megapipe.inference import trained_model as request

    parallel = _layout(arguments)
    trained = request.read_trained(arguments.checkpoint)
    request.check_is_gpt(trained)
    config = request.on_layout(trained.config, parallel)
    tokenizer = request.find_tokenizer(arguments.tokenizer or trained.tokenizer, config.data.prefixes[0])
    return trained, config, tokenizer


def _layout(arguments: argparse.Namespace) -> "ParallelConfig":
    """Return the layout of --tensor and --pipeline. Raises ConfigError if other ranks were started."""
    import os

    from megapipe.config.parallel import ParallelConfig
    from megapipe.parallel.launch import LaunchEnvironment

    world_size = LaunchEnvironment.read(os.environ).world_size
    tensor = arguments.tensor
    pipeline = arguments.pipeline or max(1, world_size // tensor)
    if tensor * pipeline != world_size:
        raise ConfigError(
            f"tensor {tensor} x pipeline {pipeline} = {tensor * pipeline} ranks, but the launcher started "
            f"{world_size}: start torchrun with --nproc_per_node {tensor * pipeline}, or change --tensor or --pipeline"
        )
    return ParallelConfig(tensor=tensor, pipeline=pipeline, data=1, device=arguments.device)


def _on_shard(config: "PretrainConfig", prefix: str) -> "PretrainConfig":
    """Return the configuration with all documents of another shard as its validation split.

    Raises DataError if the shard has another tokenizer.
    """
    from dataclasses import replace

    from megapipe.data.manifest import check_one_tokenizer, read_manifest

    check_one_tokenizer(read_manifest(each) for each in (config.data.prefixes[0], prefix) if each)
    return replace(config, data=replace(config.data, prefix=prefix, blend={}, split="0,1,0"))


def _in_batches(
    config: "PretrainConfig", samples: "Samples", at_most: int | None, micro_size: int
) -> "PretrainConfig":
    """Return the configuration for forward passes over the samples; an incomplete batch at the end is left out.

    Raises ConfigError if there are fewer samples than pipeline ranks.
    """
    from dataclasses import replace

    from megapipe.config.memory import OffloadConfig, RecomputeConfig
    from megapipe.config.parallel import ScheduleConfig, ZeroConfig
    from megapipe.config.run import BatchConfig

    count = min(len(samples), at_most or len(samples))
    pipeline = config.parallel.pipeline
    micro_size = min(micro_size, count // pipeline)
    if micro_size == 0:
        raise ConfigError(f"{count} samples are too few for {pipeline} pipeline ranks; use at most {count} ranks")
    size = micro_size * pipeline
    return replace(
        config,
        batch=BatchConfig(global_size=size, micro_size=micro_size),
        schedule=ScheduleConfig(),
        zero=ZeroConfig(),
        recompute=RecomputeConfig(),
        offload=OffloadConfig(),
        evaluation=replace(config.evaluation, samples=count // size * size),
        data=replace(config.data, order="keyed"),
    )


def _parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all commands have: the checkpoint and the device."""
    parser = tool_parser(f"megapipe {name}", description, examples)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="folder of a run (its newest checkpoint), a checkpoint or a Hugging Face model",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto uses GPUs if present")
    return parser


def _add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensor", type=positive, default=1, metavar="T", help="tensor ranks (default 1)")
    parser.add_argument(
        "--pipeline", type=positive, metavar="P", help="pipeline ranks (default: number of processes / tensor ranks)"
    )
