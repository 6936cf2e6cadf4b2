"""The simulator of lowered schedules."""

from megapipe.schedules.simulation.costs import Costs, Link, rank_costs
from megapipe.schedules.simulation.simulate import Simulation, simulate

__all__ = ["Costs", "Link", "Simulation", "rank_costs", "simulate"]
