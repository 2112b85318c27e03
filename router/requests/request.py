"""From a client's prompt to a request of an engine (`SpecMaker`) and of the tiers.

`RoutedRequest` is the request that is ready for the tiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.common.request.generation import GenerationRequest, TextOrTokens
from baton.common.request.request_spec import (
    ReasoningMarks,
    RequestSpec,
    unique_request_id,
)
from baton.common.request.sampling_params import SamplingParams
from kvstore.block_key import BlockKeyChain
from router.fleet.fair_shares import Share
from router.fleet.served_model import RequestLimits, ServedModel
from router.observe.request_record import RequestRecord
from router.requests.input_threads import MAX_INLINE_LENGTH, call_by_length
from router.requests.reasoning import marks_for
from router.requests.tokenizer import Tokenizer
from router.requests.validation import (
    MAX_TOKENIZE_CHARS,
    check_candidates,
    check_length,
    check_logprobs,
    check_prediction,
    check_prompt_characters,
    check_prompt_length,
    check_token_ids,
    check_vocabulary,
    fitting_params,
    returnable_params,
)
from router.routing.cache_index import CacheIndex, CacheMatch, LastMatch
from router.routing.candidate import Prompt

__all__ = ["RoutedRequest", "SpecMaker", "prepare_request", "tokenize_prompt"]


@dataclass(slots=True, kw_only=True)
class RoutedRequest:
    """A request, and the facts about its prompt that replicas are chosen by.

    Attributes:
        spec: the request; its deadline is set and `max_tokens` fits the replicas.
        namespace: digest that `block_keys` start from.
        block_keys: keys of the prompt's full blocks.
        block_size: tokens per block key.
        record: the request's times, which grow with its attempts.
        share: what it takes of its tenant's share.
        last_match: the last look-up of its prompt in the index of caches.
        last_prompt: what replicas were compared for last; None once the request was sent.
        num_prompt_tokens: tokens in the prompt.
        num_prompt_blocks: blocks of `block_size` tokens that hold the prompt, the partial one
            included.
    """

    spec: RequestSpec
    namespace: bytes
    block_keys: Sequence[bytes]
    block_size: int
    record: RequestRecord = field(default_factory=RequestRecord)
    share: Share = field(default_factory=Share)
    last_match: LastMatch = field(default_factory=LastMatch)
    last_prompt: Prompt | None = None
    num_prompt_tokens: int = field(init=False)
    num_prompt_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.spec.prompt_token_ids)
        self.num_prompt_blocks = -(-self.num_prompt_tokens // self.block_size)

    def match(self, index: CacheIndex) -> CacheMatch:
        """Returns how much of the prompt the replicas cache now, or did a moment ago."""
        return index.match(self.block_keys, self.num_prompt_tokens, self.last_match)

    def num_reused_tokens(self, overlap_blocks: int) -> int:
        """Tokens of the prompt that a replica need not compute.

        Args:
            overlap_blocks: leading blocks of the prompt that the replica probably caches.
        """
        computes_all = self.spec.params.prompt_logprobs is not None
        return 0 if computes_all else overlap_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class SpecMaker:
    """Makes the specs of a model's requests; the router and the offline `LLM` use it. Its methods
    wait for nothing and may run in any thread.

    Attributes:
        tokenizer: the model's.
        limits: the engines' limits.
        eos_token_ids: the model's end-of-sequence tokens.
        marks: the tags of the model's reasoning part; None if they are not known.
        max_truncated_chars: the most characters of a text that is to be truncated, although its
            tokens may not fit.
    """

    tokenizer: Tokenizer
    limits: RequestLimits
    eos_token_ids: tuple[int, ...] = ()
    marks: ReasoningMarks | None = None
    max_truncated_chars: int = MAX_TOKENIZE_CHARS

    def encode_prompt(
        self,
        prompt: TextOrTokens,
        truncate_prompt_tokens: int | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> tuple[int, ...]:
        """The prompt's token ids. A prompt that cannot fit is refused before it is tokenized or
        copied.

        Raises:
            InvalidArgumentError: the prompt is empty or too long, has a token outside of the
                vocabulary, or a text has no UTF-8 form.
        """
        token_ids: Sequence[int]
        adds = add_special_tokens and isinstance(prompt, str)
        if isinstance(prompt, str):
            self._check_characters(prompt, truncates=truncate_prompt_tokens is not None)
            token_ids = self.tokenizer.encode(prompt, add_special_tokens)
        else:
            token_ids = prompt
        if truncate_prompt_tokens is not None:
            num_leading = self.tokenizer.num_leading_special_tokens if adds else 0
            most = self.limits.max_total_tokens - 1
            most = most if truncate_prompt_tokens < 0 else truncate_prompt_tokens
            token_ids = _truncated(token_ids, most, num_leading)
        check_prompt_length(len(token_ids), self.limits)
        copied = _copied(token_ids)
        check_token_ids("prompt token_ids", copied, self.limits.vocab_size)
        return copied

    def make_spec(
        self,
        request_id: str,
        request: GenerationRequest,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        deadline: float | None = None,
    ) -> RequestSpec:
        """Makes the spec of one prompt. Its `max_tokens` is at most what fits after the prompt.

        Args:
            request_id: unique among the engine's live requests.
            request: the request, whose prompts share the room for a prediction.
            token_ids: those of the prompt, as `encode_prompt` returns them.
            params: the parameters.
            deadline: `time.monotonic()` at which the request must have ended.

        Raises:
            InvalidArgumentError: a parameter does not fit the model.
            FailedPreconditionError: the request limits the reasoning part, which has no tags.
        """
        vocab_size = self.limits.vocab_size
        reasoning = marks_for(params, self.marks, vocab_size)
        if reasoning is not None:
            reasoning = replace(reasoning, start=request.reasoning_start)
        check_vocabulary(params, vocab_size)
        bad_words = self.tokenizer.encode_bad_words(params.bad_words)
        for bad_word in bad_words:
            check_token_ids("bad_words", bad_word, vocab_size)
        return RequestSpec.with_defaults(
            request_id,
            token_ids,
            fitting_params(params, len(token_ids), self.limits),
            eos_token_ids=self.eos_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            deadline=deadline,
            bad_words_token_ids=bad_words,
            reasoning=reasoning,
            prediction_token_ids=self._encode_prediction(params.prediction, len(request.prompts)),
        )

    def _encode_prediction(self, text: str, num_prompts: int) -> tuple[int, ...]:
        """The token ids of `SamplingParams.prediction`, of which each prompt gets a copy."""
        if not text:
            return ()
        most_chars = self.limits.max_model_len * self.tokenizer.longest_token_chars // num_prompts
        check_length("prediction", text, most_chars)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False, field="prediction")
        check_prediction(token_ids, self.limits, num_prompts)
        return tuple(token_ids)

    def _check_characters(self, text: str, *, truncates: bool) -> None:
        """Refuses texts that cannot fit. The tokens of a text that is to be truncated are known
        only when the whole text is tokenized.
        """
        longest, most_tokens = self.tokenizer.longest_token_chars, self.limits.max_total_tokens
        most_chars = most_tokens * longest
        if truncates:
            most_chars = max(most_chars, self.max_truncated_chars)
        check_prompt_characters("text", text, most_chars, longest, most_tokens)


async def tokenize_prompt(
    prompt: TextOrTokens,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    truncate_prompt_tokens: int | None = None,
    *,
    add_special_tokens: bool = True,
) -> tuple[int, ...]:
    """`SpecMaker.encode_prompt`, in a thread if it would delay other requests."""
    return await call_by_length(
        len(prompt),
        SpecMaker(tokenizer, limits).encode_prompt,
        prompt,
        truncate_prompt_tokens,
        add_special_tokens=add_special_tokens,
    )


async def prepare_request(
    request: GenerationRequest,
    prompt: TextOrTokens,
    params: SamplingParams,
    maker: SpecMaker,
    model: ServedModel,
    deadline: float,
    record: RequestRecord,
) -> RoutedRequest:
    """Tokenizes the prompt, applies the limits and computes the block keys, in a thread if it would
    delay other requests.

    Args:
        request: the client's, which `validate_request` has accepted.
        prompt: one of its prompts.
        params: its parameters.
        maker: makes its spec.
        model: the served model.
        deadline: `time.monotonic()` at which the request must have ended.
        record: the request's times, with the client's name for the request.

    Raises:
        InvalidArgumentError: the prompt or a parameter does not fit the model or one response.
        FailedPreconditionError: the request limits the reasoning part, which has no tags.
    """
    length = sum(map(len, (prompt, params.prediction, *params.bad_words)))
    return await call_by_length(
        length, _prepare, request, prompt, params, maker, model, deadline, record
    )


def _prepare(
    request: GenerationRequest,
    prompt: TextOrTokens,
    params: SamplingParams,
    maker: SpecMaker,
    model: ServedModel,
    deadline: float,
    record: RequestRecord,
) -> RoutedRequest:
    num_prompts = len(request.prompts)
    token_ids = maker.encode_prompt(
        prompt, params.truncate_prompt_tokens, add_special_tokens=request.add_special_tokens
    )
    is_stated = "max_tokens" in request.stated
    params = returnable_params(params, len(token_ids), num_prompts, is_stated=is_stated)
    request_id = unique_request_id(record.request_id)
    spec = maker.make_spec(request_id, request, token_ids, params, deadline)
    check_candidates(spec.params, maker.limits)
    check_logprobs(spec.params, len(token_ids), num_prompts)
    chain = BlockKeyChain(model.namespace, model.block_size, cache_salt=spec.cache_salt)
    return RoutedRequest(
        spec=spec,
        namespace=model.namespace,
        block_keys=tuple(chain.extend(token_ids)),
        block_size=model.block_size,
        record=record,
    )


def _copied(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Copies token ids in pieces, between which other threads run."""
    copied: list[int] = []
    for start in range(0, len(token_ids), MAX_INLINE_LENGTH):
        copied += token_ids[start : start + MAX_INLINE_LENGTH]
    return tuple(copied)


def _truncated(token_ids: Sequence[int], most: int, num_leading: int) -> Sequence[int]:
    """Returns the last tokens of a prompt, after its leading special tokens, as vLLM does.

    Args:
        token_ids: the prompt.
        most: how many tokens to keep, the leading ones included.
        num_leading: the special tokens at the start.
    """
    if len(token_ids) <= most:
        return token_ids
    num_leading = min(num_leading, most)
    return [*token_ids[:num_leading], *token_ids[len(token_ids) - most + num_leading :]]
