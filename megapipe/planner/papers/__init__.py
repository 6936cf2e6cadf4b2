"""Planners from papers (PipeDream, PipeDream-2BW, Galvatron), applied to this project's costs of layers."""
