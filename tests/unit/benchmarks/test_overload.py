"""Overload in simulation: goodput, shares of tenants, refusals, recovery, returns."""

from dataclasses import replace

import pytest

from baton.common.request.slo import Slo
from benchmarks.router.overload import (
    SMALL_MACHINE,
    Load,
    Outcome,
    Phase,
    measure_overload,
    overload_table,
    simulate,
)

SECONDS = 12.0
WEIGHTS = {"flood": 1, "heavy": 2, "light": 1}
OVERLOAD = Load((Phase(SECONDS, 3.0),))


@pytest.fixture(scope="module")
def peak() -> float:
    loads = [replace(OVERLOAD, phases=(Phase(SECONDS, load),)) for load in (0.9, 1.2)]
    return max(simulate(load).goodput(4, SECONDS) for load in loads)


@pytest.fixture(scope="module")
def overloaded() -> Outcome:
    return simulate(OVERLOAD)


def test_the_goodput_stays_near_its_peak(peak, overloaded):
    assert overloaded.goodput(4, SECONDS) >= 0.9 * peak


def test_what_cannot_end_in_time_is_refused_at_once(overloaded):
    refused = overloaded.refused()
    assert len(refused) >= 0.4 * len(overloaded.requests)
    assert all(job.retry_after_s is not None for job in refused)
    assert overloaded.slow_refusals(0.05) <= 0.02
    late = [job for job in overloaded.requests if job.outcome == "late"]
    assert len(late) <= 0.01 * len(overloaded.requests)
    assert overloaded.wasted_prefill(OVERLOAD) <= 0.01


def test_tenants_get_what_their_weights_say(overloaded):
    shares = overloaded.shares(4, SECONDS)
    for tenant, weight in WEIGHTS.items():
        assert shares[tenant] == pytest.approx(weight / 4, rel=0.1), tenant


def test_queues_of_replicas_would_not_share_by_weight():
    """What the limit of requests sent ahead is for."""
    outcome = simulate(replace(OVERLOAD, limits_sending=False))
    assert outcome.shares(4, SECONDS)["flood"] > 1.1 / 4


@pytest.mark.parametrize(
    "machine",
    [replace(SMALL_MACHINE, prompt_token_s=1 / 4000), replace(SMALL_MACHINE, num_blocks=100)],
    ids=["prefill is short", "blocks are short"],
)
def test_whatever_is_short_nothing_is_computed_in_vain(machine):
    load = replace(OVERLOAD, machine=machine)
    outcome = simulate(load)
    assert outcome.wasted_prefill(load) <= 0.02
    assert outcome.slow_refusals(0.05) <= 0.03
    assert outcome.shares(4, SECONDS)["heavy"] == pytest.approx(0.5, rel=0.1)


def test_after_a_burst_all_is_well_within_five_seconds():
    burst = (Phase(3, 0.8), Phase(8, 3.0), Phase(10, 0.8))
    outcome = simulate(replace(OVERLOAD, phases=burst))
    assert outcome.recovery_s(11, 10) <= 5


def test_clients_that_come_back_when_told_are_mostly_let_in():
    wave = (Phase(3, 0.5), Phase(4, 3.0), Phase(25, 0.5))
    outcome = simulate(replace(OVERLOAD, phases=wave, comes_back=True))
    assert outcome.admitted_returns() > 0.5


def test_the_router_holds_no_more_however_long_the_overload_lasts(overloaded):
    longer = simulate(replace(OVERLOAD, phases=(Phase(2 * SECONDS, 3.0),)))
    assert longer.max_held <= 1.2 * overloaded.max_held
    assert longer.num_accounts == 0


def test_stated_objectives_are_mostly_met_by_those_that_are_let_in():
    slo = Slo(ttft_s=0.5)
    outcome = simulate(replace(OVERLOAD, timeout_s=60.0, slo=slo))
    done = [job for job in outcome.requests if job.outcome == "done"]
    met = [job for job in done if job.first_token_s <= slo.ttft_s]
    assert len(met) >= 0.85 * len(done)
    assert {job.outcome for job in outcome.refused()} == {"SLO_TTFT"}


def test_the_benchmark_has_a_row_for_each_place_where_requests_can_wait():
    rows = measure_overload(is_smoke=True)
    table = overload_table(rows)
    assert [row[0] for row in table.rows] == [row.queue for row in rows]
    assert len(table.columns) == len(table.rows[0])
