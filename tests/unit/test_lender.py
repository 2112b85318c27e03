"""`Lender`: what becomes of a job whose lease ends as it is lent."""

import threading
import time

import pytest

from kvstore.jobs import SaveJob
from kvstore.peer.leases import LeaseTable
from kvstore.peer.lender import Lender
from kvstore.peer.lent_memory import HostMemory, TailSlots
from kvstore.transfer_form import BlockSlicing
from tests.support.peer_rig import LAYOUT, random_pool

TIMEOUT_S = 10.0
A_WHILE_S = 0.1


class ShortLeases(LeaseTable):
    """A table whose leases end as soon as something is lent, and stay so for a while."""

    def __init__(self):
        super().__init__(30.0, time.monotonic)
        self.has_ended = threading.Event()
        self.go_on = threading.Event()

    def end_save(self, job_id, blocks):
        is_lent = super().end_save(job_id, blocks)
        self.end(["lease"])
        self.has_ended.set()
        self.go_on.wait(A_WHILE_S)
        return is_lent


@pytest.fixture
def leases():
    return ShortLeases()


@pytest.fixture
def lender(leases):
    lender = Lender(leases, lambda: None)
    pool, cut = random_pool(4, LAYOUT), BlockSlicing.of(LAYOUT)
    lender.register(HostMemory(pool, TailSlots(cut.object_layout, len(pool))), cut)
    yield lender
    lender.close()


def test_no_job_is_released_before_its_result_is_told(lender, leases):
    lender.start([SaveJob(7, (b"k",), (2,), lease_id="lease")])
    assert leases.has_ended.wait(TIMEOUT_S)
    results, released = lender.poll()  # while the result is on its way
    leases.go_on.set()

    assert released == [7]
    assert [result.job_id for result in results] == [7]
    assert results[0].is_held
