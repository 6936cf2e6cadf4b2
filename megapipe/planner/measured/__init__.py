"""Times from a machine's own measurements, where a hardware file has them."""
