"""`FakeEngine`: AsyncEngine's methods, with outputs that the test emits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from baton.common.errors import BatonError, InvalidArgumentError, Reason, UnavailableError
from engine.config import EngineConfig
from engine.kv_cache.events import KvEvent
from engine.metrics.counts import EngineMetrics
from engine.request import EngineLoad, EngineOutput, EngineRequest, FinishReason, Role
from engine.runner import ModelInfo
from kvstore.guard.metrics import KvMetrics
from kvstore.guard.status import BackendStatus
from kvstore.handoff import KvHandoff
from kvstore.layout import KvLayout
from kvstore.transfer_form import TransferForm

NAMESPACE = bytes(range(32))


class FakeEngine:
    """Records all calls; `emit` delivers the outputs of one engine step."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.kv_backends = ()
        self.config = EngineConfig(model="tests/scripted", kv_connector="memory://fake")
        layout = KvLayout(num_layers=1, num_kv_heads=1, block_size=16, head_dim=8, dtype="float32")
        self.info = ModelInfo(
            max_model_len=512,
            vocab_size=1000,
            eos_token_ids=(2,),
            fingerprint=b"f",
            layout=layout,
        )
        self.namespace = NAMESPACE
        self.form = TransferForm(block_size=16, dtype="float32")
        self.num_blocks = 64
        self.metrics = EngineMetrics()
        self.kv_metrics = KvMetrics()
        self.kv_backends: list[BackendStatus] = []
        self.live: dict[str, EngineRequest] = {}
        self.aborted: list[str] = []
        self.finished_candidates: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.prefetched: list[KvHandoff] = []
        self.lends_prefixes = False
        self.lent_prefix: KvHandoff | None = None
        self.asked_keys: list[tuple[bytes, ...]] = []
        self.num_cached_blocks = 0
        self.events: asyncio.Queue[Sequence[KvEvent]] = asyncio.Queue()
        self.num_followers = 0
        self.refusal: BatonError | None = None
        self.is_closed = False
        self.num_running = 0
        self.age_s = 0.0
        self.handlers: dict[str, Callable[[EngineOutput], None]] = {}
        self._is_draining = False
        self._changed = asyncio.Event()
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    # What services call.

    def check(self, request: EngineRequest) -> None:
        if self.refusal is not None:
            raise self.refusal

    def submit(
        self,
        request: EngineRequest,
        on_output: Callable[[EngineOutput], None],
        *,
        is_checked: bool = False,
    ) -> None:
        if not is_checked:
            self.check(request)
        if self._is_draining:
            raise UnavailableError(
                "this replica takes no new requests", reason=Reason.NO_REPLICA_READY
            )
        request_id = request.spec.request_id
        if request_id in self.live:
            raise InvalidArgumentError("request_id is not unique")
        self.live[request_id] = request
        self.handlers[request_id] = on_output
        self._notify()

    @property
    def request_ids(self) -> list[str]:
        return list(self.live)

    def abort(self, request_ids: Iterable[str], *, notify: bool = False) -> int:
        known = [i for i in request_ids if i in self.live]
        self.aborted += known
        for request_id in known:
            if notify:
                self.emit(finished(request_id, FinishReason.ABORTED))
            else:
                self._forget(request_id)
        return len(known)

    def finish_candidate(self, request_id: str, index: int) -> None:
        self.finished_candidates.append((request_id, index))
        self._notify()

    def release_handoff(self, handoff_id: str) -> None:
        self.released.append(handoff_id)
        self._notify()

    def prefetch(self, handoff: KvHandoff) -> None:
        handoff.check_compatible(namespace=self.namespace, connector="memory")
        self.prefetched.append(handoff)
        self._notify()

    async def reset_prefix_cache(self) -> int:
        num_blocks, self.num_cached_blocks = self.num_cached_blocks, 0
        return num_blocks

    async def lend_prefix(self, keys: Sequence[bytes]) -> KvHandoff | None:
        self.asked_keys.append(tuple(keys))
        return self.lent_prefix

    async def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        self.num_followers += 1
        try:
            while True:
                yield await self.events.get()
        finally:
            self.num_followers -= 1
            self._notify()

    def load(self) -> EngineLoad:
        self.age_s += 1.0
        return EngineLoad(
            num_running=self.num_running,
            num_waiting=0,
            num_queued_tokens=0,
            num_free_blocks=self.num_blocks,
            num_blocks=self.num_blocks,
            draining=self._is_draining,
            role=self.role,
            age_s=self.age_s,
        )

    async def drain(self, timeout_s: float) -> int:
        self._is_draining = True
        self._notify()
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(lambda: not self.live)
        except TimeoutError:
            pass
        return len(self.live)

    async def wait_failed(self) -> BaseException:
        return await asyncio.shield(self._failed)

    async def close(self) -> None:
        self.is_closed = True

    # What tests call.

    def emit(self, *outputs: EngineOutput) -> None:
        """Delivers one step's outputs, as the real engine does: in one loop callback."""
        for output in outputs:
            handler = self.handlers[output.request_id]
            if output.is_last:
                self._forget(output.request_id)
            handler(output)

    def die(self, cause: BaseException) -> None:
        self._failed.set_result(cause)

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition on the recorded calls."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _forget(self, request_id: str) -> None:
        del self.live[request_id]
        del self.handlers[request_id]
        self._notify()

    def _notify(self) -> None:
        self._changed.set()


def tokens(request_id: str, *token_ids: int, index: int = 0) -> EngineOutput:
    return EngineOutput(request_id=request_id, index=index, token_ids=token_ids)


def finished(
    request_id: str,
    reason: FinishReason = FinishReason.STOP,
    *token_ids: int,
    index: int = 0,
    is_last: bool = True,
) -> EngineOutput:
    return EngineOutput(
        request_id=request_id,
        index=index,
        token_ids=token_ids,
        finish_reason=reason,
        is_last=is_last,
    )
