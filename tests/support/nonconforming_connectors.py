"""Connectors of installed packages: one keeps the contract, each other one breaks one rule.

`GoodConnector` lends blocks within one process: a load copies from pool to pool.
"""

import threading
import time
import uuid

import torch

from kvstore.connector import ConnectorCapabilities, KvConnectorScheduler, KvConnectorWorker
from kvstore.jobs import LoadResult, LookupResult, SaveResult, TransferResults
from kvstore.mover.pool_objects import view_blocks
from kvstore.url import StoreUrl, scheme_of

_lenders = {}  # open workers by the params in their handoffs


class GoodWorker(KvConnectorWorker):
    """Does all work in `start`."""

    def __init__(self, lease_s):
        self.params = uuid.uuid4().bytes
        self.lease_s = lease_s
        self.lent = {}  # leases: {key: a view of the block, or a copy}
        self.jobs = {}  # leases: save jobs
        self.ends_at = {}  # leases that were offered
        self.over = set()  # ended leases
        self.kept = {}
        self.ended = []
        self.released = []
        self.wake = lambda: None
        _lenders[self.params] = self

    def register_pool(self, pool, layout, form=None, share=None):
        self.pool, self.layout = pool, layout
        self.blocks = pool.view(torch.uint8).view(len(pool), -1)

    def set_waker(self, wake):
        self.wake = wake

    def start(self, work):
        self.ended += [LookupResult(job.job_id, 0) for job in work.lookups]
        self.ended += [self.save(job) for job in work.saves]
        self.ended += [self.load(job) for job in work.loads]
        for lease_id in work.offered:
            self.ends_at[lease_id] = time.monotonic() + self.lease_s
        for lease_id in work.ended:
            self.end(lease_id)
        self.kept.update((handoff.handoff_id, handoff) for handoff in work.kept)
        for handoff_id in work.dropped:
            self.kept.pop(handoff_id, None)
        self.wake()

    def poll(self):
        now = time.monotonic()
        for handoff in self.kept.values():
            lender = self.lender_of(handoff)
            if lender and handoff.handoff_id in lender.ends_at:
                lender.ends_at[handoff.handoff_id] = now + lender.lease_s
        for lease_id in [result for result, end in self.ends_at.items() if end < now]:
            self.end(lease_id)
        ended, self.ended, released, self.released = self.ended, [], self.released, []
        kinds = (LookupResult, LoadResult, SaveResult)
        results = [tuple(result for result in ended if isinstance(result, kind)) for kind in kinds]
        return TransferResults(*results, released=tuple(released))

    def close(self):
        _lenders.pop(self.params, None)

    def save(self, job):
        if job.lease_id in self.over:
            return SaveResult(job.job_id, committed=False)
        lent = self.lent.setdefault(job.lease_id, {})
        lent.update(
            zip(job.keys, (self.blocks[block_id] for block_id in job.block_ids), strict=True)
        )
        if job.num_tail_tokens:
            lent[job.keys[-1]] = self.tail(job.block_ids[-1], job.num_tail_tokens)
        self.jobs.setdefault(job.lease_id, []).append(job.job_id)
        return SaveResult(job.job_id, committed=True, is_held=True)

    def tail(self, block_id, num_tokens):
        block = self.pool[block_id].clone()
        views = view_blocks(block, self.layout)
        for part in (views.states, views.scales):
            if part is not None:
                part[:, :, :, num_tokens:] = 0
        return block.view(torch.uint8).view(-1)

    def load(self, job):
        lent = self.find(job)
        for index, (key, block_id) in enumerate(zip(job.keys, job.block_ids, strict=True)):
            if key not in lent:
                return LoadResult(job.job_id, index, "missing")
            self.blocks[block_id] = lent[key]
        return LoadResult(job.job_id, len(job.keys))

    def find(self, job):
        lender = self.lender_of(job.handoff)
        if lender is None or not self.has_layout_of(lender):
            return {}
        return lender.lent.get(job.handoff.handoff_id, {})

    def has_layout_of(self, lender):
        return lender.layout == self.layout

    def lender_of(self, handoff):
        return _lenders.get(handoff.connector_params)

    def end(self, lease_id):
        self.lent.pop(lease_id, None)
        self.ends_at.pop(lease_id, None)
        self.over.add(lease_id)
        self.released += self.jobs.pop(lease_id, [])


class GoodConnector:
    """Keeps the contract."""

    worker_class = GoodWorker
    known_options = ("lease_s",)
    capabilities = ConnectorCapabilities(
        shared_between_processes=False,
        shared_between_hosts=False,
        finds_by_key=False,
        keeps_leases=True,
        lends_blocks=True,
    )

    @classmethod
    def open(cls, url):
        parts = StoreUrl.parse(url, cls.known_options)
        lease_s = parts.seconds("lease_s", 30.0)
        worker = cls.worker_class(lease_s)
        scheduler = KvConnectorScheduler(
            scheme_of(url), lease_s=lease_s, finds_by_key=False, params=worker.params
        )
        return scheduler, worker


class TwofoldWorker(GoodWorker):
    """Reports a load twice."""

    def load(self, job):
        self.ended.append(super().load(job))
        return self.ended[-1]


class LeakyWorker(GoodWorker):
    """Exposes the slots behind a tail."""

    def tail(self, block_id, num_tokens):
        return self.blocks[block_id]


class BoastfulWorker(GoodWorker):
    """Reports missing blocks as loaded."""

    def load(self, job):
        return LoadResult(job.job_id, max(super().load(job).num_blocks, len(job.keys)))


class GappyWorker(GoodWorker):
    """Counts all loaded blocks, even behind a missing one."""

    def load(self, job):
        lent = self.find(job)
        pairs = [pair for pair in zip(job.keys, job.block_ids, strict=True) if pair[0] in lent]
        for key, block_id in pairs:
            self.blocks[block_id] = lent[key]
        return LoadResult(job.job_id, len(pairs), "" if len(pairs) == len(job.keys) else "missing")


class SilentWorker(GoodWorker):
    """Never wakes the engine."""

    def set_waker(self, wake):
        pass


class LateWorker(GoodWorker):
    """Writes to the pool after it has reported the result."""

    def load(self, job):
        lent, blocks = dict(self.find(job)), self.blocks

        def write():
            for key, block_id in zip(job.keys, job.block_ids, strict=True):
                blocks[block_id] = lent.get(key, blocks[block_id])

        write()
        threading.Timer(0.1, write).start()
        return super().load(job)


class EagerWorker(GoodWorker):
    """Releases blocks that are still lent."""

    def save(self, job):
        result = super().save(job)
        self.released += self.jobs.pop(job.lease_id)
        return result


class HastyWorker(GoodWorker):
    """Starts a lease's time at the save instead of at the offer."""

    def save(self, job):
        result = super().save(job)
        self.ends_at[job.lease_id] = time.monotonic() + self.lease_s
        return result


class RestlessWorker(GoodWorker):
    """Lends blocks for a lease that has ended."""

    def save(self, job):
        self.over.discard(job.lease_id)
        return super().save(job)


class GenerousWorker(GoodWorker):
    """Lets others read blocks that it has released."""

    def end(self, lease_id):
        lent = self.lent.get(lease_id, {})
        super().end(lease_id)
        self.lent[lease_id] = lent


class ShapelessWorker(GoodWorker):
    """Loads blocks of any layout."""

    def has_layout_of(self, lender):
        return True

    def load(self, job):
        lent = self.find(job)
        for key, block_id in zip(job.keys, job.block_ids, strict=True):
            if key not in lent:
                return LoadResult(job.job_id, 0, "missing")
            count = min(len(lent[key]), self.blocks.shape[1])
            self.blocks[block_id, :count] = lent[key][:count]
        return LoadResult(job.job_id, len(job.keys))


class SwappedWorker(GoodWorker):
    """Sorts the blocks without their keys."""

    def save(self, job):
        result = super().save(job)
        blocks = (self.blocks[block_id] for block_id in sorted(job.block_ids))
        self.lent[job.lease_id].update(zip(job.keys, blocks, strict=True))
        return result


class ForgetfulWorker(GoodWorker):
    """Does not renew leases."""

    def lender_of(self, handoff):
        is_renewal = handoff.handoff_id in self.kept
        return None if is_renewal else super().lender_of(handoff)


class LastingWorker(GoodWorker):
    """Still lends blocks after it was closed."""

    def close(self):
        pass


def _connector_of(worker):
    return type(worker.__name__, (GoodConnector,), {"worker_class": worker})


TwofoldConnector = _connector_of(TwofoldWorker)
LeakyConnector = _connector_of(LeakyWorker)
BoastfulConnector = _connector_of(BoastfulWorker)
GappyConnector = _connector_of(GappyWorker)
SilentConnector = _connector_of(SilentWorker)
LateConnector = _connector_of(LateWorker)
EagerConnector = _connector_of(EagerWorker)
HastyConnector = _connector_of(HastyWorker)
RestlessConnector = _connector_of(RestlessWorker)
GenerousConnector = _connector_of(GenerousWorker)
ShapelessConnector = _connector_of(ShapelessWorker)
SwappedConnector = _connector_of(SwappedWorker)
ForgetfulConnector = _connector_of(ForgetfulWorker)
LastingConnector = _connector_of(LastingWorker)


class CarelessConnector(GoodConnector):
    """Ignores an unknown option."""

    known_options = ("lease_s", "no_such_option")


class ModestConnector(GoodConnector):
    """Does not declare that it lends blocks."""

    capabilities = ConnectorCapabilities(
        shared_between_processes=False,
        shared_between_hosts=False,
        finds_by_key=False,
        keeps_leases=True,
    )
