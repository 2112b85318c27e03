"""`Picking`: chooses decode replicas for requests that other routers run.

An endpoint picker does that: it names the server to which a proxy sends a request, and sees neither
the tokens nor, in general, the end of the answer. What it has chosen counts as the replica's load
from then on, until the caller releases it.
"""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import NamedTuple

from baton.common.request.generation import GenerationRequest
from router.fleet.fleet import Fleet, none_ready
from router.fleet.replica import without_ejected
from router.fleet.tier_replicas import DecodeReplica
from router.requests.request import RoutedRequest
from router.stages.placement import Placement, refusal

__all__ = ["AddressCheck", "PickedReplica", "Picking"]

AddressCheck = Callable[[str], bool | None]
"""Whether the router beside a replica answers, given the replica's `host:port`. Those that do not
come last; with None, a replica may not be chosen.
"""


class PickedReplica(NamedTuple):
    """A chosen replica.

    Attributes:
        address: its `host:port`.
        release: ends the request's part of its load. Idempotent.
    """

    address: str
    release: Callable[[], None]


class Picking:
    """Chooses decode replicas of one model for requests that other routers run.

    Args:
        fleet: the replicas.
        placement: chooses among them.
        route: prepares a request, given its deadline (`time.monotonic()`).
    """

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        route: Callable[[GenerationRequest, float], Awaitable[RoutedRequest]],
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._route = route

    async def route(self, request: GenerationRequest, deadline: float) -> RoutedRequest:
        """Tokenizes the first prompt of a request, and computes its block keys.

        Args:
            request: the client's.
            deadline: `time.monotonic()` at which it must have ended.

        Raises:
            UnavailableError: no decode replica is ready.
            BatonError: a field is wrong; names it.
        """
        self._fleet.require_model()  # else it would wait for one
        return await self._route(request, deadline)

    def pick(self, request: RoutedRequest, answers: AddressCheck) -> PickedReplica:
        """Chooses a replica by the router's policy.

        One that would start the request soon comes before one that would only queue it.

        Args:
            request: the request.
            answers: which replicas may be chosen.

        Raises:
            UnavailableError: none is ready.
            FailedPreconditionError: none can ever hold the request.
            ResourceExhaustedError: all are full.
        """
        ready = self._ready(answers)
        ids = {replica.replica_id for replica in ready}
        others = [r for r in self._fleet.decode.candidates if r.replica_id not in ids]
        refused = frozenset(replica.replica_id for replica in others)
        placement = self._placement
        replica = placement.pick_to_start(request, refused)
        replica = replica or placement.pick_decode(request, refused)
        if replica is None:
            raise refusal(ready, request)
        num_blocks = placement.missing_blocks(request, replica, has_handoff=False)
        placement.expect(request, replica)
        return _held(replica, num_blocks, request.spec.deadline)

    def pick_least_loaded(self, deadline: float, answers: AddressCheck) -> PickedReplica:
        """Chooses the replica with the fewest requests for its seats, for a request of which no
        more is known.

        Args:
            deadline: `time.monotonic()` at which the request has ended in any case.
            answers: which replicas may be chosen.

        Raises:
            UnavailableError: none is ready.
        """
        return _held(min(without_ejected(self._ready(answers)), key=_load), 0, deadline)

    def _ready(self, answers: AddressCheck) -> list[DecodeReplica]:
        checked = [(r, answers(r.address)) for r in self._fleet.decode.candidates]
        ready = [r for r, does_answer in checked if does_answer is not None]
        if not ready:
            raise none_ready(" at the addresses that may be chosen")
        # A worker stays connected when the router beside it has failed; and none is beside a worker
        # of the other tier that decodes for now.
        return [r for r, does_answer in checked if does_answer] or ready


def _held(replica: DecodeReplica, num_blocks: int, deadline: float | None) -> PickedReplica:
    held = ExitStack()
    held.enter_context(replica.reserve(num_blocks=num_blocks, deadline=deadline, is_own=False))
    return PickedReplica(replica.address, held.close)


def _load(replica: DecodeReplica) -> tuple[float, str]:
    candidate = replica.candidate()
    return candidate.num_requests / candidate.num_seats, candidate.replica_id
