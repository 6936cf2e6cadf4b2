"""Typed, documented configuration and its validation. Imports no torch."""
