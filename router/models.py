"""`Model`: one served model of the router. `Models`: all of them, by name."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.common.errors import (
    DeadlineExceededError,
    NotFoundError,
    Reason,
    ResourceExhaustedError,
)
from baton.common.model_files.files import open_model_files
from baton.common.request.answer import CandidateOutput
from baton.common.request.generation import GenerationRequest, TextOrTokens
from baton.common.request.sampling_params import SamplingParams
from baton.common.security.cluster import ClusterSecurity
from baton.common.short_texts import short_repr
from router.chat.chat_request import ChatRequest
from router.chat.model import ChatModel
from router.chat.template import ChatTemplate
from router.config.router import RouterConfig
from router.config.served_model import ServedModelConfig
from router.fleet.fleet import Fleet
from router.fleet.served_model import RequestLimits
from router.observe.request_log import RequestLog
from router.requests.generation_config import load_default_params
from router.requests.pace import Pace
from router.requests.request import tokenize_prompt
from router.requests.tokenizer import Tokenizer
from router.requests.validation import MAX_TOKENIZE_CHARS
from router.routing.cache_index import CacheIndex
from router.stages.admission import Admission, Entrance
from router.stages.backlog import REFUSALS, Backlog
from router.stages.pipeline import Pipeline
from router.tenants.tenant import tenant_of_call
from rpc.discovery.announcements import Announcements
from rpc.logs import slo_of_call, timeout_of_call

__all__ = ["Model", "Models", "RouterFiles"]


@dataclass(frozen=True, slots=True)
class RouterFiles:
    """The parts of a checkpoint that the router reads.

    Attributes:
        tokenizer: the model's tokenizer.
        default_params: values of sampling parameters that a request leaves unset.
        chat_template: the model's chat template; None if it has none.
        tokenizer_digest: of `tokenizer`'s files; empty if it cannot be compared.
        tokenizer_settings: the contents of tokenizer_config.json.
    """

    tokenizer: Tokenizer
    default_params: Mapping[str, Any]
    chat_template: ChatTemplate | None = None
    tokenizer_digest: str = ""
    tokenizer_settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, config: ServedModelConfig) -> "RouterFiles":
        """Reads the files of a model.

        Raises:
            ConfigurationError: a file is missing or bad.
        """
        files = open_model_files(config.model)
        return cls(
            tokenizer=Tokenizer.load(config.model),
            default_params=load_default_params(config.model, config.generation_config),
            chat_template=ChatTemplate.load(config.model, config.chat_template),
            tokenizer_digest=files.tokenizer_digest(),
            tokenizer_settings=files.read_json("tokenizer_config.json") or files.read_settings(),
        )


class Model:
    """A served model: its tokenizer, its replicas, and the pipeline of its requests.

    Args:
        config: the model's.
        router: the router's.
        files: the model's files.
        admission: limits the number of running requests of all models.
        pace: how long streams pause after each message.
        security: for calls to the replicas.
        log: keeps the requests' records.
        announcements: workers that announced themselves to this router; None without its gRPC port.

    Attributes:
        names: the names that requests may give; the first is the model's own.
        config: the model's.
        created: seconds since 1970 when the router started to serve it.
        tokenizer: its tokenizer.
        tokenizer_settings: what its checkpoint says of the tokenizer.
        default_params: values of sampling parameters that a request leaves unset.
        default_max_tokens: the most tokens of a request that states no number and is no chat.
        chat: its chat template and parsers.
        fleet: its replicas.
        picking: chooses replicas for requests that other routers run.

    Raises:
        ConfigurationError: a target is malformed, a parser is unknown, or the tags of the
            reasoning part are bad.
    """

    def __init__(
        self,
        config: ServedModelConfig,
        router: RouterConfig,
        files: RouterFiles,
        admission: Admission,
        pace: Pace,
        security: ClusterSecurity,
        log: RequestLog,
        announcements: Announcements | None,
    ) -> None:
        self.names = config.names
        self.config = config
        self.created = int(time.time())
        self.tokenizer = files.tokenizer
        self.tokenizer_settings = files.tokenizer_settings
        self.default_params = files.default_params
        self.default_max_tokens = SamplingParams(**files.default_params).max_tokens
        self.chat = ChatModel(
            config, files.chat_template, files.tokenizer, admission.rendering.turn
        )
        index = CacheIndex(lambda work: asyncio.get_running_loop().call_soon(work))
        self.fleet = Fleet(
            config,
            index,
            router.dns_interval_s,
            security,
            files.tokenizer_digest,
            router.no_prefill_policy,
            announcements,
        )
        self._entrance = Entrance()
        self._backlog = Backlog(
            lambda: self.fleet.num_seats,
            lambda: len(self._entrance),
            full_step_s=lambda: self.fleet.full_step_s,
        )
        self._log = log
        self._default_timeout_s = router.default_timeout_s
        self._queue_timeout_s = router.queue_timeout_s
        self._admission = admission
        self._pipeline = Pipeline(
            router,
            self.chat.reasoning_marks,
            files.tokenizer,
            files.default_params,
            self.fleet,
            index,
            admission,
            self._backlog,
            pace,
            log,
        )
        self.picking = self._pipeline.picking

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.names[0]

    @property
    def vocab_size(self) -> int:
        """Token ids are below it: the replicas' number, or the tokenizer's while there are none."""
        served = self.fleet.model
        return served.vocab_size if served else self.tokenizer.vocab_size

    async def wait_for_limits(self, priority: int, timeout_s: float | None) -> RequestLimits:
        """The limits of the decode replicas; waits for one as a request does.

        Raises:
            UnavailableError: no decode replica became ready in time.
        """
        longest_s = self._longest_s(timeout_s)
        deadline = time.monotonic() + longest_s
        wait_s = min(self._queue_timeout_s, longest_s)
        return (await self.fleet.wait_for_model(priority, deadline, wait_s))[1]

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`Tokenizer.encode_async`, for a call that wants the tokens alone.

        Raises:
            ResourceExhaustedError: too many such calls wait.
        """
        async with self._admission.tokenizing.turn():
            return await self.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)

    async def encode_prompt(
        self, prompt: TextOrTokens, limits: RequestLimits, most: int | None, **options: bool
    ) -> Sequence[int]:
        """`tokenize_prompt`, for a call that wants the tokens alone; `most` is its limit."""
        async with self._admission.tokenizing.turn():
            return await tokenize_prompt(prompt, self.tokenizer, limits, most, **options)

    async def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        """`Tokenizer.decode_async`; errors are those of `encode`."""
        async with self._admission.tokenizing.turn():
            return await self.tokenizer.decode_async(token_ids, **options)

    @property
    def most_prompt_chars(self) -> int:
        """The most characters of a text that is tokenized for its tokens alone."""
        replicas = self.fleet.decode.candidates
        most_tokens = max((replica.info.max_model_len for replica in replicas), default=0)
        return max(MAX_TOKENIZE_CHARS, most_tokens * self.tokenizer.longest_token_chars)

    @asynccontextmanager
    async def outputs(
        self,
        request: GenerationRequest | ChatRequest,
        timeout_s: float | None = None,
        operation: str = "text_completion",
    ) -> AsyncIterator[AsyncIterator[CandidateOutput]]:
        """Opens the outputs of a request within its deadline.

        Args:
            request: the client's; a chat becomes a prompt.
            timeout_s: seconds until the deadline; the router's `default_timeout_s` if that is
                less, or if it is None.
            operation: text_completion or chat, for the request's record.

        Raises:
            DeadlineExceededError: the deadline passed while the context was open.
            ResourceExhaustedError: too many others are before it for it to end by its deadline.
            BatonError: one of those that `GenerationService` documents; also the iterator.
        """
        stated = request.params if isinstance(request, ChatRequest) else request.stated
        max_tokens = stated.get("max_tokens", self.default_max_tokens)
        self.check_load(timeout_s, max_tokens, request.priority)
        with self._log.activity.watching(request.request_id):
            async with self._opened(request, self._longest_s(timeout_s), operation) as outputs:
                yield outputs

    def completion_of(
        self, chat: ChatRequest, prompt: str, stated: Mapping[str, Any]
    ) -> GenerationRequest:
        """Returns the request for the completion that answers a chat.

        Args:
            chat: the chat.
            prompt: its text.
            stated: the stated sampling parameters.
        """
        return GenerationRequest(
            prompts=(prompt,),
            stated=stated,
            request_id=chat.request_id,
            priority=chat.priority,
            cache_salt=chat.cache_salt,
            add_special_tokens=chat.add_special_tokens,
            reasoning_start=self.chat.reasoning_start(chat.conversation, prompt),
        )

    def check_load(
        self, timeout_s: float | None, max_tokens: int | None = None, priority: int = 0
    ) -> None:
        """Refuses a request that would probably not end by its deadline, or not meet the call's
        objectives; cheap.

        Args:
            timeout_s: as `outputs` takes it.
            max_tokens: the most tokens that it gets; None if that is not known.
            priority: that the client wants.

        Raises:
            ResourceExhaustedError: says how long requests take, and when to try again.
        """
        tenant = tenant_of_call()
        try:
            self._backlog.check(
                tenant.priority(priority),
                self._longest_s(timeout_s),
                max_tokens,
                is_deadline_stated=timeout_s is not None,
                share=tenant.share,
                slo=slo_of_call(),
            )
        except ResourceExhaustedError as error:
            self._log.count_refusal(REFUSALS[error.reason])
            raise

    async def enter(self, timeout_s: float | None) -> None:
        """Waits until a new request may be prepared, which takes the time of the event loop.

        Args:
            timeout_s: as `outputs` takes it.

        Raises:
            ResourceExhaustedError: too many wait.
            DeadlineExceededError: the deadline passed first.
        """
        await self._entrance.turn(self._longest_s(timeout_s), self._admission.max_requests)

    def _longest_s(self, timeout_s: float | None) -> float:
        longest_s = timeout_of_call() or self._default_timeout_s
        return longest_s if timeout_s is None else min(timeout_s, longest_s)

    def _deadline_error(self, timeout_s: float) -> DeadlineExceededError:
        """The error of a request that did not end; names the flag if the time is the router's."""
        is_clients = timeout_s < self._default_timeout_s
        flag = "" if is_clients else " (--default-timeout-s)"
        return DeadlineExceededError(
            f"the request did not end within {timeout_s:.1f} s{flag}",
            reason=Reason.REQUEST_DEADLINE if is_clients else Reason.ROUTER_DEADLINE,
        )

    @asynccontextmanager
    async def _opened(
        self, request: GenerationRequest | ChatRequest, timeout_s: float, operation: str
    ) -> AsyncIterator[AsyncIterator[CandidateOutput]]:
        """Opens the outputs of a request that has passed the check of the load."""
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                if isinstance(request, ChatRequest):
                    operation = "chat"
                    prompt = await self.chat.render(request.conversation)
                    request = self.completion_of(request, prompt, request.params)
                opened = await self._pipeline.open(request, deadline, operation)
                async with aclosing(opened) as outputs:
                    yield outputs
        except TimeoutError:
            raise self._deadline_error(timeout_s) from None
        except DeadlineExceededError as error:
            if error.reason != Reason.REQUEST_DEADLINE:
                raise
            raise self._deadline_error(timeout_s) from None  # a worker may notice it first


class Models:
    """The served models, by name.

    Args:
        models: the models, whose names all differ; at least one.
    """

    def __init__(self, models: Iterable[Model]) -> None:
        self._models = tuple(models)
        self._by_name = {name: model for model in self._models for name in model.names}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def find(self, name: str) -> Model:
        """Returns the model with a name; the first one that the caller may use for an empty name.

        Raises:
            NotFoundError: names the models that the caller may use.
            PermissionDeniedError: the caller may not use the model.
        """
        usable = self.usable()
        model = self._by_name.get(name) if name else next(iter(usable), self._models[0])
        if model is None:
            names = ", ".join(repr(each) for one in usable for each in one.names)
            raise NotFoundError(
                f"model {short_repr(name)} does not exist; this router serves {names}",
                reason=Reason.MODEL_NOT_FOUND,
                field="model",
            )
        tenant_of_call().check_model(model.names)
        return model

    @property
    def only(self) -> Model | None:
        """The model that every request is for; None if there are several."""
        return self._models[0] if len(self._models) == 1 else None

    def usable(self) -> Sequence[Model]:
        """The models that the caller may use."""
        tenant = tenant_of_call()
        return [model for model in self._models if tenant.may_use(model.names)]

    @property
    def can_serve(self) -> bool:
        """Whether a request to any model could be served."""
        return any(model.fleet.can_serve for model in self._models)

    def start(self) -> None:
        """Begins to look for the models' replicas."""
        for model in self._models:
            model.fleet.start()

    async def close(self) -> None:
        """Disconnects all replicas. Idempotent."""
        await asyncio.gather(*(model.fleet.close() for model in self._models))
