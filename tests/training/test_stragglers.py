"""Slow ranks are named, clean ones never."""

import random

from megapipe.config.run import ReliabilityConfig
from megapipe.training.observe.traces import StragglerReport

PLACES = [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_thousand_clean_noisy_steps_name_no_rank() -> None:
    chosen = random.Random(0)
    report = StragglerReport(PLACES, ReliabilityConfig.straggler_factor, ReliabilityConfig.straggler_reports)
    for _ in range(1000):  # 10 % of noise, a hiccup of one rank now and then, and stages of unequal work
        seconds = [chosen.gauss(1.0 + place, 0.1) for place in PLACES]
        if chosen.random() < 0.05:
            seconds[chosen.randrange(len(seconds))] *= 3.0
        assert report.add(seconds) == []


def test_slow_ranks_are_named_at_every_third_report() -> None:
    report = StragglerReport(PLACES, 1.3, 3)
    slow = [1.0] * 4 + [2.0, 2.0, 3.2, 2.0]
    reports = [report.add(slow) for _ in range(6)]
    assert reports == [[], [], [(6, 1.6)], [], [], [(6, 1.6)]]
    assert report.add([1.0] * 8) == []
    assert report.add(slow) == []


def test_ranks_without_their_like_are_compared_with_all_others() -> None:
    report = StragglerReport([0, 1, 2], 1.3, 1)
    assert report.add([1.0, 1.0, 1.5]) == [(2, 1.5)]
    assert StragglerReport([0], 1.3, 1).add([5.0]) == []
