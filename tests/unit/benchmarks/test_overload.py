"""Overload in simulation: goodput, shares of tenants, refusals, recovery."""

from dataclasses import replace

import pytest

from benchmarks.router.overload import (
    Demand,
    Load,
    Outcome,
    Phase,
    measure_overload,
    overload_table,
    simulate,
)
from benchmarks.router.simulated_cluster import Machines
from baton.common.request.slo import Slo

SECONDS = 12.0
TENANTS = {"flood": 1, "heavy": 2, "light": 1}


@pytest.fixture(scope="module")
def peak() -> float:
    return max(
        simulate(Load((Phase(SECONDS, load),))).goodput(4, SECONDS) for load in (0.9, 1.0, 1.2)
    )


@pytest.fixture(scope="module")
def overloaded() -> Outcome:
    return simulate(Load((Phase(SECONDS, 3.0),)))


def test_the_goodput_stays_near_its_peak(peak, overloaded):
    assert overloaded.goodput(4, SECONDS) >= 0.9 * peak


def test_what_cannot_end_in_time_is_refused_at_once(overloaded):
    assert overloaded.refused()
    assert overloaded.slow_refusals(0.05) <= 0.01
    assert all(job.retry_after_s is not None for job in overloaded.refused())
    late = [job for job in overloaded.jobs if job.outcome == "late"]
    assert len(late) <= 0.02 * len(overloaded.jobs)


def test_tenants_get_what_their_weights_say(overloaded):
    shares = overloaded.shares(4, SECONDS)
    for tenant, weight in TENANTS.items():
        assert shares[tenant] == pytest.approx(weight / 4, rel=0.1), tenant
