"""`LLM`: offline generation, with the engine and the router's text handling in one process.

prompts -> token ids -> EngineCore steps -> TextStream per request -> results
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from numbers import Integral
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from baton.errors import BatonError, InvalidArgumentError, ResourceExhaustedError
from baton.offline_request import OfflineRequest
from baton.request_spec import RequestSpec
from baton.results import Generation
from baton.sampling_params import SamplingParams, over_defaults, stated_params
from baton.wire import Params
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineRequest, RequestOutput
from router.generation_config import load_default_params
from router.reasoning import encode_marks, marks_for
from router.request import truncate_prompt
from router.served_model import RequestLimits
from router.tokenizer import Tokenizer
from router.validation import check_token_ids, fitting_params

__all__ = ["LLM"]

Prompt = str | Sequence[int]

_logger = logging.getLogger("baton")


class LLM:
    """A model in this process, for batches of prompts. Not thread-safe.

    Args:
        model: checkpoint folder, GGUF file, `demo`, `smollm2`, or Hugging Face Hub name.
        generation_config: whether `get_default_sampling_params` has the values of the
            checkpoint's generation_config.json ("auto") or only Baton's own ("none").
        reasoning_start_str: the text before the part in which the model reasons, such as
            `<think>`. Structured outputs begin after that part, and
            `SamplingParams.thinking_token_budget` limits it. None: the model has no such part.
        reasoning_end_str: the text after that part, such as `</think>`; both are set or none.
        engine_arguments: fields of `engine.config.EngineConfig`, named like
            the flags: `dtype`, `max_num_seqs`, `block_size` ...

    Raises:
        ConfigurationError: the checkpoint or an argument's value is bad.
        TypeError: an argument that `EngineConfig` does not have.
    """

    def __init__(
        self,
        model: str,
        *,
        generation_config: str = "auto",
        reasoning_start_str: str | None = None,
        reasoning_end_str: str | None = None,
        **engine_arguments: Any,
    ) -> None:
        config = EngineConfig(model=model, role="both", **engine_arguments)
        self._default_params = load_default_params(model, generation_config)
        self._tokenizer = Tokenizer.load(model)
        self._marks = encode_marks(self._tokenizer, reasoning_start_str, reasoning_end_str)
        self._core = EngineCore.build(config)
        self._limits = _limits_of(self._core)
        self._numbers = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        params: Params | Sequence[Params] = None,
        use_tqdm: bool = True,
    ) -> list[Generation]:
        """Completes the prompts together and returns the results in their order.

        A prompt that can never fit the KV pool gets one empty completion with
        finish reason "ignored", and a warning in the log.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: for all prompts, or one per prompt. `baton.wire.Params` says what
                a mapping and None state; what they leave open is taken from
                `get_default_sampling_params`.
            params: another name of `sampling_params`.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidArgumentError: the model cannot take a prompt or a parameter;
                raised before anything is computed.
            FailedPreconditionError: a request limits the reasoning part, whose marks are not
                set; raised before anything is computed.
            TypeError: a mapping has a field that `SamplingParams` does not have.
        """
        if sampling_params is not None and params is not None:
            raise InvalidArgumentError("sampling_params and params are both set; set one of them")
        chosen = params if sampling_params is None else sampling_params
        requests = self._make_requests(_as_list(prompts), chosen)
        for request in requests.values():
            self._check(request)
        try:
            self._run(requests, use_tqdm)
        finally:
            self._core.abort(
                [name for name, request in requests.items() if not request.is_finished]
            )
        return [request.result() for request in requests.values()]

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that hold if none are given: those that the checkpoint's
        generation_config.json states, and Baton's defaults for the others.
        """
        return SamplingParams(**self._default_params)

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many KV blocks were cached."""
        return self._core.reset_prefix_cache()

    def close(self) -> None:
        """Closes the KV connector, if there is one. Idempotent."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _make_requests(
        self, prompts: Sequence[Prompt], params: Params | Sequence[Params]
    ) -> dict[str, OfflineRequest]:
        if params is None or isinstance(params, SamplingParams | Mapping):
            params = [params] * len(prompts)
        per_prompt = [self._complete(each) for each in params]
        if len(per_prompt) != len(prompts):
            raise InvalidArgumentError(
                f"params has {len(per_prompt)} entries for {len(prompts)} prompts"
            )
        requests = (
            self._make_request(prompt, own_params)
            for prompt, own_params in zip(prompts, per_prompt, strict=True)
        )
        return {request.spec.request_id: request for request in requests}

    def _complete(self, params: Params) -> SamplingParams:
        """Returns the parameters, with defaults for those that a mapping or None leaves open."""
        if isinstance(params, SamplingParams):
            return params
        return over_defaults(stated_params(params or {}), self._default_params)

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> OfflineRequest:
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if params.truncate_prompt_tokens is not None:
            added_by = self._tokenizer if isinstance(prompt, str) else None
            token_ids = truncate_prompt(
                token_ids, params.truncate_prompt_tokens, self._limits, added_by
            )
        if len(token_ids) < self._limits.max_total_tokens:
            params = fitting_params(params, len(token_ids), self._limits)
        bad_words = self._tokenizer.encode_bad_words(params.bad_words)
        for bad_word in bad_words:
            check_token_ids("bad_words", bad_word, self._limits.vocab_size)
        spec = RequestSpec.with_defaults(
            f"offline-{next(self._numbers)}",
            tuple(token_ids),
            params,
            eos_token_ids=self._core.info.eos_token_ids,
            bad_words_token_ids=bad_words,
            reasoning=marks_for(params, self._marks, self._limits.vocab_size),
        )
        return OfflineRequest(spec, self._tokenizer)

    def _check(self, request: OfflineRequest) -> None:
        try:
            self._core.check(EngineRequest(spec=request.spec))
        except ResourceExhaustedError as error:
            _ignore(request, error)

    def _run(self, requests: dict[str, OfflineRequest], use_tqdm: bool) -> None:
        """Steps the engine until every request is finished."""
        unfinished = {name: r for name, r in requests.items() if not r.is_finished}
        with tqdm(total=len(requests), unit="prompt", disable=not use_tqdm) as progress:
            progress.update(len(requests) - len(unfinished))
            for request in list(unfinished.values()):
                request.arrived_at = time.monotonic()
                self._deliver(self._core.add_request(EngineRequest(spec=request.spec)), unfinished)
            while unfinished:
                num_before = len(unfinished)
                self._core.run_step(lambda outputs: self._deliver(outputs, unfinished))
                progress.update(num_before - len(unfinished))
                if unfinished:
                    self._core.wait()

    def _deliver(
        self, outputs: Iterable[RequestOutput], unfinished: dict[str, OfflineRequest]
    ) -> None:
        """Adds each output to its request; removes the requests that ended."""
        for output in outputs:
            request = unfinished.get(output.request_id)
            if request is None:
                continue  # the request ended with an earlier output of this step
            if request.add(output):
                self._core.finish_candidate(output.request_id, output.index)
            if request.is_finished:
                del unfinished[output.request_id]
                if not output.is_last:
                    self._core.abort([output.request_id])


def _limits_of(core: EngineCore) -> RequestLimits:
    """Returns the limits of an engine's requests. Its pool holds the longest one."""
    max_model_len = core.info.max_model_len
    return RequestLimits(
        vocab_size=core.info.vocab_size,
        max_model_len=max_model_len,
        max_pool_tokens=max_model_len,
        max_candidates=core.config.max_running,
    )


def _ignore(request: OfflineRequest, error: BatonError) -> None:
    _logger.warning("%s is ignored: %s", request.spec.request_id, error.message)
    request.ignore()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns the prompts as a sequence; a single prompt becomes a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
