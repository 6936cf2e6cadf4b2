"""The arguments of tools/generate.py."""

import argparse

from megapipe.config.command_line import positive, tool_parser

DESCRIPTION = """\
Continues prompts with a trained model. Texts go to standard output, everything else to standard error.

Runs as one process, or under torchrun on any number of pipeline and tensor ranks, whatever layout trained the model:
  torchrun --nproc_per_node 4 tools/generate.py --tensor 2 --checkpoint runs/gpt --prompt "..."
A text is a function of checkpoint, prompt, seed and settings: other layouts and other prompts beside it change nothing
but the rounding of its logits. It ends at an end of document, after --max-new-tokens tokens, or at the model's last
position. Keys and values of earlier tokens are kept, so that every new token costs one forward of itself.
"""
EXAMPLES = """\
examples:
  tools/generate.py --checkpoint runs/quickstart --prompt "def main(" --prompt "import " --temperature 0.8 --top-p 0.95
  tools/generate.py --checkpoint runs/quickstart/checkpoints/step-00000400 --prompt-file prompt.txt --temperature 0
"""


def build_parser() -> argparse.ArgumentParser:
    """Wrong values are told by the parser, which exits with status 2; rules that need the model come later."""
    parser = tool_parser("generate.py", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a step's folder, or a run's: its newest whole checkpoint"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be given several times; '' begins a new document",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8 file whose whole content, less a newline at its end, is a prompt; may be given several times",
    )
    parser.add_argument(
        "--num-samples", type=positive, default=1, metavar="N", help="continuations of each prompt (1)"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="tokens behind each prompt (128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="divides the logits; 0: the likeliest token (1)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="pick among the K likeliest tokens (all)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="pick among the likeliest tokens of together P (1: all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random numbers (0)")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="bytes, or the path of a tokenizer (the one that the model's training shard was made with)",
    )
    parser.add_argument(
        "--batch-size", type=positive, default=32, metavar="N", help="texts at once, which memory must hold (32)"
    )
    parser.add_argument("--tensor", type=positive, default=1, metavar="T", help="tensor ranks (1)")
    parser.add_argument(
        "--pipeline", type=positive, metavar="P", help="pipeline ranks (what the tensor ranks leave of the processes)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="a GPU where there is one")
    return parser
