"""`PrefixPulls`: prefixes that one replica lends to another, which computes the rest of a prompt.

The router asks the replica that holds a prefix to lend it, and sends the terms with the request.
Whatever fails costs a bounded time, and the prompt is computed as if no replica held its beginning.
"""

import asyncio
import logging
import time
from collections.abc import Iterator

from baton.common.errors import BatonError
from router.fleet.fleet import Fleet
from router.fleet.tier_replicas import DecodeReplica, PrefillReplica
from router.observe.request_record import Attempt
from router.requests.request import RoutedRequest
from router.routing.cache_index import CacheIndex
from router.routing.pulls import AnswerTime, PrefixHolder, Pull, PullCosts, choose_pull
from router.stages.continuation import HeldHandoff

__all__ = ["PrefixPulls"]

_LOGGER = logging.getLogger("baton.router")
_Worker = PrefillReplica | DecodeReplica

# How long a replica that did not answer in time is not asked again.
_REST_S = 10.0
_MAX_RESTING = 1024


class PrefixPulls:
    """Plans and starts the pulls of one model's requests.

    Args:
        fleet: the replicas.
        index: what they cache.
    """

    def __init__(self, fleet: Fleet, index: CacheIndex) -> None:
        self._fleet = fleet
        self._index = index
        self._answers = AnswerTime(time.monotonic)
        self._resting: dict[str, float] = {}  # until when, by replica

    def plan(self, request: RoutedRequest, replica: _Worker) -> Pull | None:
        """Returns which prefix a replica should pull, and from where; None if from nowhere.

        Args:
            request: the request.
            replica: computes the prompt, or what is left of it.
        """
        if not replica.info.lends_prefixes or request.spec.params.prompt_logprobs is not None:
            return None
        match, borrower = request.match(self._index), replica.candidate()
        costs = PullCosts(borrower.prompt_token_s, borrower.load_token_s, self._answers.expected_s)
        cached_blocks = match.blocks(replica.replica_id)
        holders = (
            PrefixHolder(
                lender.replica_id,
                lender.address,
                match.blocks(lender.replica_id),
                lender.load.num_running + lender.load.num_waiting,
            )
            for lender in self._lenders(replica)
            if match.blocks(lender.replica_id) > cached_blocks
        )
        return choose_pull(
            holders,
            costs,
            num_prompt_tokens=request.num_prompt_tokens,
            cached_blocks=cached_blocks,
            block_size=request.block_size,
        )

    async def borrow(self, request: RoutedRequest, pull: Pull, attempt: Attempt) -> HeldHandoff:
        """Asks a replica to lend a prefix.

        Args:
            request: the request.
            pull: from `plan`.
            attempt: the call of the worker that loads the prefix; notes where it comes from.

        Returns:
            Where the prefix is, until the caller releases it; empty if no replica lends it.
        """
        held = HeldHandoff()
        lender = self._lender(pull.holder.replica_id)
        if lender is None:
            return held
        started_at, attempt.pulled_from = time.monotonic(), lender.address
        try:
            handoff = await lender.worker.lend_prefix(
                request.namespace, request.block_keys[: pull.num_blocks], pull.wait_s
            )
        except BatonError as error:
            self._answers.add_failed(time.monotonic() - started_at)
            self._rest(lender)
            _LOGGER.info("prefix is not pulled from %s: %s", lender.address, error.message)
            return held
        finally:
            attempt.asked_s = time.monotonic() - started_at
        self._answers.add(attempt.asked_s)
        if handoff is not None:
            attempt.pulled_tokens = handoff.num_tokens
            held.complete(handoff, lender)
        return held

    def _lenders(self, borrower: _Worker) -> Iterator[_Worker]:
        """Yields the replicas that can lend to another one."""
        now, connector = asyncio.get_running_loop().time(), borrower.info.kv_connector
        for lender in self._workers():
            can_lend = lender.info.lends_prefixes and lender.info.kv_connector == connector
            is_other = lender.replica_id != borrower.replica_id
            is_resting = self._resting.get(lender.replica_id, 0.0) > now
            if can_lend and is_other and not (lender.is_ejected or is_resting):
                yield lender

    def _lender(self, replica_id: str) -> _Worker | None:
        return next((each for each in self._workers() if each.replica_id == replica_id), None)

    def _workers(self) -> Iterator[_Worker]:
        yield from self._fleet.prefill.candidates
        yield from self._fleet.decode.candidates

    def _rest(self, lender: _Worker) -> None:
        """Asks a replica that did not answer no more for a while."""
        now = asyncio.get_running_loop().time()
        if len(self._resting) >= _MAX_RESTING:
            self._resting = {name: end for name, end in self._resting.items() if end > now}
        self._resting[lender.replica_id] = now + _REST_S
