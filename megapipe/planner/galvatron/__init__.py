"""Galvatron's search for one parallel strategy per layer: a decision tree and a dynamic programming over memory."""
