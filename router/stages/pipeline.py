"""`Pipeline`: the life of a request in the router; docs/architecture.md describes all of it.

validate, tokenize, block keys                          validation, request
choose a decode replica; remote prefill or local?       placement, decode_stage
the prompt and its first tokens from prefill            prefill_stage
its KV to decode, block by block as it is saved         prefill_stage
the other tokens from decode, resumed if lost           decode_stage
tokens become text, up to a stop                        completion
finish, cancel, deadline: every tier frees the request  here, as generators close
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from baton.common.errors import BatonError, InvalidArgumentError, ResourceExhaustedError
from baton.common.request.answer import CandidateOutput
from baton.common.request.generation import GenerationRequest, TextOrTokens
from baton.common.request.request_spec import ReasoningMarks
from baton.common.request.sampling_params import SamplingParams
from router.config.router import RouterConfig
from router.fleet.fair_shares import Share
from router.fleet.fleet import Fleet
from router.fleet.tier_replicas import DecodeReplica
from router.observe.request_log import RequestLog
from router.observe.request_record import RequestRecord
from router.requests.input_threads import MAX_INLINE_LENGTH
from router.requests.pace import Pace
from router.requests.request import RoutedRequest, SpecMaker, prepare_request
from router.requests.tokenizer import Tokenizer
from router.requests.validation import validate_request
from router.routing.cache_index import CacheIndex
from router.routing.policies import make_policy
from router.routing.policy import PolicySettings
from router.routing.sessions import session_key
from router.stages.admission import Admission
from router.stages.backlog import REFUSALS, Backlog
from router.stages.completion import Completion
from router.stages.continuation import HeldHandoff, Progress
from router.stages.decode_stage import DecodeStage
from router.stages.interactive import is_call_awaited
from router.stages.picking import Picking
from router.stages.place import Place
from router.stages.placement import Placement, PromptPlan
from router.stages.prefill_stage import PrefillStage
from router.stages.pulling import PrefixPulls
from router.tenants.tenant import Tenant, tenant_of_call
from rpc.logs import session_of_call, slo_of_call

__all__ = ["Pipeline"]


async def _run_together(
    prompts: Sequence[AsyncGenerator[CandidateOutput, None]],
) -> AsyncGenerator[CandidateOutput, None]:
    """Yields the outputs of all prompts as they come, with the prompt's index.

    While the caller handles one output, each prompt waits with its next one, into which its
    new tokens are merged.

    Args:
        prompts: the outputs of each prompt; closed when the caller closes this generator.

    Raises:
        BatonError: the first error of a prompt, which ends all of them; names the prompt.
    """
    queue: asyncio.Queue[CandidateOutput | Exception | None] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_run(i, prompt, queue)) for i, prompt in enumerate(prompts)]
    num_running = len(tasks)
    try:
        while num_running:
            output = await queue.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                num_running -= 1
            else:
                yield output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    index: int,
    prompt: AsyncGenerator[CandidateOutput, None],
    queue: "asyncio.Queue[CandidateOutput | Exception | None]",
) -> None:
    """Puts a prompt's outputs into the queue, then its error, or None."""
    end: Exception | None = None
    try:
        async with aclosing(prompt) as outputs:
            async for output in outputs:
                output.prompt_index = index
                await queue.put(output)
    except BatonError as error:
        end = error.within(f"prompts[{index}]")
    except Exception as error:  # the caller logs it
        end = error
    await queue.put(end)


class Pipeline:
    """Runs requests of one model from validation to the last message.

    Args:
        config: the router's.
        marks: those of the model's reasoning part; None if they are not known.
        tokenizer: the model's.
        default_params: values of sampling parameters that a request leaves unset.
        fleet: the replicas.
        index: what the replicas cache.
        admission: limits the number of running requests.
        backlog: learns how long requests take.
        pace: how long streams pause after each message.
        log: keeps the requests' records.

    Attributes:
        picking: chooses replicas for requests that other routers run.
    """

    def __init__(
        self,
        config: RouterConfig,
        marks: ReasoningMarks | None,
        tokenizer: Tokenizer,
        default_params: Mapping[str, Any],
        fleet: Fleet,
        index: CacheIndex,
        admission: Admission,
        backlog: Backlog,
        pace: Pace,
        log: RequestLog,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._default_params = default_params
        self._marks = marks
        self._fleet = fleet
        self._admission = admission
        self._backlog = backlog
        self._pace = pace
        self._log = log
        settings = PolicySettings(max_affinity_delay_s=config.max_affinity_delay_s)
        policy = make_policy(config.routing_policy, settings)
        limit = config.max_local_prefill_tokens
        max_local_tokens = limit if isinstance(limit, int) else None
        self._placement = placement = Placement(fleet, index, policy, max_local_tokens)
        self.picking = Picking(fleet, placement, self._route)
        pulls = PrefixPulls(fleet, index)
        self._prefill = PrefillStage(
            fleet, placement, pulls, queue_timeout_s=config.queue_timeout_s
        )
        self._decode = DecodeStage(
            fleet,
            placement,
            pulls,
            queue_timeout_s=config.queue_timeout_s,
            resume_timeout_s=config.resume_timeout_s,
        )

    async def open(
        self, request: GenerationRequest, deadline: float, operation: str
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Validates a request; returns its outputs up to the one with usage and timings.

        The caller closes the generator. While it handles one output, new tokens are merged
        into the next.

        Args:
            request: the client's.
            deadline: `time.monotonic()` at which the request must have ended.
            operation: text_completion or chat, for the request's record.

        Raises:
            BatonError: one of those that `GenerationService` documents; also the generator.
        """
        params = await self._validated(request)
        request, prompts, tenant = _of_tenant(request), request.prompts, tenant_of_call()
        if not request.has_several:
            return self._generate(
                request, request.request_id, prompts[0], params, deadline, operation
            )
        most = min(self._admission.max_requests, tenant.max_requests)
        if len(prompts) > most:
            raise InvalidArgumentError(
                f"prompts has {len(prompts)} entries; it must have at most {most}, the requests "
                "that this router runs at once"
            )
        each = [
            self._generate(
                request, f"{request.request_id}-{i}", prompt, params, deadline, operation
            )
            for i, prompt in enumerate(prompts)
        ]
        return _run_several(each, tenant)

    async def _generate(
        self,
        request: GenerationRequest,
        request_id: str,
        prompt: TextOrTokens,
        params: SamplingParams,
        deadline: float,
        operation: str,
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Yields the outputs of one prompt."""
        tenant, is_awaited = tenant_of_call(), is_call_awaited()
        with (
            self._admission.admit(request_id, tenant.name, tenant.policy.weight),
            self._backlog.place(request.priority, tenant.share, is_awaited=is_awaited) as place,
        ):
            record = self._log.begin(request_id, self._fleet.model_name, operation)
            record.tenant = tenant.name
            record.session = session_key(tenant.name, session_of_call())
            with self._log.recording(record, deadline):
                routed = await self._prepare(request, prompt, params, deadline, record)
                if (form := routed.spec.params.structured_outputs) is not None:
                    place.grammar = form.key
                if not request.has_several:  # else a part of a call would fail
                    tenant.check_tokens()
                completion = Completion(routed.spec, self._tokenizer, record)
                progress = Progress(routed.spec.params)
                async with aclosing(self._outputs(routed, progress, place)) as outputs:
                    async for output in outputs:
                        for completed in completion.add(output):
                            if completed.finish_reason:
                                progress.end(completed.index)
                            sent_at = time.monotonic()
                            try:
                                yield completed
                            finally:
                                record.send_wait_s += time.monotonic() - sent_at
                        if completion.is_over:
                            return

    async def _prepare(
        self,
        request: GenerationRequest,
        prompt: TextOrTokens,
        params: SamplingParams,
        deadline: float,
        record: RequestRecord,
    ) -> RoutedRequest:
        with record.waiting():
            model, limits = await self._fleet.wait_for_model(
                request.priority, deadline, self._config.queue_timeout_s
            )
        maker = SpecMaker(self._tokenizer, limits, model.eos_token_ids, self._marks)
        routed = await prepare_request(request, prompt, params, maker, model, deadline, record)
        record.note_params(routed.spec.params)
        routed.share = self._share_of(routed)
        return routed

    async def _route(self, request: GenerationRequest, deadline: float) -> RoutedRequest:
        """Prepares the first prompt of a request that another router runs."""
        params, request = await self._validated(request), _of_tenant(request)
        record = RequestRecord(request_id=request.request_id)
        record.session = session_key(tenant_of_call().name, session_of_call())
        return await self._prepare(request, request.prompts[0], params, deadline, record)

    def _share_of(self, routed: RoutedRequest) -> Share:
        """What a request takes of its tenant's share: the tokens that it will probably use."""
        params = routed.spec.params
        num_tokens = self._backlog.expected_tokens(params.max_tokens) * params.num_candidates
        tenant = tenant_of_call().share
        return Share(tenant.tenant, tenant.weight, routed.num_prompt_tokens + num_tokens)

    async def _validated(self, request: GenerationRequest) -> SamplingParams:
        """Checks a request; a thread checks long lists, which would delay other requests."""
        arguments = request, self._default_params
        sizes = (len(value) for value in request.stated.values() if hasattr(value, "__len__"))
        if "extra_args" not in request.stated and sum(sizes) <= MAX_INLINE_LENGTH:
            return validate_request(*arguments)
        return await asyncio.to_thread(validate_request, *arguments)

    async def _outputs(
        self, request: RoutedRequest, progress: Progress, place: Place
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Yields the outputs of prefill, then those of decode."""
        replica = await self._decode.find(request)
        if request.record.waits:
            self._check_start(request)
        self._backlog.start(place)
        tenant = tenant_of_call()
        tenant.use_tokens(request.num_prompt_tokens)
        request.record.mark_routed()
        handoff = HeldHandoff()
        try:
            plan = self._placement.plan_prompt(request, replica)
            if plan.is_remote:
                prefill = self._prefill_outputs(request, replica, plan, progress, handoff)
                async with aclosing(prefill) as outputs:
                    async for output in outputs:
                        self._backlog.note_first_token(place)
                        if output.is_last:
                            self._backlog.begin(place)
                        yield output
                        if output.is_last:
                            return
            async with aclosing(self._decode.run(request, replica, progress, handoff)) as outputs:
                async for output in outputs:
                    self._backlog.begin(place)
                    yield output
                    # Not before: a pause between prefill and decode would delay all other tokens.
                    self._pace.is_used = True
                    if self._pace.pause_s:
                        await asyncio.sleep(self._pace.pause_s)
        finally:
            place.num_tokens = progress.num_tokens / request.spec.params.num_candidates
            self._placement.note_answer(progress.num_tokens)
            place.send_wait_s = request.record.send_wait_s
            tenant.use_tokens(request.record.usage.completion_tokens)
            if request.record.waits:  # else it has kept nobody waiting
                num_tokens = request.num_prompt_tokens + progress.num_tokens
                self._fleet.waiting.shares.settle(request.share, num_tokens)
            handoff.release()
            replica.connection.withdraw_prefetch(request.spec.request_id)

    def _check_start(self, request: RoutedRequest) -> None:
        """Refuses a request that has waited for too long."""
        spec, ttft_s = request.spec, slo_of_call().ttft_s
        first_left_s = math.inf
        if ttft_s is not None:
            first_left_s = request.record.arrived_at + ttft_s - time.monotonic()
        try:
            self._backlog.check_start(spec.remaining_s(), spec.params.max_tokens, first_left_s)
        except ResourceExhaustedError as error:
            self._fleet.waiting.shares.settle(request.share, 0)
            self._log.count_refusal(REFUSALS[error.reason])
            raise

    async def _prefill_outputs(
        self,
        request: RoutedRequest,
        replica: DecodeReplica,
        plan: PromptPlan,
        progress: Progress,
        handoff: HeldHandoff,
    ) -> AsyncGenerator[CandidateOutput, None]:
        """Yields the prefill tier's outputs, if a remote prefill is possible."""
        outputs = self._prefill.run(request, replica, progress, handoff)
        deadline = request.spec.deadline
        with replica.reserve(num_blocks=plan.missing_blocks, is_sent=False, deadline=deadline):
            async with aclosing(outputs):
                async for output in outputs:
                    yield output


def _of_tenant(request: GenerationRequest) -> GenerationRequest:
    """Returns a request with the cache salt and the priority that its tenant has."""
    tenant = tenant_of_call()
    salt, priority = tenant.cache_salt(request.cache_salt), tenant.priority(request.priority)
    if (salt, priority) == (request.cache_salt, request.priority):
        return request
    return replace(request, cache_salt=salt, priority=priority)


async def _run_several(
    prompts: Sequence[AsyncGenerator[CandidateOutput, None]], tenant: Tenant
) -> AsyncGenerator[CandidateOutput, None]:
    """Yields the outputs of the prompts of one call, each of which counts as a request."""
    with tenant.running_prompts(len(prompts)):
        async with aclosing(_run_together(prompts)) as outputs:
            async for output in outputs:
                yield output
