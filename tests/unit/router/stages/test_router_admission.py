"""`Admission`: the bound on the number of requests that a router runs."""

import pytest

from baton.common.errors import AlreadyExistsError, ResourceExhaustedError
from router.stages.admission import MAX_WAITING, Admission


async def test_excess_requests_and_duplicate_ids_are_refused():
    admission = Admission(2)
    with admission.admit("a"):
        with pytest.raises(AlreadyExistsError, match="request_id"), admission.admit("a"):
            pass
        with (
            admission.admit("b"),
            pytest.raises(ResourceExhaustedError, match="2 requests"),
            admission.admit("c"),
        ):
            pass
        with admission.admit("b"):
            pass
    with admission.admit("a"):
        pass


async def test_without_a_limit_as_many_are_admitted_as_replicas_run_and_some_that_wait():
    admission = Admission()
    assert admission.max_requests == MAX_WAITING
    admission.read_num_seats = lambda: 128
    assert admission.max_requests == MAX_WAITING + 128
    assert Admission(7).max_requests == 7
