"""The cost model: the time of a step of a layout on a machine, the memory of each rank, and the source of every
number."""
