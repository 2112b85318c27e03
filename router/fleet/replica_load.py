"""`ReplicaLoad`: what runs on a replica, by its reports and this router's reservations. Pure."""

from collections.abc import Iterator
from contextlib import contextmanager

from baton.common.request.request_spec import RequestSpec
from baton.v1 import worker_pb2
from router.fleet.policy import ReplicaState

__all__ = ["ReplicaLoad"]

_MIN_AHEAD = 2
_AHEAD_SHARE = 2
"""A replica without a free seat, or without free blocks, gets a part of the requests that it
runs in advance, so that it has the next ones when some end. The others wait in the router, where
tenants take turns.
"""
_MAX_QUEUED_TOKENS = 8192
"""As many prompt tokens keep a prefill replica busy until the router can send the next ones."""
_MIN_QUEUED_PROMPTS = 2


class ReplicaLoad:
    """The load of one replica, as far as this router knows.

    The worker's report lags and includes other routers' requests; the reservations are exact and
    include only this router's. The larger number is used.

    Args:
        info: the worker's description of what it serves.

    Attributes:
        report: the worker's last report.
        refuses_grammars: whether it has refused a request with a grammar since then. It may have
            lacked room for grammars to compile, which other requests do not need.
    """

    def __init__(self, info: worker_pb2.GetInfoResponse) -> None:
        self.report = worker_pb2.WorkerLoad()
        self.refuses_grammars = False
        self._info = info
        self._refuses_all = False
        # Reservations.
        self._num_requests = 0
        self._num_tokens = 0
        self._num_blocks = 0

    def take(self, report: worker_pb2.WorkerLoad) -> None:
        """Takes the worker's next report, after which it may have room again."""
        self.report = report
        self._refuses_all = self.refuses_grammars = False

    @property
    def has_room(self) -> bool:
        """Whether the replica can queue one more request."""
        most = self._info.max_num_requests
        return not self._refuses_all and (not most or self._num_requests_there < most)

    @property
    def num_blocks(self) -> int:
        """Blocks in its pool, of the size that block keys stand for."""
        return self._in_keyed_blocks(self._info.num_blocks)

    def has_room_for(self, spec: RequestSpec) -> bool:
        """Whether the replica can queue this request."""
        return self.has_room and not (self.refuses_grammars and _has_grammar(spec))

    def may_start(self, num_blocks: int) -> bool:
        """Whether a new request would soon run here, and not only wait.

        Args:
            num_blocks: blocks, of the size that block keys stand for, that it will fill.
        """
        number, running = self._num_requests_there, self.report.num_running
        if number < self._info.max_num_seqs and num_blocks <= self._num_free_blocks:
            return True
        return number - running < max(running // _AHEAD_SHARE, _MIN_AHEAD)

    @property
    def may_queue_prompt(self) -> bool:
        """Whether the replica has so few prompts to compute that it might soon lack some."""
        num_tokens = max(self.report.num_queued_tokens, self._num_tokens)
        return num_tokens < _MAX_QUEUED_TOKENS or self._num_requests < _MIN_QUEUED_PROMPTS

    def note_full(self, spec: RequestSpec) -> None:
        """Notes that the replica has refused a request for lack of room, until its next report."""
        if _has_grammar(spec):
            self.refuses_grammars = True
        else:
            self._refuses_all = True

    @contextmanager
    def reserve(self, num_tokens: int, num_blocks: int) -> Iterator[None]:
        """Counts a request while the context is open.

        Args:
            num_tokens: prompt tokens that the replica will compute.
            num_blocks: blocks, of the size that block keys stand for, that it will fill.
        """
        self._num_requests += 1
        self._num_tokens += num_tokens
        self._num_blocks += num_blocks
        try:
            yield
        finally:
            self._num_requests -= 1
            self._num_tokens -= num_tokens
            self._num_blocks -= num_blocks

    def state(self, overlap_blocks: int, weight: float) -> ReplicaState:
        """Returns the replica's state for the routing policy."""
        num_blocks = self.num_blocks
        return ReplicaState(
            replica_id=self._info.worker_id,
            num_requests=self._num_requests_there,
            num_queued_tokens=max(self.report.num_queued_tokens, self._num_tokens),
            num_free_blocks=self._num_free_blocks,
            num_blocks=num_blocks,
            overlap_blocks=overlap_blocks,
            weight=weight,
        )

    @property
    def _num_free_blocks(self) -> int:
        """Blocks, of the size that block keys stand for, that no request holds or will fill."""
        free_blocks = self._in_keyed_blocks(self.report.num_free_blocks)
        return max(min(free_blocks, self.num_blocks - self._num_blocks), 0)

    @property
    def _num_requests_there(self) -> int:
        """Requests that it has, of all routers."""
        return max(self.report.num_running + self.report.num_waiting, self._num_requests)

    def _in_keyed_blocks(self, num_pool_blocks: int) -> int:
        """Converts blocks of the worker's pool to blocks of the size that block keys stand for."""
        return num_pool_blocks * self._info.pool_block_size // self._info.block_size


def _has_grammar(spec: RequestSpec) -> bool:
    return spec.params.structured_outputs is not None
