"""Runs of the asynchronous toy on one rank, for `run_mesh`: from the start, one after another, across a restart."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from megapipe.engine.step import StepResult
from megapipe.parallel.mesh import Mesh
from tests.engine.asynchronous_toy import Case, Replica


@dataclass(frozen=True)
class Outcome:
    """The results of a rank, and its final weights."""

    results: list[StepResult]
    weights: dict[tuple[str, int], Tensor]


def train(mesh: Mesh, case: Case, steps: int, drain_after: Collection[int] = ()) -> Outcome:
    """Train a case from its start."""
    replica = Replica(mesh, case)
    results = replica.train(range(steps), drain_after)
    return Outcome(results, replica.weights())


@dataclass(frozen=True)
class Saved:
    """State that a run resumes from: weights of every state by copy, their version numbers and moments."""

    weights: dict[str, list[Tensor]]
    newest: dict[str, int]
    moments: dict[str, dict[str, Tensor]]
    applied: dict[str, int]

    @classmethod
    def of(cls, replica: Replica) -> "Saved":
        states = replica.states
        return cls(
            {state.name: [copy.clone() for copy in state.weights] for state in states},
            {state.name: state.newest for state in states},
            {state.name: {name: moment.clone() for name, moment in state.moments.items()} for state in states},
            dict(replica.optimizer.applied),
        )

    def restore(self, replica: Replica) -> None:
        """Put everything into a new replica, moments by the names that its optimizer gives."""
        replica.optimizer.applied = dict(self.applied)
        for state in replica.states:
            for copy, values in zip(state.weights, self.weights[state.name], strict=True):
                copy.copy_(values)
            state.newest = self.newest[state.name]
            moments = self.moments[state.name]
            assert set(moments) == set(replica.optimizer.moment_names)
            state.moments = {name: moments[name].clone() for name in replica.optimizer.moment_names}


def train_each(mesh: Mesh, cases: Sequence[Case], steps: int) -> list[Outcome]:
    """One after another in the same processes, which cost more to start than to use."""
    return [train(mesh, case, steps) for case in cases]


def train_after_a_restart(mesh: Mesh, case: Case, before: int, after: int) -> Outcome:
    """Train, restore the saved state into another replica, and train that one."""
    first = Replica(mesh, case)
    results = first.train(range(before))
    second = Replica(mesh, case)
    Saved.of(first).restore(second)
    results += second.train(range(before, before + after))
    return Outcome(results, second.weights())
