"""Measured runs: traces that the engine writes, compared with the predictions of the simulator."""
