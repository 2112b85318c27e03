"""A request inside the router: frozen plain data, from the wire's to the tiers'."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.sampling_params import SamplingParams

__all__ = ["GenerationRequest", "RequestLimits", "RoutedRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A client's request, checked as far as that needs no tokenizer and no replica.

    `prompt` is text or token ids, not empty; how many ids there may be is not
    known yet, so they still are the message's, not copied.
    """

    request_id: str
    prompt: str | Sequence[int]
    params: SamplingParams
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the connected decode replicas can take.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: the most prompt and generated tokens together.
        max_pool_tokens: tokens of one sequence that the largest KV pool holds.
        max_candidates: sequences that one of them runs at once.
    """

    vocab_size: int
    max_model_len: int
    max_pool_tokens: int
    max_candidates: int

    @property
    def max_total_tokens(self) -> int:
        """Prompt and generated tokens together, at most."""
        return min(self.max_model_len, self.max_pool_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A request ready for the tiers.

    Attributes:
        request_id: the client's or the router's name for it.
        worker_id: its name on the workers, never used before: what a worker
            still says of a cancelled request must not reach a later one that
            the client, or another router's client, names the same.
        namespace: digest that `block_keys` is rooted in.
        kv_form: what that is a digest of, in words.
        prompt_token_ids: the prompt, not empty.
        block_keys: keys of the prompt's full blocks.
        block_size: tokens per block that a key names.
        params: with `seed` set and `max_tokens` cut to what fits.
        stop_token_ids: the request's and, unless ignored, the model's.
        priority: larger is scheduled first.
        cache_salt: separates prefix caches.
        deadline: event loop time at which the request must have ended.
    """

    request_id: str
    worker_id: str
    namespace: bytes
    kv_form: str
    prompt_token_ids: tuple[int, ...]
    block_keys: Sequence[bytes]
    block_size: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    priority: int
    cache_salt: str
    deadline: float

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks, as keys name them, that hold the prompt, the partial one included."""
        return -(-len(self.prompt_token_ids) // self.block_size)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and generated tokens together, at most."""
        return len(self.prompt_token_ids) + self.params.max_tokens
