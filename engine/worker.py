"""`EngineWorker`: an engine behind WorkerService. Also registers an engine's metrics."""

import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from prometheus_client import CollectorRegistry

from baton.common.errors import FailedPreconditionError, InvalidArgumentError
from baton.common.observe.metrics_collector import MetricsCollector
from baton.common.request.request_spec import client_id_of
from baton.common.version import __version__
from baton.v1 import worker_pb2
from engine.kv_cache.spec import spec_of
from engine.loop.async_engine import AsyncEngine
from engine.metrics.export import EngineDescription, EngineExport, StatsLog, VllmExport
from engine.request import Role
from engine.wire import (
    cache_groups_to_proto,
    check_namespace,
    counters_to_proto,
    kv_backends_to_proto,
    kv_event_responses,
    load_to_proto,
)
from kvstore.handoff import check_keys, connector_name, handoff_to_proto
from kvstore.layout import LAYOUT_VERSION

__all__ = ["EngineWorker", "register_metrics"]

_logger = logging.getLogger("baton.engine")

_ROLES = {
    worker_pb2.WORKER_ROLE_PREFILL: Role.PREFILL,
    worker_pb2.WORKER_ROLE_DECODE: Role.DECODE,
    worker_pb2.WORKER_ROLE_BOTH: Role.BOTH,
}


class EngineWorker:
    """Describes and controls one engine, and logs its statistics while it works. Implements the
    protocol `rpc.worker.Worker`.

    An event loop must run.

    Args:
        engine: the engine.

    Attributes:
        info: the description of what it serves; the worker id in it is drawn here.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.info = _describe(engine)
        self._engine = engine
        self._stats = StatsLog(_export_of(engine))
        self._stats.start()

    def change_role(self, role: "worker_pb2.WorkerRole.ValueType") -> None:
        """Changes which new requests it takes.

        Raises:
            InvalidArgumentError: there is no such role.
            FailedPreconditionError: it has no KV connector to hand prompts over with.
        """
        if role not in _ROLES:
            names = ", ".join(map(worker_pb2.WorkerRole.Name, _ROLES))
            raise InvalidArgumentError.for_field("role", role, f"one of {names}")
        changed = _ROLES[role]
        if Role.PREFILL in changed and self._engine.config.kv_connector is None:
            raise FailedPreconditionError(
                "the worker was started without --kv-connector, so it cannot hand prompts over"
            )
        _logger.info("role %s -> %s", self._engine.role.label, changed.label)
        self._engine.role, self.info.role = changed, role

    def load(self) -> worker_pb2.WorkerLoad:
        """The engine's load as of its last step."""
        return load_to_proto(self._engine.load(), self._engine.kv_backends)

    def counters(self) -> worker_pb2.WorkerCounters:
        """The engine's counters since its start."""
        return counters_to_proto(self._engine.metrics, self._engine.kv_metrics)

    def kv_backends(self) -> Sequence[worker_pb2.KvBackendStatus]:
        """The backends of the engine's KV connector, as they are now."""
        return kv_backends_to_proto(self._engine.kv_backends)

    def abort(self, request_ids: Sequence[str]) -> int:
        """Ends requests with ABORTED; returns how many were live.

        Args:
            request_ids: the router's ids of requests, or clients' ids, each of which
                stands for all requests with that id here.
        """
        named = frozenset(request_ids)
        live = [
            request_id
            for request_id in self._engine.request_ids
            if request_id in named or client_id_of(request_id) in named
        ]
        return self._engine.abort(live, notify=True)

    async def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many blocks were cached."""
        return await self._engine.reset_prefix_cache()

    async def lend_prefix(
        self, request: worker_pb2.LendPrefixRequest
    ) -> worker_pb2.LendPrefixResponse:
        """Lends the beginning of a prompt from the prefix cache; cancelling takes it back.

        Raises:
            FailedPreconditionError: the engine has another namespace, or cannot lend.
            InvalidArgumentError: a key has another length.
        """
        check_namespace(request.namespace, self._engine.namespace)
        if not self.info.lends_prefixes:
            raise FailedPreconditionError(
                "this worker cannot lend prefixes: it has no --kv-connector between peers, or "
                "does not cache prefixes"
            )
        check_keys("keys", request.keys)
        handoff = await self._engine.lend_prefix(tuple(request.keys))
        return worker_pb2.LendPrefixResponse(
            handoff=None if handoff is None else handoff_to_proto(handoff)
        )

    async def watch_kv_events(self) -> AsyncGenerator[worker_pb2.WatchKvEventsResponse, None]:
        """Yields the cache's content, then each change; the caller closes the generator."""
        async with aclosing(self._engine.kv_events()) as batches:
            async for events in batches:
                for response in kv_event_responses(events):
                    yield response

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests and waits for the running ones; returns how many remain."""
        return await self._engine.drain(timeout_s)

    async def wait_failed(self) -> BaseException:
        """Waits until the engine dies; returns the cause."""
        return await self._engine.wait_failed()

    async def close(self) -> None:
        """Stops the engine."""
        self._stats.close()
        await self._engine.close()


def _describe(engine: AsyncEngine) -> worker_pb2.GetInfoResponse:
    config, info = engine.config, engine.info
    spec = spec_of(config, info)
    return worker_pb2.GetInfoResponse(
        worker_id=uuid.uuid4().hex,
        role=load_to_proto(engine.load()).role,
        model=config.model_name,
        namespace=engine.namespace,
        block_size=engine.form.block_size,
        kv_dtype=engine.form.dtype,
        model_fingerprint=info.fingerprint.hex(),
        layout_version=LAYOUT_VERSION,
        pool_block_size=info.layout.block_size,
        kv_form=engine.form.describe(info.fingerprint),
        num_blocks=engine.num_blocks,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        tokenizer_digest=info.tokenizer_digest,
        max_num_seqs=config.max_running,
        max_num_requests=config.max_requests,
        kv_connector=connector_name(config.kv_connector),
        version=__version__,
        max_pool_tokens=spec.max_tokens(engine.num_blocks, info.max_model_len),
        lends_prefixes=engine.lends_prefixes,
        kv_bytes_per_token=info.kv_bytes_per_token,
        cache_groups=cache_groups_to_proto(spec, engine.num_blocks, engine.load().num_slots),
        caches_prefixes=config.enable_prefix_caching,
    )


def register_metrics(engine: AsyncEngine, registry: CollectorRegistry) -> None:
    """Adds a started engine's metrics to a registry."""
    export = _export_of(engine)
    for source in (engine.kv_metrics, export, VllmExport(export)):
        registry.register(MetricsCollector(source))


def _export_of(engine: AsyncEngine) -> EngineExport:
    description = EngineDescription(
        model=engine.config.model_name,
        block_size=engine.config.block_size,
        kv_dtype=engine.form.dtype,
        caches_prefixes=engine.config.enable_prefix_caching,
    )
    return EngineExport(engine.metrics, engine.load, description)
