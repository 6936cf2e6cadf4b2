"""The command line of megapipe fill-mask: fill in the gaps of texts with a trained BERT."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megapipe.config.command_line import positive, tool_parser, with_hyphens
from megapipe.config.errors import ConfigError
from megapipe.training.checkpoint_command import status_of

if TYPE_CHECKING:
    from megapipe.training.fill_mask import Filled

DESCRIPTION = """\
Fill in the gaps of a text, written [MASK], with a trained BERT: one token per gap, each independently.

The command prints each text with the most likely tokens filled in, followed by the candidates for every gap. A token
that starts with ## continues the word before it. It runs as one process, no matter which layout trained the model.
"""
EXAMPLES = """\
examples:
  megapipe fill-mask --checkpoint runs/bert --text "def __init__([MASK], name):"
  megapipe fill-mask --checkpoint runs/bert/checkpoints/step-00000400 --text "for i [MASK] range([MASK]):" --top-k 3
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; it reports wrong values with status 2. Rules that depend on the model are checked later."""
    parser = tool_parser("megapipe fill-mask", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="folder of a run (its newest complete checkpoint is used), or of one checkpoint",
    )
    parser.add_argument(
        "--text", action="append", required=True, metavar="TEXT", help="text with gaps; may be repeated"
    )
    parser.add_argument("--top-k", type=positive, default=5, metavar="K", help="candidates per gap (default 5)")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="WordPiece vocabulary (default: the one that the model was trained with)",
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="device; auto uses a GPU if there is one"
    )
    return parser


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
    from megapipe.training.fill_mask import encoded_gaps, fill
    from megapipe.training.passes import LoadedModel

    world_size = LaunchEnvironment.read(os.environ).world_size
    if world_size > 1:
        raise ConfigError(
            [f"{world_size} ranks were started, but this command runs as one process: start it without torchrun"]
        )
    checkpoint = request.find_checkpoint(Path(arguments.checkpoint))
    run = read_manifest(checkpoint).run
    trained = request.trained_bert_config(run)
    config = request.on_layout(trained, 1, tensor=1, pipeline=1, device=arguments.device)
    name = arguments.tokenizer or trained.data.tokenizer or None
    tokenizer = request.find_tokenizer(name, trained.data.prefixes[0])
    texts = [(text, encoded_gaps(text, tokenizer, trained)) for text in arguments.text]
    mesh = initialize({}, device=arguments.device)
    try:
        model = LoadedModel(config, mesh, lambda states: load_weights(checkpoint, states, mesh))
        print(f"{checkpoint} (step {run.step}), tokenizer {tokenizer.spec}", file=sys.stderr, flush=True)
        for text, tokens in texts:
            _show(fill(model, tokenizer, text, tokens, arguments.top_k))
    finally:
        shutdown()


def _show(filled: "Filled") -> None:
    """Print a text, and one line for each of its gaps."""
    print(filled.text)
    for number, candidates in enumerate(filled.gaps, start=1):
        candidates_shown = ", ".join(f"{each.piece} {each.probability:.1%}" for each in candidates)
        print(f"  gap {number}: {candidates_shown}", flush=True)
