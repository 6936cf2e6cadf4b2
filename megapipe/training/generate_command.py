"""The command line of megapipe generate: continue prompts with a trained model."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from megapipe.config.command_line import with_hyphens
from megapipe.config.errors import ConfigError
from megapipe.config.progress import ProgressBar
from megapipe.training.checkpoint_command import status_of
from megapipe.training.generate_arguments import build_parser

if TYPE_CHECKING:
    from megapipe.data.tokenizers import Tokenizer
    from megapipe.training.generate import Text


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit status: 0, 2 for a wrong command line or unusable input, 130 for Ctrl-C."""
    arguments = build_parser().parse_args(with_hyphens(argv))
    return status_of(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    import os
    from pathlib import Path

    from megapipe.checkpoint.load import load_weights
    from megapipe.checkpoint.manifest_file import read_manifest
    from megapipe.parallel.launch import LaunchEnvironment, initialize, shutdown
    from megapipe.training import generation_request as request
    from megapipe.training.generate import Limits, generate
    from megapipe.training.passes import LoadedModel
    from megapipe.training.sampling import SamplingSettings

    settings = SamplingSettings(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, seed=arguments.seed
    )
    if settings.problems():
        raise ConfigError(settings.problems())
    world_size = LaunchEnvironment.read(os.environ).world_size
    prompts = request.all_prompts(arguments.prompt, arguments.prompt_file)
    checkpoint = request.find_checkpoint(Path(arguments.checkpoint))
    run = read_manifest(checkpoint).run
    trained = request.trained_config(run)
    config = request.on_layout(
        trained, world_size, tensor=arguments.tensor, pipeline=arguments.pipeline, device=arguments.device
    )
    tokenizer = request.find_tokenizer(arguments.tokenizer, config.data.prefixes[0])
    tokens = request.encoded(prompts, tokenizer, config.model)
    limits = Limits(
        max_new_tokens=arguments.max_new_tokens,
        vocabulary_size=min(tokenizer.vocabulary_size, config.model.vocabulary_size),
        end_of_document=tokenizer.end_of_document,
        batch_size=arguments.batch_size,
    )
    sizes = {"tensor": config.parallel.tensor, "pipeline": config.parallel.pipeline}
    mesh = initialize(sizes, device=arguments.device)
    try:
        if mesh.rank == 0:
            print(f"{checkpoint} (step {run.step}), tokenizer {tokenizer.spec}", file=sys.stderr, flush=True)
            if trained.parallel.context > 1:
                shared = f"parallel.context {trained.parallel.context}"
                print(f"trained with {shared}; generating with parallel.context 1", file=sys.stderr, flush=True)
        model = LoadedModel(config, mesh, lambda states: load_weights(checkpoint, states, mesh))
        total = len(tokens) * arguments.num_samples * limits.max_new_tokens
        with closing(ProgressBar("generating", total, "tokens", log=True)) as progress:
            report = progress.advance if mesh.rank == 0 else lambda _: None
            texts = generate(model, tokens, arguments.num_samples, settings, limits, report)
        if mesh.rank == 0:
            _show(texts, tokenizer)
    finally:
        shutdown()


def _show(texts: Sequence["Text"], tokenizer: "Tokenizer") -> None:
    """Print prompts with their continuations; several of them with headings."""
    for text in texts:
        if len(texts) > 1:
            print(f"--- prompt {text.prompt + 1}, sample {text.sample + 1} ---")
        print(tokenizer.decode(text.tokens), flush=True)
