"""Start the ranks of a run on this host through torch's elastic agent, or find out which rank Slurm has started here.

The agent is the one that torchrun uses, so ranks get the same variables. The ranks print their own errors. The agent's
messages are hidden, and the exit status is that of the first rank that failed.
"""

import logging
import os
import re
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.config.errors import ConfigError
from megapipe.training.exit_codes import ExitCode

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_RANK = """\
import sys
root = sys.argv.pop(1)
if root not in sys.path:
    sys.path.insert(0, root)
from megapipe.cli.main import start
start()
"""
"""The program of a rank. Started with -P, so that files in the current folder do not hide modules."""

_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_SHUTDOWN_SECONDS = 3600
"""After a signal, ranks have this long to save before the agent kills them; torch's default is 30 s."""

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


@dataclass(frozen=True)
class Job:
    """Where the ranks of a run are started.

    ranks: per node. nodes: in all. rendezvous: HOST:PORT of one of the nodes, None for a single node. restarts: how
    often the ranks are restarted after a failure. name: the same on all nodes.
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
                    f"--nodes {self.nodes} needs --rendezvous HOST:PORT: a name of one of the nodes, and a free port "
                    "of it, the same on all nodes"
                )
            return
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"--rendezvous is {self.rendezvous}; it must be HOST:PORT, such as node0:29500")
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
        except OSError as error:
            raise ConfigError(
                f"--rendezvous {self.rendezvous}: the host {host} is not known here ({error.strerror}); use the name "
                "or the address of one of the nodes"
            ) from error


def launch(job: Job, arguments: Sequence[str]) -> int:
    """Run `megapipe` with these arguments in every rank of this node, and return the exit status.

    The status is that of the first rank of this node that failed; 128 + N for a signal N to the rank or to this
    process.
    """
    # torch reads this when it is imported. At its own level the agent prints the C++ stack of its last exchange if the
    # node that serves the store ends first. Ranks do not inherit it.
    level = os.environ.get(_CPP_LOG_LEVEL)
    os.environ[_CPP_LOG_LEVEL] = level or "ERROR"
    # Importing torch takes seconds, which wrong input need not wait for.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # in this process only
    if level is None:
        del os.environ[_CPP_LOG_LEVEL]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_SECONDS))
    if job.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks would compete for the cores
    root = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory(prefix="megapipe-launch-") as reasons:
        config = LaunchConfig(
            min_nodes=job.nodes,
            max_nodes=job.nodes,
            nproc_per_node=job.ranks,
            rdzv_backend="c10d",
            rdzv_endpoint=job.rendezvous or "localhost:0",
            local_addr=None if job.rendezvous else "localhost",  # the host's own name may be unknown in a container
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

    A rank that only lost another one counts if no other rank failed: its time may be the earlier one, because the
    agent notes the end of a killed rank when it sees it.
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

    Empty outside of such a step, in a step of one task, or if a launcher has set RANK.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in environment or tasks == 1:
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


def first_slurm_node(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the first node of a Slurm step, and a port that depends on the job only.

    The list is in Slurm's notation, such as `rack[2-3,7]-gpu` or `a1,b2`; the first node is rack2-gpu or a1.
    """
    nodes = environment["SLURM_STEP_NODELIST"]
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    assert first is not None, nodes
    name = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])
    return name, _FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _NUM_PORTS


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
