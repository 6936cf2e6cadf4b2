"""The arguments of megapipe generate."""

import argparse

from megapipe.config.command_line import positive, tool_parser

DESCRIPTION = """\
Generate text with a trained GPT. Texts go to standard output, all other messages to standard error.

The command runs as one process, or with torchrun on any number of pipeline and tensor ranks, no matter which layout
trained the model:
  torchrun --nproc_per_node 4 -m megapipe generate --tensor 2 --checkpoint runs/gpt --prompt "..."
A text depends only on checkpoint, prompt, seed and settings; layouts and other prompts change no more than rounding.
It ends at an end-of-document token, after --max-new-tokens tokens, or at the model's last position. Keys and values
are cached, so that a new token needs only its own forward pass.
"""
EXAMPLES = """\
examples:
  megapipe generate --checkpoint runs/quickstart --prompt "def main(" --prompt "import " --temperature 0.8 --top-p 0.95
  megapipe generate --checkpoint runs/quickstart/checkpoints/step-00000400 --prompt-file prompt.txt --temperature 0
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; it reports wrong values with status 2. Rules that depend on the model are checked later."""
    parser = tool_parser("megapipe generate", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="folder of a run (its newest complete checkpoint is used), or of one checkpoint",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be repeated; '' starts a new document",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8 file with one prompt, without its final newline; may be repeated",
    )
    parser.add_argument("--num-samples", type=positive, default=1, metavar="N", help="texts per prompt (default 1)")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="new tokens per text (default 128)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="divisor of the logits; lower is less random, 0 always takes the most likely token (default 1)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K most likely tokens (default: all)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the most likely tokens with a total probability of P (default 1: all)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random numbers (default 0)")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="bytes, or the path of a tokenizer (default: the one of the training data)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=32,
        metavar="N",
        help="texts generated at once; fewer take less memory (default 32)",
    )
    parser.add_argument("--tensor", type=positive, default=1, metavar="T", help="tensor ranks (default 1)")
    parser.add_argument(
        "--pipeline", type=positive, metavar="P", help="pipeline ranks (default: number of processes / tensor ranks)"
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="device; auto uses a GPU if there is one"
    )
    return parser
