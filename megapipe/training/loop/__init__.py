"""The training loop: samples, the model of a rank, steps, evaluations and saves."""
