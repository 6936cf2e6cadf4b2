"""The simulator of lowered schedules."""

from megapipe.schedules.simulation.costs import CostPlace, Costs, Link, rank_costs, stage_times
from megapipe.schedules.simulation.simulate import Simulation, simulate

__all__ = ["CostPlace", "Costs", "Link", "Simulation", "rank_costs", "simulate", "stage_times"]
