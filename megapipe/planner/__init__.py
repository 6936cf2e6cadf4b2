"""The planner: it predicts memory, traffic and time of every rank before a run, and finds fast layouts."""
