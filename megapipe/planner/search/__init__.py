"""Which layout of a model fits a machine and is the fastest, cheapest or soonest done, and why others are not."""
