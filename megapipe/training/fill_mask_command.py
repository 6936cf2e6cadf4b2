"""The command line of tools/fill_mask.py: fill in the gaps of texts with a trained BERT."""

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
Fills in the gaps of texts, written [MASK], with a trained BERT: one token each, every gap by itself.

For each text it prints the text with the likeliest tokens, and below it the candidates of every gap. A token that
begins with ## continues the word before it. Runs as one process, whatever layout trained the model.
"""
EXAMPLES = """\
examples:
  tools/fill_mask.py --checkpoint runs/bert --text "def __init__([MASK], name):"
  tools/fill_mask.py --checkpoint runs/bert/checkpoints/step-00000400 --text "for i [MASK] range([MASK]):" --top-k 3
"""


def build_parser() -> argparse.ArgumentParser:
    """Wrong values are told by the parser, which exits with status 2; rules that need the model come later."""
    parser = tool_parser("fill_mask.py", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a step's folder, or a run's: its newest whole checkpoint"
    )
    parser.add_argument(
        "--text", action="append", required=True, metavar="TEXT", help="text with gaps; may be given several times"
    )
    parser.add_argument("--top-k", type=positive, default=5, metavar="K", help="candidates of each gap (5)")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="the WordPiece vocabulary (the one that the model was trained with, where it still lies there)",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="a GPU where there is one")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command. Exit status: 0, 1 for unusable input, 2 for a wrong command line, 130 for Ctrl-C."""
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
        raise ConfigError([f"{world_size} ranks were started, but gaps are filled by one: leave out torchrun"])
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
    """A text, and under it a line for each of its gaps."""
    print(filled.text)
    for number, candidates in enumerate(filled.gaps, start=1):
        told = ", ".join(f"{each.piece} {each.probability:.1%}" for each in candidates)
        print(f"  gap {number}: {told}", flush=True)
