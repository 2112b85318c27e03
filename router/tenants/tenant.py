"""`Tenant`: one client of the router, its limits and what it uses of them (`TokenBucket`)."""

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
from rpc.logs import CURRENT_CALL

__all__ = [
    "OPEN_TENANT",
    "Clock",
    "CountRefusal",
    "Tenant",
    "TokenBucket",
    "count_nothing",
    "tenant_of_call",
]

_MINUTE_S = 60.0
Clock = Callable[[], float]


class TokenBucket:
    """Fills by `per_minute` a minute, up to that number.

    Its level may be negative: what was used in excess must flow in again before the next use.

    Args:
        per_minute: how much flows in, and the most that it holds.
        now: the present time in seconds, on the clock of all later calls.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until the bucket holds `amount`, or is full if that is less; 0 if it does."""
        self._fill(now)
        lacking = min(amount, self.per_minute) - self._level
        return max(lacking, 0.0) * _MINUTE_S / self.per_minute

    def take(self, amount: int, now: float) -> None:
        """Takes an amount, whatever the bucket holds."""
        self._fill(now)
        self._level -= amount

    def give_back(self, amount: int) -> None:
        """Puts an amount back that was taken and not used."""
        self._level += amount

    def set_rate(self, per_minute: int, now: float) -> None:
        """Changes what flows in from now on; what the bucket holds stays, if it fits."""
        self._fill(now)
        self.per_minute = per_minute
        self._level = min(self._level, per_minute)

    def is_full(self, now: float) -> bool:
        """Whether the bucket is as it was when it was new."""
        return self.wait_s(self.per_minute, now) == 0

    def _fill(self, now: float) -> None:
        elapsed_s = max(now - self._filled_at, 0.0)
        self._filled_at = max(now, self._filled_at)
        gained = elapsed_s * self.per_minute / _MINUTE_S
        self._level = min(self._level + gained, self.per_minute)


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
    """

    def __init__(
        self,
        name: str,
        policy: TenantPolicy,
        clock: Clock = time.monotonic,
        count_refusal: CountRefusal = count_nothing,
    ) -> None:
        self.name = name
        self._clock = clock
        self._count_refusal = count_refusal
        self._num_running = 0
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.set_policy(policy)

    def set_policy(self, policy: TenantPolicy) -> None:
        """Changes the limits. What was used stays counted."""
        self.policy = policy
        self._requests = self._bucket(self._requests, policy.requests_per_minute)
        self._tokens = self._bucket(self._tokens, policy.tokens_per_minute)

    @property
    def share(self) -> Share:
        """Its name and weight, for those who divide the replicas among tenants."""
        return Share(self.name, self.policy.weight)

    @property
    def max_requests(self) -> float:
        """The most requests that may run at the same time."""
        most = self.policy.max_concurrent_requests
        return math.inf if most is None else most

    @property
    def is_unused(self) -> bool:
        """Whether nothing runs and nothing counts against a limit."""
        now = self._clock()
        buckets = (self._requests, self._tokens)
        return self._num_running == 0 and all(one is None or one.is_full(now) for one in buckets)

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
        if self._requests is not None:
            self._requests.give_back(num_begun)
        self._check(num_requests, num_begun)
        if self._requests is not None:
            self._requests.take(num_requests + num_begun, self._clock())
        self._num_running += num_requests
        try:
            yield
        finally:
            self._num_running -= num_requests

    def check_tokens(self) -> None:
        """Checks whether a further request may use tokens.

        Raises:
            ResourceExhaustedError: earlier tokens have used up the minute's.
        """
        bucket = self._tokens
        if bucket is not None and (wait_s := bucket.wait_s(1, self._clock())):
            self._count_refusal("token_rate")
            raise ResourceExhaustedError(
                f"this client may use at most {bucket.per_minute} tokens per minute",
                wait_s,
                reason=Reason.CLIENT_RATE,
            )

    def use_tokens(self, num_tokens: int) -> None:
        """Counts tokens of prompts and answers. More than the limit delays the next request."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

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

    def _check(self, num_requests: int, num_begun: int) -> None:
        """Refuses requests for which a limit has no room."""
        most = self.max_requests
        if self._num_running + num_requests > most:
            self._count_refusal("concurrency")
            raise ResourceExhaustedError(
                f"this client may run at most {most} requests at the same time",
                reason=Reason.CLIENT_CONCURRENCY,
            )
        self.check_tokens()
        bucket, total = self._requests, num_requests + num_begun
        if bucket is not None and (wait_s := bucket.wait_s(total, self._clock())):
            self._count_refusal("request_rate")
            raise ResourceExhaustedError(
                f"this client may begin at most {bucket.per_minute} requests per minute",
                wait_s,
                reason=Reason.CLIENT_RATE,
            )

    def _bucket(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        """The bucket of a limit, with what the earlier one held."""
        if per_minute is None:
            return None
        now = self._clock()
        if bucket is None:
            return TokenBucket(per_minute, now)
        bucket.set_rate(per_minute, now)
        return bucket


OPEN_TENANT = Tenant("", TenantPolicy(name="open"))
"""Every caller of a router that asks for no credentials."""


def tenant_of_call() -> Tenant:
    """The tenant that makes the call which the present task serves."""
    call = CURRENT_CALL.get()
    caller = None if call is None else call.caller
    assert isinstance(caller, Tenant), "both servers find out who calls before they serve a call"
    return caller
