"""Generators: pure functions that put a schedule's compute actions in order, a few lines each."""
