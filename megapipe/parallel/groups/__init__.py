"""Collective groups as objects: one interface over torch.distributed, the threads of one process, and a rank alone."""

from megapipe.parallel.groups.distributed import DistributedGroup
from megapipe.parallel.groups.group import Group, ReduceOperation, Work
from megapipe.parallel.groups.solo import SoloGroup
from megapipe.parallel.groups.threads import ThreadGroup, ThreadWorld

__all__ = ["DistributedGroup", "Group", "ReduceOperation", "SoloGroup", "ThreadGroup", "ThreadWorld", "Work"]
