"""The cost model: how long a step of a layout takes on a machine, what each rank holds, and where every number comes
from."""
