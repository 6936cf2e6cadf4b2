"""Fit the few free parameters of a machine to published and measured rows of training speed."""
