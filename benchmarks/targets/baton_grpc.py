"""A Baton router, over gRPC."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.client import AsyncClient
from baton.errors import BatonError
from baton.sampling_params import SamplingParams
from benchmarks.request import BenchRequest
from benchmarks.targets.target import EndpointDescription, LostRequestError

__all__ = ["BatonTarget"]

_DESCRIBE_TIMEOUT_S = 30.0


class BatonTarget:
    """See `benchmarks.targets.target.Target`.

    Args:
        address: the router's `host:port`.
        model: the model to ask for; empty for the served one.
    """

    def __init__(self, address: str, model: str) -> None:
        self._client = AsyncClient(address, model=model)

    async def describe(self) -> EndpointDescription:
        """Asks the router."""
        model = await self._client.get_model(timeout_s=_DESCRIBE_TIMEOUT_S)
        return EndpointDescription(model.name, model.vocab_size)

    async def stream(self, request: BenchRequest) -> AsyncGenerator[int, None]:
        """Streams a completion."""
        params = SamplingParams(
            temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True
        )
        try:
            async with aclosing(self._client.stream(request.prompt_token_ids, params)) as chunks:
                async for chunk in chunks:
                    yield len(chunk.token_ids)
        except BatonError as error:
            raise LostRequestError(f"{error.code}: {error.message}") from error

    async def close(self) -> None:
        """Closes the channel."""
        await self._client.close()
