"""`LLM`: offline generation, with the engine and the router's text handling in one process.

prompts -> SpecMaker -> EngineCore steps -> Completion per request -> results
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Self

from tqdm import tqdm

from baton.common.errors import (
    BatonError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.common.request.prompts import ParsedPrompt, Prompt, parse_prompts, refuse_lora
from baton.common.request.results import RequestOutput
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.wire import Params
from baton.offline.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from baton.offline.chat_prompts import as_conversations
from baton.offline.engine_args import EngineArgs
from baton.offline.model import OfflineModel
from baton.offline.request import OfflineRequest
from baton.offline.tokenizer import OfflineTokenizer
from engine.request import EngineOutput, EngineRequest

__all__ = ["LLM"]

Messages = Sequence[Mapping[str, Any]]
ProgressBar = bool | Callable[..., Any]

_SAVES_S = 10.0

_logger = logging.getLogger("baton")


class LLM:
    """A model in this process, for batches of prompts. Not thread-safe.

    Args:
        model: folder, GGUF file, `demo`, `smollm2`, `gemma3-270m`, or Hugging Face Hub name.
        arguments: `baton.offline.engine_args.EngineArgs` documents them: `max_model_len`, `dtype`,
            `seed`, `chat_template` ...

    Raises:
        ConfigurationError: the checkpoint or an argument's value is bad.
        TypeError: an argument that does not exist.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        self._model = OfflineModel(EngineArgs(model, **arguments))
        self._core = self._model.core
        self._numbers = count()
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        *,
        params: Params | Sequence[Params] = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: ProgressBar = True,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Completes the prompts together and returns the results in their order.

        A prompt that can never fit the KV pool gets one empty completion with
        finish reason "ignored", and a warning in the log.

        Args:
            prompts: a text, a list of token ids, a dictionary as `baton.prompts.TextPrompt` or
                `baton.prompts.TokensPrompt`, or a list of any of them.
            sampling_params: for all prompts, or one per prompt. `baton.common.request.wire.Params`
                says what a mapping and None state; what they leave open is taken from
                `get_default_sampling_params`.
            params: another name of `sampling_params`.
            prompt_token_ids: another name of `prompts`, as in earlier versions of vLLM.
            use_tqdm: show a progress bar on stderr; or a function that makes it, like `tqdm`.
            priority: one per prompt; prompts of equal priority run in their order.
            lora_request: must be None.

        Raises:
            InvalidArgumentError: the model cannot take a prompt or a parameter;
                raised before anything is computed.
            FailedPreconditionError: a request limits the reasoning part, whose tags are not
                set; raised before anything is computed.
            TypeError: a mapping has a field that `SamplingParams` does not have.
            UnavailableError: `close` was called.
        """
        refuse_lora(lora_request)
        chosen = _either("prompts", prompts, "prompt_token_ids", prompt_token_ids)
        own = _either("sampling_params", sampling_params, "params", params)
        if chosen is None:
            raise InvalidArgumentError("prompts is missing")
        return self._complete(parse_prompts(chosen), own, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | Sequence[Params] = None,
        use_tqdm: ProgressBar = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations together and returns the results in their order.

        The texts of results are as generated: reasoning and tool calls are parts of them.

        Args:
            messages: messages as in OpenAI's chat API, or a list of such conversations.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            lora_request: must be None.
            chat_template: the path or the text of a template for these conversations. None:
                that of `LLM`.
            chat_template_content_format: has no effect: the template shows whether it reads
                content as a text or as a list of parts.
            add_generation_prompt: whether the prompt ends with the start of an answer.
            continue_final_message: whether the answer continues the text of the last message.
            tools: tools for the template, as in OpenAI's chat API.
            chat_template_kwargs: further variables of the template.

        Raises:
            InvalidArgumentError: as in `generate`, or a message is malformed, or the template
                refuses it; names the field.
            FailedPreconditionError: as in `generate`, or the model has no chat template.
            UnavailableError: as in `generate`.
        """
        refuse_lora(lora_request)
        prompts = [
            self._model.chats.render(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            for conversation in as_conversations(messages)
        ]
        return self._complete(prompts, sampling_params, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: ProgressBar = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Searches the likeliest completions of each prompt.

        Args:
            prompts: as in `generate`.
            params: of the search.
            lora_request: must be None.
            use_tqdm: as in `generate`.
            concurrency_limit: has no effect: the scheduler decides how many prompts run at once.

        Raises:
            InvalidArgumentError: as in `generate`.
            UnavailableError: as in `generate`.
        """
        refuse_lora(lora_request)
        decode = self._model.tokenizer.decode
        results = self._complete(parse_prompts(prompts), params.sampling_params(), use_tqdm)
        return [beam_search_output(result, params, decode) for result in results]

    def get_tokenizer(self) -> OfflineTokenizer:
        """Returns the tokenizer that turns prompts into tokens."""
        return self._model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that hold if none are given: those that the checkpoint's
        generation_config.json states, and Baton's defaults for the others.
        """
        return self._model.default_params()

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many KV blocks were cached."""
        return self._core.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Frees the model and closes the KV connector, if there is one. Idempotent.

        It waits for KV that is being saved, for at most ten seconds.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._core.finish_saves(_SAVES_S)
        finally:
            self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _complete(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Params | Sequence[Params],
        use_tqdm: ProgressBar,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        if self._is_closed:
            raise UnavailableError("this LLM was closed")
        requests = self._make_requests(prompts, params, priority)
        for request in requests.values():
            self._check(request)
        try:
            self._run(requests, use_tqdm)
        finally:
            self._core.scheduler.abort(
                [name for name, request in requests.items() if not request.is_finished]
            )
        return [request.result() for request in requests.values()]

    def _make_requests(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Params | Sequence[Params],
        priority: Sequence[int] | None,
    ) -> dict[str, OfflineRequest]:
        if params is None or isinstance(params, SamplingParams | Mapping):
            params = [params] * len(prompts)
        per_prompt = [self._model.complete(each) for each in params]
        priorities = [0] * len(prompts) if priority is None else priority
        for name, values in (("params", per_prompt), ("priority", priorities)):
            if len(values) != len(prompts):
                raise InvalidArgumentError(
                    f"{name} has {len(values)} entries for {len(prompts)} prompts"
                )
        requests = (
            self._model.make_request(f"offline-{next(self._numbers)}", prompt, own, priority=level)
            for prompt, own, level in zip(prompts, per_prompt, priorities, strict=True)
        )
        return {request.spec.request_id: request for request in requests}

    def _check(self, request: OfflineRequest) -> None:
        try:
            self._core.check(EngineRequest(spec=request.spec))
        except ResourceExhaustedError as error:
            _ignore(request, error)

    def _run(self, requests: dict[str, OfflineRequest], use_tqdm: ProgressBar) -> None:
        """Steps the engine until every request is finished."""
        unfinished = {name: r for name, r in requests.items() if not r.is_finished}
        bar = use_tqdm if callable(use_tqdm) else tqdm
        with bar(total=len(requests), unit="prompt", disable=not use_tqdm) as progress:
            progress.update(len(requests) - len(unfinished))
            for request in list(unfinished.values()):
                request.start()
                self._deliver(
                    self._core.scheduler.add(EngineRequest(spec=request.spec)), unfinished
                )
            while unfinished:
                num_before = len(unfinished)
                self._core.run_step(lambda outputs: self._deliver(outputs, unfinished))
                progress.update(num_before - len(unfinished))
                if unfinished:
                    self._core.wait()

    def _deliver(
        self, outputs: Iterable[EngineOutput], unfinished: dict[str, OfflineRequest]
    ) -> None:
        """Adds each output to its request; removes the requests that ended."""
        for output in outputs:
            request = unfinished.get(output.request_id)
            if request is None:
                continue  # the request ended with an earlier output of this step
            if request.add(output):
                self._core.scheduler.finish_candidate(output.request_id, output.index)
            if request.is_finished:
                del unfinished[output.request_id]
                if not output.is_last:
                    self._core.scheduler.abort([output.request_id])


def _either(name: str, value: Any, other_name: str, other: Any) -> Any:
    """Returns the one of two values that is set."""
    if value is not None and other is not None:
        raise InvalidArgumentError(f"{name} and {other_name} are both set; set one of them")
    return other if value is None else value


def _ignore(request: OfflineRequest, error: BatonError) -> None:
    _logger.warning("%s is ignored: %s", request.spec.request_id, error.message)
    request.ignore()
