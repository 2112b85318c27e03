"""`AsyncEngine`: an engine in a thread of its own, behind asyncio.

The event loop and the engine exchange plain messages: requests and aborts go
down a queue, each step's outputs come back in one call. Handlers only await.
No grpc here; torch is imported only when an engine is built.
"""

from collections.abc import Callable, Iterable

from engine.config import EngineConfig
from engine.request import EngineLoad, EngineRequest, RequestOutput
from engine.runner import ModelInfo

__all__ = ["AsyncEngine"]

OutputHandler = Callable[[RequestOutput], None]


class AsyncEngine:
    """One engine for coroutines to use. Make it with `AsyncEngine.start`.

    Attributes:
        config: as given.
        info: the loaded model's facts.
        namespace: digest that block keys are rooted in.
        num_blocks: KV blocks in the pool.
    """

    config: EngineConfig
    info: ModelInfo
    namespace: bytes
    num_blocks: int

    @classmethod
    async def start(cls, config: EngineConfig) -> "AsyncEngine":
        """Loads the model in the engine's thread and starts the step loop.

        Raises:
            ConfigurationError: the checkpoint, a flag or the connector is bad.
        """
        raise NotImplementedError

    def submit(self, request: EngineRequest, on_output: OutputHandler) -> None:
        """Admits a request. `on_output` is called on the event loop, once per
        step that brings it something; all outputs of one step are delivered
        within one loop callback. The last call has `finish_reason` set, and
        always comes, unless `abort` is called first.

        Raises:
            InvalidArgumentError: a token id or length the model cannot take.
            FailedPreconditionError: the handoff is not for this engine.
            ResourceExhaustedError: the queue is full, or the request is larger
                than the pool can ever hold.
            UnavailableError: the engine drains or has died.
        """
        raise NotImplementedError

    def abort(self, request_ids: Iterable[str], *, notify: bool = False) -> int:
        """Ends requests and frees what they hold. Unknown ids are fine.

        Args:
            request_ids: the requests.
            notify: whether their handlers get a last output, ABORTED.

        Returns:
            How many were live.
        """
        raise NotImplementedError

    def release_handoff(self, handoff_id: str) -> None:
        """Drops what the connector kept for one handoff alone."""
        raise NotImplementedError

    def load(self) -> EngineLoad:
        """How busy the engine is, as of its last step."""
        raise NotImplementedError

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests from now on and waits for the running ones.

        Returns:
            How many were still running at the timeout.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Stops the thread and closes the connector. Idempotent."""
        raise NotImplementedError
