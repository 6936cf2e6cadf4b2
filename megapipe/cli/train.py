"""`megapipe train`: choose the kind of model, start the ranks, and run one rank."""

import argparse
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from megapipe.cli.main import end_at_once
from megapipe.config import ConfigError
from megapipe.config.command_line import OneLineParser, natural, positive
from megapipe.config.load import KINDS, Given, asks_for_help, build_parser, kind_of, parse_given
from megapipe.config.parallel import ParallelConfig
from megapipe.config.run import PretrainConfig
from megapipe.spec.model_folder import with_model_folders
from megapipe.training.observe.records import print_line
from megapipe.training.resilience.signals import ExitCode, after_training, before_training, end_with_launcher

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from megapipe.parallel.mesh import Mesh


_RANK = """\
import sys
root = sys.argv.pop(1)
if root not in sys.path:
    sys.path.insert(0, root)
from megapipe.cli.main import start
start()
"""
"""The program of a rank. It is started with -P, so that files in the current folder do not hide modules."""

_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_SHUTDOWN_SECONDS = 3600
"""Seconds that ranks have to save after a signal, before the agent kills them; torch's default is 30 s."""

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
_SLURM_PATTERNS = {
    _SLURM_TASKS: "[1-9][0-9]{0,6}",
    "SLURM_STEP_NUM_NODES": "[0-9]+",
    "SLURM_STEP_NODELIST": r"[^,\[\]].*",
    "SLURM_STEP_TASKS_PER_NODE": "[0-9]+.*",
    "SLURM_PROCID": "[0-9]+",
    "SLURM_LOCALID": "[0-9]+",
    "SLURM_JOB_ID": "[0-9]{1,18}",
}
"""Variables of a Slurm step, and the pattern of their values."""


@dataclass(frozen=True)
class Job:
    """The ranks of a run, and where they are started.

    ranks: number of ranks per node. nodes: number of nodes. rendezvous: HOST:PORT of one of the nodes, None for a
    single node. restarts: maximum number of restarts after failures. name: name of the job, the same on all nodes.
    """

    ranks: int
    nodes: int = 1
    rendezvous: str | None = None
    restarts: int = 0
    name: str = "megapipe"

    def check(self) -> None:
        """Raise ConfigError for a rendezvous that is missing, or that is not the address of a host."""
        if self.rendezvous is None:
            if self.nodes > 1:
                raise ConfigError(
                    f"--nodes {self.nodes} needs --rendezvous HOST:PORT: the name of one of "
                    "the nodes and a free port on it, the same on all nodes"
                )
            return
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ConfigError(f"--rendezvous is {self.rendezvous}; it must be HOST:PORT, such as node0:29500")
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
        except OSError as error:
            raise ConfigError(
                f"--rendezvous {self.rendezvous}: the host {host} is not known here "
                f"({error.strerror}); use the name or the address of one of the nodes"
            ) from error


def launch(job: Job, arguments: Sequence[str]) -> int:
    """Run `megapipe` with these arguments in every rank of this node, through torch's elastic agent, as torchrun does.

    The ranks print their own errors, and the agent's messages are hidden.

    Return the exit status of the first rank of this node that failed; 128 + N for a signal N to the rank or to this
    process.
    """
    print_line(f"starting {job.ranks * job.nodes} ranks")
    # torch reads this when it is imported. At the default level, the agent prints the C++ stack of its last exchange
    # if the node that serves the store ends first. Ranks do not inherit the level.
    level = os.environ.get(_CPP_LOG_LEVEL)
    os.environ[_CPP_LOG_LEVEL] = level or "ERROR"
    # Imported here because it takes seconds, and errors in the input should be reported without this delay.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # in this process only
    if level is None:
        del os.environ[_CPP_LOG_LEVEL]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_SECONDS))
    if job.ranks > 1:
        # As torchrun does: ranks would compete for the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory(prefix="megapipe-launch-") as reasons:
        config = LaunchConfig(
            min_nodes=job.nodes,
            max_nodes=job.nodes,
            nproc_per_node=job.ranks,
            rdzv_backend="c10d",
            rdzv_endpoint=job.rendezvous or "localhost:0",
            # The host's own name may be unknown in a container.
            local_addr=None if job.rendezvous else "localhost",
            run_id=job.name if job.rendezvous else uuid.uuid4().hex,
            max_restarts=job.restarts,
            logs_specs=DefaultLogsSpecs(log_dir=reasons),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-P", "-c", _RANK, root, *arguments)
        except ChildFailedError as error:
            return status_of(error.failures)
        except SignalException as stop:
            return 128 + int(stop.sigval)
        except RendezvousError as error:
            print(
                f"error: the {job.nodes} nodes did not meet at --rendezvous {job.rendezvous}: {_one_line(error)}; "
                "start the same command on every node, and use a free port that all nodes reach",
                file=sys.stderr,
            )
            return ExitCode.WRONG_INPUT
    return ExitCode.FINISHED


def status_of(failures: "Mapping[int, ProcessFailure]") -> int:
    """Return the exit status of the first rank that failed, and print its reason if the rank could not.

    A rank that failed only because it lost another rank counts only if no other rank failed. Its time may be the
    earliest, because the agent records the end of a killed rank late.
    """
    rank, failure = min(
        failures.items(), key=lambda each: (each[1].exitcode == ExitCode.PEER_LOST, each[1].timestamp, each[0])
    )
    if failure.exitcode >= 0:
        return failure.exitcode
    name = signal.Signals(-failure.exitcode).name
    memory = "; the kernel does that if the host has too little memory" if name == "SIGKILL" else ""
    print(f"error: rank {rank} was killed by {name}{memory}", file=sys.stderr)
    return 128 - failure.exitcode


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that srun started, one task per rank, as torchrun would set them.

    The result is empty outside of such a step, in a step of one task, or if a launcher has set RANK. Raises
    ConfigError for variables with values that srun does not set.
    """
    if "RANK" in environment or (tasks := slurm_tasks(environment)) == 1:
        return {}
    address, port = first_slurm_node(environment)
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": re.split(r"\D", environment["SLURM_STEP_TASKS_PER_NODE"])[0],
        "MASTER_ADDR": environment.get("MASTER_ADDR", address),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }


def slurm_tasks(environment: Mapping[str, str]) -> int:
    """Return the number of tasks of a Slurm step, 1 outside of a step.

    Raises ConfigError if a variable of a step of several tasks is missing, as in a container that passes only some, or
    has a value that srun does not set.
    """
    number = environment.get(_SLURM_TASKS, "1")
    if number == "1":
        return 1
    for name, pattern in _SLURM_PATTERNS.items():
        value = environment.get(name)
        if value is None or not re.fullmatch(pattern, value, re.ASCII):
            described = "not set" if value is None else repr(value)
            if name != _SLURM_TASKS:
                described += f", but {_SLURM_TASKS} is {number!r}"
            raise ConfigError(
                f"{name} is {described}: start ranks with srun, which sets it, or unset "
                f"{_SLURM_TASKS} to run without Slurm"
            )
    return int(number)


def first_slurm_node(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the first node of a Slurm step, and a port that depends only on the job.

    The list is in Slurm's notation, such as `rack[2-3,7]-gpu` or `a1,b2`; the first node is rack2-gpu or a1.
    """
    nodes = environment["SLURM_STEP_NODELIST"]
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert first is not None, nodes
    name = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])
    return name, _FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _NUM_PORTS


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


PLAN_HELP = (
    "auto, a hardware file, or a preset: use the fastest layout, by prediction, "
    "of those that fit on the ranks of this start; fields that are given do not change"
)


def run_program(kind: type[PretrainConfig], arguments: Sequence[str]) -> int:
    """Train with the configuration of a command line, and return the exit status, one of `ExitCode`.

    kind: type of the configuration.
    """
    before_training()
    parsed: Given[PretrainConfig] | ConfigError
    try:
        parsed = _parsed(kind, arguments)
        if "WORLD_SIZE" not in os.environ:
            _check_layout(parsed, 1)
    except ConfigError as error:
        if "WORLD_SIZE" not in os.environ:
            return _refused(error)
        parsed = error  # raised after connecting, because the other ranks wait for this one

    end_with_launcher()
    if os.environ.get("RANK", "0") == "0":
        print_line("loading torch")

    # Imported here because torch takes a second, and --help or a misspelt key should not wait for it.
    from megapipe.parallel.launch import LaunchEnvironment
    from megapipe.training.observe.listeners import any_abandoned
    from megapipe.training.pretrain import pretrain
    from megapipe.training.resilience.failures import status_of

    start = None
    try:
        environment = LaunchEnvironment.read(os.environ)
        start = environment.meet(_start_timeout(parsed))
        if start is not None:
            start.wait_for_all()
        if isinstance(parsed, ConfigError):
            raise parsed
        config = parsed.config
        if (plan := parsed.flags["plan"]) is not None:
            from megapipe.calibration.planning import planned

            config, plan_line = planned(parsed, plan, os.environ, environment.world_size)
            if environment.rank == 0:
                print_line(plan_line)
        status = pretrain(config, environment, start, _with_recompute)
    except Exception as error:
        status = status_of(error, start)
    after_training()
    if any_abandoned():
        # The exit handler of Weights & Biases would wait for the server for a minute or more.
        end_at_once(status)
    return status


def _with_recompute(config: PretrainConfig, mesh: "Mesh", say: Callable[[str], None]) -> PretrainConfig:
    """Resolve recompute.method auto. Runs without it do not import the planner."""
    if config.recompute.method != "auto":
        return config
    from megapipe.calibration.planning import with_recompute

    return with_recompute(config, mesh, say)


def _start_timeout(parsed: Given[PretrainConfig] | ConfigError) -> float:
    """Return the seconds to wait for other ranks: the default if the configuration, which is not checked yet, has no
    usable number."""
    default = ParallelConfig().timeout_seconds
    timeout = default if isinstance(parsed, ConfigError) else parsed.config.parallel.timeout_seconds
    return timeout if 0 < timeout < threading.TIMEOUT_MAX else default


def _refused(error: ConfigError) -> int:
    """Print the problems of a command line, and return the exit status."""
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    return ExitCode.WRONG_INPUT


EXAMPLES = """\
three commands to try:
  megapipe preprocess --input python-stdlib --output-prefix data/stdlib --tokenizer bytes --append-eod
  megapipe train --config gpt_tiny
  megapipe train -n 2 --config gpt_tiny --parallel.pipeline 2 --training.directory runs/pipeline

A BERT reads a shard that is split into sentences (megapipe preprocess --split-sentences):
  megapipe train -n 2 --config bert_quickstart --parallel.pipeline 2"""
HINT = f"usage: megapipe train [-n RANKS] --config FILE [--group.field VALUE ...]\n\n{EXAMPLES}"


def add_kind(parser: argparse.ArgumentParser) -> None:
    """Add the flag --kind."""
    parser.add_argument(
        "--kind",
        choices=tuple(KINDS),
        help="kind of model (default: bert if a field of BERT alone is set, otherwise gpt)",
    )


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only the launcher reads. Without -n, this process is one rank: the only one, or the one that
    is set by variables of torchrun or Slurm."""
    add_kind(parser)
    parser.add_argument(
        "-n",
        "--ranks",
        type=positive,
        metavar="N",
        help="start N ranks on this host, one per GPU or a few per CPU host",
    )
    parser.add_argument("--nodes", type=positive, metavar="N", help="number of hosts; start this command on each")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="a host and a free port on it, to which all connect")
    parser.add_argument("--restarts", type=natural, metavar="N", help="restart failed ranks up to N times (default 0)")


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    parser = OneLineParser(prog="megapipe train", add_help=False)
    _add_flags(parser)
    flags, rest = parser.parse_known_args(arguments)
    if not rest:
        if os.environ.get("RANK", "0") == "0":
            print(HINT, file=sys.stderr)
        return ExitCode.WRONG_INPUT
    try:
        rest = with_model_folders(rest)
        kind = kind_of(rest) if flags.kind is None else KINDS[flags.kind]
        job = _job(flags)
        if job is not None:
            _check_layout(_parsed(kind, rest), job.ranks * job.nodes)
        else:
            os.environ.update(slurm_variables(os.environ))
    except ConfigError as error:
        return _refused(error)
    if job is None:
        return run_program(kind, rest)
    return launch(job, ["train", *(["--kind", flags.kind] if flags.kind else []), *rest])


def _check_layout(parsed: Given[PretrainConfig], world_size: int) -> None:
    """Raise ConfigError, before any rank starts, if the configuration cannot run on `world_size` ranks.

    With --plan, the ranks choose a layout and check it.
    """
    # Imported here because --help and the ranks of a job do not need it.
    from megapipe.layout.validation import run_problems

    config = parsed.config
    if parsed.flags["plan"] is None:
        problems = config.model.problems() + config.problems() or run_problems(config, world_size)
        if problems:
            raise ConfigError(problems)


def _job(flags: argparse.Namespace) -> Job | None:
    """Return the job that the flags describe; None if this process is a rank. Raises ConfigError."""
    if flags.ranks is None and flags.nodes is None and flags.rendezvous is None and flags.restarts is None:
        return None
    if "RANK" in os.environ:
        raise ConfigError(
            "-n, --nodes, --rendezvous and --restarts start ranks, but this process is rank "
            f"{os.environ['RANK']} already (RANK is set): leave them out, or unset RANK"
        )
    job = Job(flags.ranks or 1, flags.nodes or 1, flags.rendezvous, flags.restarts or 0)
    tasks = slurm_tasks(os.environ)
    if tasks > 1 and flags.nodes is None and flags.rendezvous is None:
        if os.environ.get("SLURM_STEP_NUM_NODES") != str(tasks):
            raise ConfigError(
                f"-n {job.ranks} starts the ranks of a node, but srun started {tasks} tasks "
                f"on {os.environ.get('SLURM_STEP_NUM_NODES')} nodes: use one task per node, or one per rank without -n"
            )
        host, port = first_slurm_node(os.environ)
        job = replace(job, nodes=tasks, rendezvous=f"{host}:{port}", name=os.environ["SLURM_JOB_ID"])
    job.check()
    return job


def _parsed(kind: type[PretrainConfig], arguments: Sequence[str]) -> Given[PretrainConfig]:
    return parse_given(parser_of(kind, documented=asks_for_help(arguments)), kind, arguments)


def parser_of(kind: type[PretrainConfig], *, documented: bool = True) -> ArgumentParser:
    """Return the parser of `megapipe train`, with examples and with the flags that `main` parses first.

    documented: with the help of every field.
    """
    parser = build_parser(f"Pretrain a {kind.kind.upper()}.", kind, documented=documented)
    parser.prog, parser.epilog = "megapipe train", EXAMPLES
    parser.usage = "%(prog)s [-n RANKS] --config FILE [--plan auto|FILE|PRESET] [--group.field VALUE ...]"
    parser.add_argument("--plan", type=str, help=PLAN_HELP)
    _add_flags(parser)
    return parser
