"""Rates from reports: what `status` shows of a consumer."""

from __future__ import annotations

import pytest

from dataserve.server.metrics import Rates


def test_nothing_is_known_before_the_first_report() -> None:
    rates = Rates(0.0)
    assert (rates.samples_per_s(5.0), rates.wait_share, rates.bound) == (None, None, "unknown")


def test_a_steady_consumer_shows_its_rate_and_its_bound() -> None:
    rates = Rates(0.0)
    for second in range(1, 20):
        rates.add(float(second), 500, 0.02, 0.98)
    assert rates.samples_per_s(19.0) == pytest.approx(500)
    assert rates.wait_share == pytest.approx(0.02)
    assert rates.bound == "compute"


def test_a_change_of_pace_shows_within_some_ten_seconds() -> None:
    rates = Rates(0.0)
    for second in range(1, 60):
        rates.add(float(second), 1000, 0.0, 1.0)
    for second in range(60, 90):
        rates.add(float(second), 100, 0.9, 0.1)
    assert rates.samples_per_s(89.0) == pytest.approx(100, rel=0.6)
    assert rates.bound == "data"


def test_a_report_of_a_long_time_alone_is_spread_over_that_time() -> None:
    rates = Rates(1000.0)
    rates.add(1001.0, 60_000, 30.0, 270.0)
    assert rates.samples_per_s(1001.0) == pytest.approx(200)
    assert rates.wait_share == pytest.approx(0.1)


def test_a_silent_consumer_fades() -> None:
    rates = Rates(0.0)
    rates.add(1.0, 1000, 0.0, 1.0)
    assert rates.samples_per_s(2.0) == pytest.approx(1000)
    faded = rates.samples_per_s(60.0)
    assert faded is not None
    assert faded < 10


def test_times_that_nobody_measures_are_unknown_and_the_rate_is_by_the_clock() -> None:
    rates = Rates(0.0)
    rates.add(2.0, 1000, None, None)
    assert rates.samples_per_s(2.0) == pytest.approx(500)
    assert rates.bound == "unknown"


def test_a_single_batch_in_microseconds_is_no_rate_and_no_bound_yet() -> None:
    rates = Rates(0.0)
    rates.add(1.0, 64, 3e-6, 0.0)
    assert (rates.samples_per_s(1.0), rates.wait_share, rates.bound) == (None, None, "unknown")
    rates.add(2.0, 640, 0.05, 0.95)
    assert rates.samples_per_s(2.0) == pytest.approx(704, rel=0.1)
    assert rates.bound == "compute"
