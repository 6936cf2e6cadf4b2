"""Reports of a run: records, metrics, progress, trackers and traces."""
