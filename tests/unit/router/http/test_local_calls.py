"""Which answers to requests of batches are not the last ones."""

import pytest

from baton.common.errors import (
    AbortedError,
    AlreadyExistsError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from router.config.tenants import TenantsConfig
from router.http.local_calls import LocalCalls
from router.tenants.tenants import Tenants


@pytest.mark.parametrize(
    ("error", "status", "is_busy"),
    [
        (UnavailableError("no replica"), 503, True),
        (ResourceExhaustedError("full"), 503, True),
        # Another request of the client has the id, or one of a process that was killed just now.
        (AlreadyExistsError.for_request_id("a"), 409, True),
        (AbortedError("replicas were lost"), 503, False),
        (InvalidArgumentError("wrong"), 400, False),
    ],
)
async def test_what_passes_is_busy(error, status, is_busy):
    async def app(scope, receive, send):
        raise error

    call = LocalCalls(app, Tenants(TenantsConfig()))
    answer = await call("", "/v1/completions", b"{}", "batch_1-1", 5.0)
    assert (answer.status, answer.is_busy) == (status, is_busy)
