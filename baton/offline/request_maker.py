"""`RequestMaker`: from a prompt and parameters to a request; `LLM` and `AsyncLLM` use it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from random import Random
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.prompts import ParsedPrompt
from baton.common.request.request_spec import ReasoningMarks, RequestSpec
from baton.common.request.sampling_params import SamplingParams, over_defaults, stated_params
from baton.common.request.wire import Params
from baton.offline.engine_args import EngineArgs
from baton.offline.request import OfflineRequest
from engine.runner import ModelInfo
from router.fleet.served_model import RequestLimits
from router.requests.generation_config import load_default_params
from router.requests.reasoning import encode_marks, marks_for
from router.requests.request import truncate_prompt
from router.requests.tokenizer import Tokenizer
from router.requests.validation import check_prediction, check_token_ids, fitting_params

__all__ = ["OfflineFiles", "RequestMaker"]


@dataclass(frozen=True, slots=True)
class OfflineFiles:
    """The parts of a checkpoint that are read besides the model.

    Attributes:
        tokenizer: the tokenizer.
        default_params: the fields of `SamplingParams` that the checkpoint states.
        marks: the tags of the reasoning part; None: there is none.
    """

    tokenizer: Tokenizer
    default_params: Mapping[str, Any]
    marks: ReasoningMarks | None

    @classmethod
    def load(cls, args: EngineArgs) -> "OfflineFiles":
        """Reads the files.

        Raises:
            ConfigurationError: a file or an argument is bad.
        """
        default_params = load_default_params(args.model, args.generation_config)
        tokenizer = Tokenizer.load(args.model)
        return cls(tokenizer, default_params, encode_marks(tokenizer, *args.reasoning_strs))


class RequestMaker:
    """Makes requests of one model, with its tokenizer, defaults and limits.

    Args:
        files: of the checkpoint.
        info: the loaded model's facts. The engine's pool holds its longest request.
        max_candidates: sequences that the engine runs at once.
        seed: makes the seeds of requests without one repeatable; None: they are random.
    """

    def __init__(
        self, files: OfflineFiles, info: ModelInfo, max_candidates: int, seed: int | None
    ) -> None:
        self._tokenizer = files.tokenizer
        self._default_params = files.default_params
        self._marks = files.marks
        self._seeds = None if seed is None else Random(seed)
        self._eos_token_ids = info.eos_token_ids
        self._limits = RequestLimits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_pool_tokens=info.max_model_len,
            max_candidates=max_candidates,
        )

    def default_params(self) -> SamplingParams:
        """The parameters that hold if none are given."""
        return SamplingParams(**self._default_params)

    def complete(self, params: Params) -> SamplingParams:
        """Returns the parameters, with defaults for those that a mapping or None leaves open."""
        if isinstance(params, SamplingParams):
            return params
        return over_defaults(stated_params(params or {}), self._default_params)

    def make(
        self, request_id: str, prompt: ParsedPrompt, params: SamplingParams, **fields: Any
    ) -> OfflineRequest:
        """Makes a request.

        Args:
            request_id: unique among the engine's live requests.
            prompt: the prompt.
            params: how to complete it.
            fields: further fields of `RequestSpec`.

        Raises:
            InvalidArgumentError: the tokenizer cannot read a text.
            FailedPreconditionError: the request limits the reasoning part, whose tags are not
                set.
        """
        token_ids = self._token_ids(prompt, params)
        if len(token_ids) < self._limits.max_total_tokens:
            params = fitting_params(params, len(token_ids), self._limits)
        if params.seed is None and self._seeds is not None:
            params = replace(params, seed=self._seeds.getrandbits(64))
        bad_words = self._tokenizer.encode_bad_words(params.bad_words)
        for bad_word in bad_words:
            check_token_ids("bad_words", bad_word, self._limits.vocab_size)
        spec = RequestSpec.with_defaults(
            request_id,
            token_ids,
            params,
            eos_token_ids=self._eos_token_ids,
            cache_salt=prompt.cache_salt,
            bad_words_token_ids=bad_words,
            reasoning=marks_for(params, self._marks, self._limits.vocab_size),
            prediction_token_ids=self._prediction_ids(params.prediction),
            **fields,
        )
        return OfflineRequest(spec, self._tokenizer, prompt.text)

    def _prediction_ids(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        token_ids = self._tokenizer.encode(text, False, "prediction")
        check_prediction(token_ids, self._limits)
        return tuple(token_ids)

    def _token_ids(self, prompt: ParsedPrompt, params: SamplingParams) -> tuple[int, ...]:
        token_ids: Sequence[int]
        added_by = None
        if prompt.token_ids is not None:
            token_ids = _integers(prompt.token_ids, self._limits.vocab_size)
        else:
            token_ids = self._tokenizer.encode(prompt.text or "", prompt.add_special_tokens)
            added_by = self._tokenizer if prompt.add_special_tokens else None
        if params.truncate_prompt_tokens is not None:
            token_ids = truncate_prompt(
                token_ids, params.truncate_prompt_tokens, self._limits, added_by
            )
        return tuple(token_ids)


def _integers(token_ids: Sequence[Any], vocab_size: int) -> list[int]:
    """Returns token ids, numpy's as Python's.

    Raises:
        InvalidArgumentError: one is not an integer or out of the vocabulary.
    """
    limit = f"integers in [0, {vocab_size}), the model's vocabulary"
    try:
        ids = list(map(index, token_ids))
    except TypeError:
        raise InvalidArgumentError(f"prompt token_ids must be {limit}") from None
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError.for_field("prompt token_ids", token_id, limit)
    return ids
