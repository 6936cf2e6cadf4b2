"""Planners as their papers describe them, with this project's costs of layers: PipeDream, PipeDream-2BW, Galvatron."""
