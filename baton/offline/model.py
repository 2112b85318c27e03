"""`OfflineModel`: a model that is loaded in this process; `LLM` and `AsyncLLM` use it."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from random import Random
from typing import Any

from baton.common.errors import InvalidArgumentError
from baton.common.request.default_params import over_defaults, stated_params
from baton.common.request.generation import GenerationRequest, TextOrTokens
from baton.common.request.prompts import ParsedPrompt
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.wire import Params
from baton.offline.chat_prompts import ChatPrompts
from baton.offline.engine_args import EngineArgs
from baton.offline.request import OfflineRequest
from baton.offline.tokenizer import OfflineTokenizer
from engine.loop.build import build_engine
from router.fleet.served_model import RequestLimits
from router.requests.generation_config import load_default_params
from router.requests.reasoning import encode_marks
from router.requests.request import SpecMaker
from router.requests.tokenizer import Tokenizer

__all__ = ["OfflineModel"]


class OfflineModel:
    """Reads a checkpoint, builds its engine, and makes requests for it.

    Args:
        args: those of `LLM`.

    Attributes:
        core: the engine. Its pool holds its longest request.
        chats: makes chats prompts.
        tokenizer: the tokenizer, for users.

    Raises:
        ConfigurationError: the checkpoint or an argument's value is bad.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._default_params = load_default_params(args.model, args.generation_config)
        tokenizer = Tokenizer.load(args.model)
        marks = encode_marks(tokenizer, *args.reasoning_strs)
        self.chats = ChatPrompts(args.model, args.chat_template)
        self.core = build_engine(args.config)
        info = self.core.info
        limits = RequestLimits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_pool_tokens=info.max_model_len,
            max_candidates=self.core.config.max_running,
        )
        self._specs = SpecMaker(tokenizer, limits, info.eos_token_ids, marks, sys.maxsize)
        self._seeds = None if args.seed is None else Random(args.seed)
        self.tokenizer = OfflineTokenizer(args.model, tokenizer, self.chats, info.eos_token_ids)

    def default_params(self) -> SamplingParams:
        """The parameters that hold if none are given."""
        return SamplingParams(**self._default_params)

    def complete(self, params: Params) -> SamplingParams:
        """Returns the parameters, with defaults for those that a mapping or None leaves open."""
        if isinstance(params, SamplingParams):
            return params
        return over_defaults(stated_params(params or {}), self._default_params)

    def make_request(
        self,
        request_id: str,
        prompt: ParsedPrompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> OfflineRequest:
        """Makes a request; any thread may call it.

        Args:
            request_id: unique among the engine's live requests.
            prompt: the prompt.
            params: how to complete it.
            priority: lower is scheduled first.
            deadline: `time.monotonic()` at which it must have ended.

        Raises:
            InvalidArgumentError: the prompt or a parameter does not fit the model.
            FailedPreconditionError: the request limits the reasoning part, whose tags are not
                set.
        """
        ids_or_text: TextOrTokens = prompt.text or ""
        if prompt.token_ids is not None:
            ids_or_text = _integers(prompt.token_ids)
        if params.seed is None and self._seeds is not None:
            params = replace(params, seed=self._seeds.getrandbits(64))
        request = GenerationRequest(
            prompts=[ids_or_text],
            request_id=request_id,
            priority=priority,
            cache_salt=prompt.cache_salt,
        )
        token_ids = self._specs.encode_prompt(
            ids_or_text,
            params.truncate_prompt_tokens,
            add_special_tokens=prompt.add_special_tokens,
        )
        spec = self._specs.make_spec(request_id, request, token_ids, params, deadline)
        return OfflineRequest(spec, self._specs.tokenizer, prompt.text)


def _integers(token_ids: Sequence[Any]) -> list[int]:
    """Returns token ids, numpy's as Python's.

    Raises:
        InvalidArgumentError: one is not an integer, or negative.
    """
    try:
        ids = list(map(index, token_ids))
    except TypeError:
        raise InvalidArgumentError("prompt token_ids must be integers") from None
    smallest = min(ids, default=0)
    if smallest < 0:
        raise InvalidArgumentError.for_field("prompt token_ids", smallest, "at least 0")
    return ids
