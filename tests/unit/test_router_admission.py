"""How many requests a router runs."""

import asyncio

import pytest

from baton.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from router.admission import Admission


async def test_bounds_and_names():
    admission = Admission(2)
    with admission.admit("a"):
        with pytest.raises(InvalidArgumentError, match="request_id"), admission.admit("a"):
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


async def test_drain_waits_for_what_runs_and_admits_no_more():
    admission = Admission(2)
    with admission.admit("a"):
        assert await admission.drain(0) == 1
        draining = asyncio.create_task(admission.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError), admission.admit("b"):
            pass
        assert not draining.done()
    assert await draining == 0
