"""The command line of megapipe evaluate: loss and perplexity of a trained model on a data shard."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megapipe.config.command_line import positive, tool_parser, with_hyphens
from megapipe.config.errors import ConfigError
from megapipe.training.checkpoint_command import status_of

if TYPE_CHECKING:
    from megapipe.config.run import PretrainConfig
    from megapipe.data.splits import SplitName
    from megapipe.training.sources import Samples

DESCRIPTION = """\
Print the loss, the perplexity and, for a BERT, the accuracies of a trained model on a data shard.

By default the shard is the one that the model was trained on, and its validation split is used, as evaluations during
training do. The numbers do not depend on the layout that trained the model, nor on the one that evaluates it. Weights
and gradients are in memory.
"""
EXAMPLES = """\
examples:
  megapipe evaluate --checkpoint runs/quickstart
  megapipe evaluate --checkpoint runs/quickstart --split test --json
  megapipe evaluate --checkpoint runs/quickstart/checkpoints/step-00000400 --data-prefix data/other_text_document
  torchrun --nproc_per_node 4 -m megapipe evaluate --checkpoint runs/gpt --tensor 2
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; it reports wrong values with status 2. Rules that depend on the model are checked later."""
    parser = tool_parser("megapipe evaluate", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="folder of a run (its newest complete checkpoint is used), or of one checkpoint",
    )
    parser.add_argument(
        "--data-prefix",
        metavar="PREFIX",
        help="another shard, of the same tokenizer, without .bin or .idx; all its documents are used",
    )
    parser.add_argument(
        "--split",
        choices=["train", "validation", "test"],
        help="split of the training data (default validation); not with --data-prefix",
    )
    parser.add_argument("--samples", type=positive, metavar="N", help="the first N samples only (default: all)")
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="samples in a micro-batch; fewer take less memory (default: batch.micro_size of the training)",
    )
    parser.add_argument("--tensor", type=positive, default=1, metavar="T", help="tensor ranks (default 1)")
    parser.add_argument(
        "--pipeline", type=positive, metavar="P", help="pipeline ranks (default: all processes that --tensor leaves)"
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="device; auto uses GPUs if there are any"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit status: 0, 2 for a wrong command line or unusable input, 130 for Ctrl-C."""
    arguments = build_parser().parse_args(with_hyphens(argv))
    return status_of(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    import json
    import os
    from dataclasses import asdict
    from pathlib import Path

    from megapipe.checkpoint.load import load_weights
    from megapipe.checkpoint.manifest_file import read_manifest
    from megapipe.parallel.launch import LaunchEnvironment, initialize, shutdown
    from megapipe.training import generation_request as request
    from megapipe.training.display import evaluation_line
    from megapipe.training.evaluation import Evaluator
    from megapipe.training.families import family_of
    from megapipe.training.replica import Replica
    from megapipe.training.sources import open_samples
    from megapipe.training.validate import validate

    world_size = LaunchEnvironment.read(os.environ).world_size
    checkpoint = request.find_checkpoint(Path(arguments.checkpoint))
    run = read_manifest(checkpoint).run
    trained = request.any_trained_config(run)
    config = request.on_layout(
        trained, world_size, tensor=arguments.tensor, pipeline=arguments.pipeline, device=arguments.device
    )
    split: SplitName = arguments.split or "validation"
    if arguments.data_prefix is not None:
        if arguments.split is not None:
            raise ConfigError("--split is of the training data: leave it out, or leave --data-prefix out")
        config = _on_shard(config, arguments.data_prefix)
    samples = open_samples(config, split)
    config = _in_batches(config, samples, arguments.samples, arguments.batch_size or trained.batch.micro_size)
    validate(config, world_size)
    sizes = {"tensor": config.parallel.tensor, "pipeline": config.parallel.pipeline}
    mesh = initialize(sizes, device=arguments.device)
    try:
        replica = Replica(config, mesh, family_of(config).layers)
        load_weights(checkpoint, replica.states(), mesh)
        record = Evaluator(config, mesh, replica, samples).run(run.step)
        assert record is not None  # nothing stops it
        if mesh.rank != 0:
            return
        if arguments.json:
            facts = {"checkpoint": str(checkpoint), "data": config.data.prefixes, "split": split}
            print(json.dumps(facts | {"samples": config.evaluation.samples} | asdict(record)))
        else:
            used = f"{config.evaluation.samples:,} of {len(samples):,} samples of {', '.join(config.data.prefixes)}"
            print(f"{checkpoint}, {used}", file=sys.stderr, flush=True)
            print(evaluation_line(record, "loss" if arguments.data_prefix else f"{split} loss"))
    finally:
        shutdown()


def _on_shard(config: "PretrainConfig", prefix: str) -> "PretrainConfig":
    """Return the configuration with all documents of another shard as its validation split.

    Raises DataError for a shard of another tokenizer.
    """
    from dataclasses import replace

    from megapipe.data.checked_shards import check_one_tokenizer
    from megapipe.data.manifest import read_manifest

    manifests = [read_manifest(each) for each in (config.data.prefixes[0], prefix) if each]
    check_one_tokenizer([manifest for manifest in manifests if manifest is not None])
    return replace(config, data=replace(config.data, prefix=prefix, blend={}, split="0,1,0"))


def _in_batches(
    config: "PretrainConfig", samples: "Samples", at_most: int | None, micro_size: int
) -> "PretrainConfig":
    """Return the configuration for forward passes over the samples; up to one batch of them is left out at the end.

    Raises ConfigError for fewer samples than pipeline ranks.
    """
    from dataclasses import replace

    from megapipe.config.offload import OffloadConfig
    from megapipe.config.recompute import RecomputeConfig
    from megapipe.config.run import BatchConfig
    from megapipe.config.schedule import ScheduleConfig
    from megapipe.config.zero import ZeroConfig

    count = min(len(samples), at_most or len(samples))
    pipeline = config.parallel.pipeline
    micro_size = min(micro_size, count // pipeline)
    if micro_size == 0:
        raise ConfigError(f"{count} samples are too few for {pipeline} pipeline ranks; use at most {count}")
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
