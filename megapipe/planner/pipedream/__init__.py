"""The PipeDream-2BW planner and PipeDream's partitioners, as their papers state them."""
