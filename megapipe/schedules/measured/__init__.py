"""What a run really did: traces that the engine writes, laid over what the simulator predicts."""
