"""`Pipeline`: the life of a request in the router; docs/architecture.md tells the whole.

validate, tokenize, block keys                    validation, preparation
pick a decode replica; remote prefill or local?   policy, decode_stage
the prompt and its first tokens from prefill      prefill_stage
its KV to decode, block by block as it is saved   prefill_stage
the other tokens from decode, resumed if lost     decode_stage
tokens become text, up to a stop                  completion
finish, cancel, deadline: every tier lets go      here, as generators close
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.errors import UnavailableError
from baton.v1 import decode_pb2, generation_pb2
from router.admission import Admission
from router.completion import Completion
from router.config import RouterConfig
from router.decode_stage import DecodeStage
from router.fleet import Fleet
from router.held_handoff import HeldHandoff
from router.policy import wants_remote_prefill
from router.prefill_stage import PrefillStage
from router.prefix_index import PrefixIndex
from router.preparation import prepare_request
from router.progress import Progress
from router.replica import DecodeReplica
from router.request import RoutedRequest
from router.tokenizer import Tokenizer
from router.validation import validate_generate_request

__all__ = ["Pipeline"]


class Pipeline:
    """Takes requests from validation to the last message.

    Args:
        config: the router's.
        tokenizer: the model's.
        fleet: the replicas.
        prefix_index: what they probably cache.
        admission: says whether more requests may run.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        fleet: Fleet,
        prefix_index: PrefixIndex,
        admission: Admission,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._admission = admission
        self._prefill = PrefillStage(fleet, prefix_index)
        self._decode = DecodeStage(fleet, prefix_index, config.resume_timeout_s)

    async def generate(
        self, message: generation_pb2.GenerateRequest, deadline: float
    ) -> AsyncGenerator[generation_pb2.GenerateStreamResponse, None]:
        """Yields messages up to the one with usage and timings. To be closed by the caller.

        While the caller is busy with one message, the tokens that come are
        gathered in the next.

        Args:
            message: the client's request.
            deadline: event loop time at which the caller will give up.

        Raises:
            BatonError: see `GenerationService`.
        """
        arrival = asyncio.get_running_loop().time()
        request = validate_generate_request(message, self._config.model_name)
        with self._admission.admit(request.request_id):
            model, limits = self._fleet.require_model()
            routed = await prepare_request(request, self._tokenizer, model, limits, deadline)
            completion = Completion(routed, self._tokenizer, arrival)
            progress = Progress(routed.params)
            async with aclosing(self._outputs(routed, completion, progress)) as outputs:
                async for output in outputs:
                    for response in completion.add(output):
                        if response.finish_reason:
                            progress.end(response.index)
                        yield response
                    if completion.is_over:
                        return

    async def _outputs(
        self, request: RoutedRequest, completion: Completion, progress: Progress
    ) -> AsyncGenerator[decode_pb2.DecodeOutput, None]:
        """The tokens of both tiers as one sequence of outputs."""
        replica = self._decode.pick(request)
        if replica is None:
            raise UnavailableError("no decode replica is ready; try again later")
        completion.mark_routed()
        handoff = HeldHandoff()
        try:
            async with aclosing(
                self._prefill_outputs(request, replica, progress, handoff)
            ) as outputs:
                async for output in outputs:
                    yield output
                    if output.is_last:
                        return
            async with aclosing(self._decode.run(request, replica, progress, handoff)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            handoff.release()
            replica.withdraw_prefetch(request.worker_id)

    async def _prefill_outputs(
        self,
        request: RoutedRequest,
        replica: DecodeReplica,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncGenerator[decode_pb2.DecodeOutput, None]:
        """What the prefill tier tells of the prompt, if asking it is worth it and possible."""
        overlap_blocks = self._decode.overlap_blocks(request, replica)
        if not wants_remote_prefill(
            len(request.prompt_token_ids),
            overlap_blocks * request.block_size,
            self._config.max_local_prefill_tokens,
        ):
            return
        outputs = self._prefill.run(request, replica, progress, handoff)
        with replica.reserve(num_blocks=request.num_prompt_blocks - overlap_blocks):
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
