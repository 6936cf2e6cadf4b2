"""`megapipe train`: which kind of model, and where its ranks run."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jsonargparse import ArgumentParser

from megapipe.cli.launcher import Job, first_slurm_node, launch, slurm_variables
from megapipe.cli.rank import run_parser, run_program
from megapipe.config.command_line import OneLineParser, natural, positive
from megapipe.config.errors import ConfigError
from megapipe.config.kinds import KINDS, kind_of
from megapipe.config.load import parse_given
from megapipe.config.run import PretrainConfig
from megapipe.training.exit_codes import ExitCode

EXAMPLES = """\
three commands to try:
  megapipe preprocess --input python-stdlib --output-prefix data/stdlib --tokenizer bytes --append-eod
  megapipe train --config gpt_tiny
  megapipe train -n 2 --config gpt_tiny --parallel.pipeline 2 --training.directory runs/pipeline

A BERT reads a shard that is split into sentences (megapipe preprocess --split-sentences):
  megapipe train -n 2 --config bert_quickstart --parallel.pipeline 2"""
HINT = f"usage: megapipe train [-n RANKS] --config FILE [--group.field VALUE ...]\n\n{EXAMPLES}"

FLAGS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--kind",),
        {
            "choices": tuple(KINDS),
            "help": "kind of model (default: bert if a field that only BERT runs have is set, otherwise gpt)",
        },
    ),
    (
        ("-n", "--ranks"),
        {"type": positive, "metavar": "N", "help": "start N ranks on this host, one per GPU or a few per CPU host"},
    ),
    (
        ("--nodes",),
        {"type": positive, "metavar": "N", "help": "start the same command on N hosts, with --rendezvous"},
    ),
    (
        ("--rendezvous",),
        {"metavar": "HOST:PORT", "help": "one of the hosts and a free port of it, where all hosts meet"},
    ),
    (
        ("--restarts",),
        {"type": natural, "metavar": "N", "help": "restart the ranks up to N times after a failure (default 0)"},
    ),
)
"""Flags besides those of a rank. Without -n, this process is one rank: alone, or as the variables of torchrun or Slurm
say."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    parser = OneLineParser(prog="megapipe train", add_help=False)
    for names, options in FLAGS:
        parser.add_argument(*names, **options)
    own, rest = parser.parse_known_args(arguments)
    if not rest:
        if os.environ.get("RANK", "0") == "0":
            print(HINT, file=sys.stderr)
        return ExitCode.WRONG_INPUT
    kind = kind_of(rest) if own.kind is None else KINDS[own.kind]
    if own.ranks is None and own.nodes is None and own.rendezvous is None and own.restarts is None:
        os.environ.update(slurm_variables(os.environ))
        return run_program(kind, rest, parser_of(kind))
    try:
        job = _job(own)
        parse_given(parser_of(kind), kind, rest)  # wrong input ends here, before any rank starts
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return ExitCode.WRONG_INPUT
    return launch(job, ["train", *(["--kind", own.kind] if own.kind else []), *rest])


def _job(own: argparse.Namespace) -> Job:
    """Return where the ranks are to be started. Raises ConfigError."""
    if "RANK" in os.environ:
        raise ConfigError(
            f"-n, --nodes, --rendezvous and --restarts start ranks, but this process is rank {os.environ['RANK']} "
            "already, as RANK says: leave them out under torchrun, or unset RANK"
        )
    job = Job(own.ranks or 1, own.nodes or 1, own.rendezvous, own.restarts or 0)
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and own.nodes is None and own.rendezvous is None:
        if os.environ.get("SLURM_STEP_NUM_NODES") != str(tasks):
            raise ConfigError(
                f"-n {job.ranks} starts the ranks of a node, but srun started {tasks} tasks on "
                f"{os.environ.get('SLURM_STEP_NUM_NODES')} nodes: use one task per node, or one per rank without -n"
            )
        host, port = first_slurm_node(os.environ)
        job = replace(job, nodes=tasks, rendezvous=f"{host}:{port}", name=os.environ["SLURM_JOB_ID"])
    job.check()
    return job


def parser_of(kind: type[PretrainConfig]) -> ArgumentParser:
    """Return the parser of `megapipe train`, with examples and with the flags that `main` takes out, for `--help`."""
    parser = run_parser(kind)
    parser.epilog = EXAMPLES
    for names, options in FLAGS:
        parser.add_argument(*names, **options)
    return parser
