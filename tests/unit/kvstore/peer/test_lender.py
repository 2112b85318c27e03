"""`Lender`: a job whose lease ends while its blocks are being lent."""

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
WAIT_S = 0.1


class ShortLeases(LeaseTable):
    """A table that ends the lease of a save once it is lent, then waits for `may_continue`."""

    def __init__(self):
        super().__init__(30.0, time.monotonic)
        self.has_ended = threading.Event()
        self.may_continue = threading.Event()

    def end_save(self, job_id, blocks):
        is_lent = super().end_save(job_id, blocks)
        self.end(["lease"])
        self.has_ended.set()
        self.may_continue.wait(WAIT_S)
        return is_lent


@pytest.fixture
def leases():
    return ShortLeases()


@pytest.fixture
def lender(leases):
    lender = Lender(leases, lambda: None)
    pool, slicing = random_pool(4, LAYOUT), BlockSlicing.of(LAYOUT)
    lender.register(HostMemory(pool, TailSlots(slicing.object_layout, len(pool))), slicing)
    yield lender
    lender.close()


def test_no_job_is_released_before_its_result_is_returned(lender, leases):
    lender.start([SaveJob(7, (b"k",), (2,), lease_id="lease")])
    assert leases.has_ended.wait(TIMEOUT_S)
    results, released = lender.poll()  # while the table still waits
    leases.may_continue.set()

    assert released == [7]
    assert [result.job_id for result in results] == [7]
    assert results[0].is_held
