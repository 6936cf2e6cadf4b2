"""A race: all contestants run one schedule, and their times are compared with the time that the schedule allows."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megapipe.engine.transfers import LinkPool
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.pipeline_links import LinkKind
from pipeline_contest.bare import bare_loop
from pipeline_contest.bubble import Bubble, measure_bubble
from pipeline_contest.floor import compute_only
from pipeline_contest.gpt import GptFigure, race_gpt
from pipeline_contest.measure import Sample, in_turns
from pipeline_contest.orders import RACES, actions_of, finish, lowered
from pipeline_contest.ours import sleeping
from pipeline_contest.peer import torch_pipelining
from pipeline_contest.setting import Setting, Step
from pipeline_contest.sleeping import Meter

KINDS: tuple[LinkKind, ...] = ("shared_memory", "gloo")
WAIT_SECONDS = 120.0


@dataclass(frozen=True)
class Size:
    """Size of a race. seconds: time of a stage's forward. floats: number of floats in a message."""

    num_microbatches: int
    seconds: float
    floats: int
    repeats: int


@dataclass(frozen=True)
class Figure:
    """One contestant in one race, medians over the repeats.

    seconds: time of a step. excess: percent by which it exceeds the time that the schedule allows, without the time
    that a rank overslept. processor: microseconds of a rank's thread per action, outside of stage callables, mean over
    ranks.
    """

    schedule: str
    contestant: str
    num_ranks: int
    num_microbatches: int
    milliseconds: float
    seconds: float
    finish: float
    late: float
    excess: float
    processor: float


class Track:
    """One rank's part in the races of a pipeline. Links are created once and used by all contestants."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._meter = Meter()
        self._pools = {kind: LinkPool(mesh, kind, WAIT_SECONDS) for kind in KINDS}

    def setting(self, size: Size) -> Setting:
        """Return the setting of a race, which is the same for all contestants."""
        x = torch.zeros(1, size.floats)
        return Setting(self._mesh, size.num_microbatches, size.seconds, x, self._meter)

    def race(self, name: str, size: Size) -> list[Figure]:
        """Race all contestants with one schedule. A collective call; all ranks return the same figures."""
        setting, race = self.setting(size), RACES[name]
        peer = torch_pipelining(setting, race)
        schedule = lowered(race, setting.num_ranks, size.num_microbatches, peer.order)
        steps: dict[str, Step] = {"torch": peer.step}
        for kind in KINDS:
            steps[f"megapipe {kind}"] = sleeping(setting, schedule, self._pools[kind]).run
            steps[f"bare {kind}"] = bare_loop(setting, schedule, self._pools[kind])
        steps["autograd alone"] = compute_only(setting, schedule)
        samples = in_turns(self._mesh.world, self._meter, steps, size.repeats)
        actions = self._everywhere(actions_of(schedule, setting.rank))
        torch_actions = actions if peer.actions is None else self._everywhere(peer.actions)
        allowed = finish(schedule, size.seconds)
        allowed_torch = finish(schedule, size.seconds, torch_halves=race.takes_halves)
        return [
            _figure(name, contestant, setting, samples[contestant], *limits)
            for contestant, limits in {
                contestant: (allowed_torch, torch_actions) if contestant == "torch" else (allowed, actions)
                for contestant in steps
            }.items()
        ]

    def bubble(self, size: Size) -> Bubble:
        """Compare 2bw with a single rank. A collective call."""
        return measure_bubble(self.setting(size), self._pools["shared_memory"])

    def gpt(self, name: str, size: Size) -> GptFigure:
        """Race with real stages. A collective call."""
        return race_gpt(self._mesh, self._pools["shared_memory"], RACES[name], size.num_microbatches, size.repeats)

    def _everywhere(self, actions: int) -> tuple[int, ...]:
        return tuple(self._mesh.world.all_gather_object(actions))


def _figure(
    name: str, contestant: str, setting: Setting, samples: Sequence[Sample], allowed: float, actions: Sequence[int]
) -> Figure:
    def processor(sample: Sample) -> float:
        return statistics.mean(used / count for used, count in zip(sample.processor, actions, strict=True)) * 1e6

    return Figure(
        schedule=name,
        contestant=contestant,
        num_ranks=setting.num_ranks,
        num_microbatches=setting.num_microbatches,
        milliseconds=setting.seconds * 1e3,
        seconds=statistics.median(sample.seconds for sample in samples),
        finish=allowed,
        late=statistics.median(sample.late for sample in samples),
        excess=statistics.median(sample.seconds - sample.late - allowed for sample in samples) / allowed * 100,
        processor=statistics.median(map(processor, samples)),
    )
