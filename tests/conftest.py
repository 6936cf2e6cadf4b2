"""Settings of the whole test suite."""

from hypothesis import HealthCheck, settings

# No deadline: an example's first run imports and compiles, and the cores are shared with other ranks.
settings.register_profile(
    "default", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")
