"""Tensor-parallel layers, attention, MLP, norms, rotary positions, and the split backward."""
