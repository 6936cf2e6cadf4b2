"""The arguments of tools/convert_checkpoint.py."""

import argparse

from megapipe.config.command_line import finite, positive, tool_parser
from megapipe.conversion.formats import FORMATS
from megapipe.conversion.target import SHARD_BYTES

DESCRIPTION = """\
Turns checkpoints of one format into another, looks into them, checks, compares and averages them.

Tensors pass one by one, so that a model of any size takes the memory of its largest tensor a few times over. Nothing
in a folder is run. Output appears whole or not at all, and never in a folder that exists.
"""
EXAMPLES = """\
examples:
  tools/convert_checkpoint.py convert runs/quickstart --to hf exported
  tools/convert_checkpoint.py convert --from hf Qwen2-0.5B --to megapipe weights/qwen2 --precision bf16
  tools/convert_checkpoint.py inspect runs/quickstart --json
  tools/convert_checkpoint.py verify runs/quickstart/checkpoints/step-00000400
  tools/convert_checkpoint.py diff runs/quickstart exported
  tools/convert_checkpoint.py average runs/a/checkpoints/step-* --output weights/averaged

docs/conversion.md tells what each format keeps.
"""


def build_parser() -> argparse.ArgumentParser:
    """Wrong values are told by the parser, which exits with status 2."""
    parser = tool_parser("convert_checkpoint.py", DESCRIPTION, EXAMPLES)
    commands = parser.add_subparsers(dest="command", required=True)

    convert = commands.add_parser("convert", help="write a checkpoint in another format or precision")
    convert.add_argument("source", metavar="PATH", help="folder of a checkpoint, or of a run: its newest whole one")
    convert.add_argument("target", metavar="TARGET", help="folder to write, which must not exist")
    _add_reading(convert)
    _add_writing(convert)
    convert.add_argument("--to", choices=list(FORMATS), required=True, help=_formats())
    convert.add_argument(
        "--weights-only", action="store_true", help="leave out moments and earlier weights, as most formats do anyway"
    )

    inspect = commands.add_parser("inspect", help="model, step, tensors, types and sizes, without reading a tensor")
    inspect.add_argument("source", metavar="PATH")
    _add_reading(inspect)
    inspect.add_argument("--json", action="store_true", help="one JSON object instead of tables")

    verify = commands.add_parser("verify", help="read every byte; exit status 1 and every bad file if there is one")
    verify.add_argument("sources", metavar="PATH", nargs="+", help="a run's folder means all of its checkpoints")
    _add_reading(verify)

    diff = commands.add_parser("diff", help="how two checkpoints differ; exit status 1 if they do")
    diff.add_argument("source", metavar="PATH")
    diff.add_argument("other", metavar="OTHER")
    _add_reading(diff)
    diff.add_argument("--weights-only", action="store_true", help="leave moments and earlier weights alone")
    diff.add_argument(
        "--tolerance", type=finite, default=0.0, metavar="X", help="differences of at most X are none (0)"
    )

    average = commands.add_parser("average", help="the mean of several checkpoints' weights, summed in float64")
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
        help="format of what is read, where its files do not tell",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read formats that store pickles, which can carry code: megatron, megatron-dist, dcp, and hf folders "
        "of .bin files. A confined process reads them and accepts only listed classes; no code in them runs",
    )


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="type of the weights that are written (as they are)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="hf: bytes, or the path of the model's tokenizer (the one that its training shard was made with)",
    )
    parser.add_argument(
        "--max-shard-bytes",
        type=positive,
        default=SHARD_BYTES,
        metavar="N",
        help=f"hf: largest file of weights ({SHARD_BYTES:,})",
    )
    megatron = parser.add_argument_group("megatron: over how many ranks the checkpoint is laid out")
    megatron.add_argument("--tensor", type=positive, default=1, metavar="N", help="tensor-parallel ranks (1)")
    megatron.add_argument("--pipeline", type=positive, default=1, metavar="N", help="pipeline stages (1)")
    megatron.add_argument(
        "--chunks", type=positive, default=1, metavar="N", help="model chunks on each stage, its virtual stages (1)"
    )
    megatron.add_argument(
        "--layer-names",
        choices=["local", "transformer_engine"],
        default="local",
        help="what a layer's norms are called: as Megatron-LM's --transformer-impl has them (local)",
    )


def _formats() -> str:
    return "; ".join(f"{name}: {known.title}" for name, known in FORMATS.items())
