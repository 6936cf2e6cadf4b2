"""The arguments of megapipe convert."""

import argparse

from megapipe.config.command_line import finite, positive, tool_parser
from megapipe.conversion.formats import FORMATS
from megapipe.conversion.target import SHARD_BYTES

DESCRIPTION = """\
Converts checkpoints between formats, and inspects, verifies, compares and averages them.

Tensors are converted one at a time, so that a model of any size needs a few times the memory of its largest
tensor. No code in a folder is run. The output appears whole or not at all, and never in a folder that exists.
"""
EXAMPLES = """\
examples:
  megapipe convert convert runs/quickstart --to hf exported
  megapipe convert convert --from hf Qwen2-0.5B --to megapipe weights/qwen2 --precision bf16
  megapipe convert inspect runs/quickstart --json
  megapipe convert verify runs/quickstart/checkpoints/step-00000400
  megapipe convert diff runs/quickstart exported
  megapipe convert average runs/a/checkpoints/step-* --output weights/averaged

docs/conversion.md explains what each format keeps.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser, which reports wrong values and exits with status 2."""
    parser = tool_parser("megapipe convert", DESCRIPTION, EXAMPLES)
    commands = parser.add_subparsers(dest="command", required=True)

    convert = commands.add_parser("convert", help="write a checkpoint in another format or precision")
    convert.add_argument(
        "source", metavar="PATH", help="folder of a checkpoint, or of a run (its newest complete checkpoint)"
    )
    convert.add_argument("target", metavar="TARGET", help="folder to write, which must not exist")
    _add_reading(convert)
    _add_writing(convert)
    convert.add_argument("--to", choices=list(FORMATS), required=True, help=_formats())
    convert.add_argument(
        "--weights-only", action="store_true", help="leave out moments and earlier weights, as most formats do anyway"
    )

    inspect = commands.add_parser(
        "inspect", help="show model, step, tensors, types and sizes without reading a tensor"
    )
    inspect.add_argument("source", metavar="PATH")
    _add_reading(inspect)
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    verify = commands.add_parser(
        "verify", help="read every byte; list bad files and exit with status 1 if there are any"
    )
    verify.add_argument("sources", metavar="PATH", nargs="+", help="folders; a run's folder means all its checkpoints")
    _add_reading(verify)

    diff = commands.add_parser("diff", help="show how two checkpoints differ; exit status 1 if they do")
    diff.add_argument("source", metavar="PATH")
    diff.add_argument("other", metavar="OTHER")
    _add_reading(diff)
    diff.add_argument("--weights-only", action="store_true", help="ignore moments and earlier weights")
    diff.add_argument("--tolerance", type=finite, default=0.0, metavar="X", help="ignore differences of at most X (0)")

    average = commands.add_parser("average", help="average the weights of several checkpoints in float64")
    average.add_argument("sources", metavar="PATH", nargs="+")
    average.add_argument("--output", required=True, metavar="TARGET", help="folder to write, which must not exist")
    _add_reading(average)
    _add_writing(average)
    average.add_argument("--to", choices=list(FORMATS), default="megapipe", help=_formats() + " (megapipe)")
    return parser


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="format",
        choices=list(FORMATS),
        help="format of the input, if its files do not identify it",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read formats that store pickles, which can carry code: megatron, megatron-dist, dcp, and hf folders "
        "of .bin files. A confined process reads them and accepts only listed classes; no code in them runs",
    )


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="type of the written weights (unchanged)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="hf: bytes, the path of the model's tokenizer, or none (the tokenizer of the training shard)",
    )
    parser.add_argument(
        "--max-shard-bytes",
        type=positive,
        default=SHARD_BYTES,
        metavar="N",
        help=f"hf: largest file of weights ({SHARD_BYTES:,})",
    )
    megatron = parser.add_argument_group("megatron: the ranks that the checkpoint is written for")
    megatron.add_argument("--tensor", type=positive, default=1, metavar="N", help="tensor-parallel ranks (1)")
    megatron.add_argument("--pipeline", type=positive, default=1, metavar="N", help="pipeline stages (1)")
    megatron.add_argument(
        "--chunks", type=positive, default=1, metavar="N", help="model chunks on each stage, its virtual stages (1)"
    )
    megatron.add_argument(
        "--layer-names",
        choices=["local", "transformer_engine"],
        default="local",
        help="names of a layer's norms, by Megatron-LM's --transformer-impl (local)",
    )


def _formats() -> str:
    return "; ".join(f"{name}: {known.title}" for name, known in FORMATS.items())
