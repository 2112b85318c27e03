"""Whether clients wait for answers."""

import pytest

from router.processes.counts import LocalAccounts
from router.stages.interactive import Interactive
from rpc.logs import CallInfo, serving
from tests.support.clock import Clock


@pytest.fixture
def clock():
    return Clock()


def test_it_is_quiet_since_the_last_request_has_ended(clock):
    interactive = Interactive(LocalAccounts(), clock)
    assert interactive.quiet_s == float("inf")
    with interactive.running(), serving(CallInfo()):
        clock.now += 5
        with interactive.running():
            clock.now += 5
        assert interactive.quiet_s == 0
        clock.now += 5
    clock.now += 2
    assert interactive.quiet_s == 2


def test_nobody_waits_for_a_call_that_is_not_counted(clock):
    interactive = Interactive(LocalAccounts(), clock)
    with serving(CallInfo(is_counted=False)), interactive.running():
        assert interactive.quiet_s == float("inf")


def test_requests_of_other_processes_count_once_they_were_seen(clock):
    account = LocalAccounts().account("interactive", "")

    class Shared(LocalAccounts):
        def account(self, kind, name):
            return account

    here, there = Interactive(Shared(), clock), Interactive(Shared(), clock)
    with there.running():
        assert here.quiet_s == 0
    clock.now += 3
    assert here.quiet_s == 3
