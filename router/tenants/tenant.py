"""`Tenant`: one client of the router, its limits and what it uses of them."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from baton.common.errors import PermissionDeniedError, Reason, ResourceExhaustedError
from baton.common.short_texts import short_repr
from router.config.tenants import TenantPolicy
from router.fleet.fair_shares import Share
from router.processes.counts import Account, Counts, LocalAccount
from router.tenants.token_bucket import TokenBucket
from rpc.logs import CURRENT_CALL

__all__ = [
    "OPEN_TENANT",
    "Clock",
    "CountRefusal",
    "Tenant",
    "count_nothing",
    "tenant_of_call",
]

Clock = Callable[[], float]


class CountRefusal(Protocol):
    """Counts a call that was refused."""

    def __call__(self, reason: str) -> None:
        """Counts one.

        Args:
            reason: credentials, permission, concurrency, request_rate or token_rate.
        """


def count_nothing(reason: str) -> None:
    """Counts no refusals."""


class Tenant:
    """A client. Used by the event loop alone.

    Args:
        name: separates its request ids and its cached prompts from those of others; empty for the
            tenant of a router that asks for no credentials, whose cache salts stay as they are.
        policy: its limits.
        clock: seconds, monotonic.
        count_refusal: called with each refusal.
        account: what it uses; None for an account of this process.

    Attributes:
        policy: its limits. What was used stays counted when they change.
    """

    def __init__(
        self,
        name: str,
        policy: TenantPolicy,
        clock: Clock = time.monotonic,
        count_refusal: CountRefusal = count_nothing,
        account: Account | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self._clock = clock
        self._count_refusal = count_refusal
        self._account = account or LocalAccount()
        self._share = Share(name, policy.weight)

    @property
    def share(self) -> Share:
        """Its name and weight, for those who divide the replicas among tenants."""
        if self._share.weight != self.policy.weight:
            self._share = Share(self.name, self.policy.weight)
        return self._share

    @property
    def max_requests(self) -> float:
        """The most requests that may run at the same time."""
        most = self.policy.max_concurrent_requests
        return math.inf if most is None else most

    @property
    def is_unused(self) -> bool:
        """Whether nothing runs and nothing counts against a limit."""
        with self._account.open() as counts:
            return counts.is_unused(self._clock())

    @contextmanager
    def running(self, num_requests: int = 1, *, num_begun: int = 0) -> Iterator[None]:
        """Counts requests as begun, and as running while the context lasts.

        Args:
            num_requests: how many.
            num_begun: requests of the same call that have been counted before. If the further
                ones are refused, these do not count as begun either: the call begins all or none.

        Raises:
            ResourceExhaustedError: a limit is reached; states when to try again.
        """
        self._begin(num_requests, num_begun)
        try:
            yield
        finally:
            with self._account.open() as counts:
                counts.add_running(-num_requests)

    @contextmanager
    def running_prompts(self, num_prompts: int) -> Iterator[None]:
        """Counts each prompt of the present call as a request. One is the call itself, which its
        server has counted; of a call that it has not counted, none counts.

        Args:
            num_prompts: how many.

        Raises:
            ResourceExhaustedError: a limit is reached; states when to try again.
        """
        call = CURRENT_CALL.get()
        if call is not None and not call.is_counted:
            yield
            return
        with self.running(num_prompts - 1, num_begun=1):
            yield

    def check_tokens(self) -> None:
        """Checks whether a further request may use tokens.

        Raises:
            ResourceExhaustedError: earlier tokens have used up the minute's.
        """
        with self._account.open() as counts:
            self._check_tokens(counts)

    def use_tokens(self, num_tokens: int) -> None:
        """Counts tokens of prompts and answers. More than the limit delays the next request."""
        with self._account.open() as counts:
            bucket = self._bucket(counts.tokens, self.policy.tokens_per_minute)
            if bucket is not None:
                bucket.take(num_tokens, self._clock())

    def cache_salt(self, client_salt: str) -> str:
        """The salt of a request's cached blocks, which no request of another tenant has.

        Args:
            client_salt: the request's own, which divides the tenant's cache further.
        """
        if not self.name:
            return client_salt
        key = hashlib.sha256(self.name.encode(errors="surrogatepass")).digest()
        salt = client_salt.encode(errors="surrogatepass")
        return hashlib.blake2b(salt, key=key, person=b"baton.tenant", digest_size=32).hexdigest()

    def priority(self, wanted: int) -> int:
        """The priority of a request that asks for one: not more urgent than the limit."""
        most = self.policy.max_priority
        return wanted if most is None else max(wanted, most)

    def may_use(self, names: tuple[str, ...]) -> bool:
        """Whether it may use the model with these names."""
        return not self.policy.models or not set(self.policy.models).isdisjoint(names)

    def check_model(self, names: tuple[str, ...]) -> None:
        """Refuses a model that the tenant may not use.

        Raises:
            PermissionDeniedError: names the model.
        """
        if not self.may_use(names):
            self._count_refusal("permission")
            raise PermissionDeniedError(
                f"this client may not use model {short_repr(names[0])}",
                reason=Reason.MODEL_NOT_ALLOWED,
                field="model",
            )

    def _begin(self, num_requests: int, num_begun: int) -> None:
        """Counts requests that begin, or refuses those for which a limit has no room."""
        total = num_requests + num_begun
        with self._account.open() as counts:
            bucket = self._bucket(counts.requests, self.policy.requests_per_minute)
            if bucket is not None:
                bucket.give_back(num_begun)
            self._check_concurrency(counts, num_requests)
            self._check_tokens(counts)
            if bucket is not None:
                self._check_rate(bucket, total)
                bucket.take(total, self._clock())
            counts.add_running(num_requests)

    def _check_concurrency(self, counts: Counts, num_requests: int) -> None:
        most = self.max_requests
        if counts.has_room(num_requests, most):
            return
        self._count_refusal("concurrency")
        raise ResourceExhaustedError(
            f"this client may run at most {most} requests at the same time",
            reason=Reason.CLIENT_CONCURRENCY,
        )

    def _check_tokens(self, counts: Counts) -> None:
        bucket = self._bucket(counts.tokens, self.policy.tokens_per_minute)
        if bucket is not None and (wait_s := bucket.wait_s(1, self._clock())):
            self._count_refusal("token_rate")
            raise ResourceExhaustedError(
                f"this client may use at most {bucket.per_minute} tokens per minute",
                wait_s,
                reason=Reason.CLIENT_RATE,
            )

    def _check_rate(self, bucket: TokenBucket, num_requests: int) -> None:
        if wait_s := bucket.wait_s(num_requests, self._clock()):
            self._count_refusal("request_rate")
            raise ResourceExhaustedError(
                f"this client may begin at most {bucket.per_minute} requests per minute",
                wait_s,
                reason=Reason.CLIENT_RATE,
            )

    def _bucket(self, cells: "memoryview[float]", per_minute: int | None) -> TokenBucket | None:
        """The bucket of a limit; None if there is no such limit."""
        return None if per_minute is None else TokenBucket(per_minute, self._clock(), cells)


OPEN_TENANT = Tenant("", TenantPolicy(name="open"))
"""Every caller of a router that asks for no credentials."""


def tenant_of_call() -> Tenant:
    """The tenant that makes the call which the present task serves."""
    call = CURRENT_CALL.get()
    caller = None if call is None else call.caller
    assert isinstance(caller, Tenant), "both servers find out who calls before they serve a call"
    return caller
