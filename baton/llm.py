"""`LLM`: offline generation. The engine and the router's text handling, in one process.

prompts -> token ids -> EngineCore steps -> TextStream per request -> results
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from itertools import count
from numbers import Integral
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from baton.errors import InvalidArgumentError
from baton.offline_request import OfflineRequest
from baton.results import Generation
from baton.sampling_params import SamplingParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import RequestOutput
from router.tokenizer import Tokenizer

__all__ = ["LLM"]

Prompt = str | Sequence[int]

_DEFAULT_PARAMS = SamplingParams()


class LLM:
    """A model in this process, for batches of prompts. Not thread-safe.

    Args:
        model: checkpoint folder or Hugging Face Hub name.
        engine_arguments: fields of `engine.config.EngineConfig`, which bear
            the names of the flags: `dtype`, `max_num_seqs`, `block_size` ...

    Raises:
        ConfigurationError: the checkpoint or an argument's value is bad.
        TypeError: an argument that `EngineConfig` does not have.
    """

    def __init__(self, model: str, **engine_arguments: Any) -> None:
        config = EngineConfig(model=model, role="both", **engine_arguments)
        self._tokenizer = Tokenizer.load(model)
        self._core = EngineCore.build(config)
        self._numbers = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = _DEFAULT_PARAMS,
        *,
        use_tqdm: bool = True,
    ) -> list[Generation]:
        """Completes the prompts together; the results are in their order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one per prompt.
            use_tqdm: show a progress bar on stderr.

        Raises:
            InvalidArgumentError: a prompt or a parameter that the model cannot
                take, told before anything is computed.
            ResourceExhaustedError: a request larger than the KV pool.
        """
        requests = self._make_requests(_as_list(prompts), params)
        for request in requests.values():
            self._core.check(request.engine_request)
        try:
            self._run(requests, use_tqdm)
        finally:
            self._core.abort(
                [name for name, request in requests.items() if not request.is_finished]
            )
        return [request.result() for request in requests.values()]

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
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> dict[str, OfflineRequest]:
        per_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(per_prompt) != len(prompts):
            raise InvalidArgumentError(
                f"params has {len(per_prompt)} entries for {len(prompts)} prompts"
            )
        requests = (
            self._make_request(prompt, own_params)
            for prompt, own_params in zip(prompts, per_prompt, strict=True)
        )
        return {request.engine_request.request_id: request for request in requests}

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> OfflineRequest:
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return OfflineRequest(
            f"offline-{next(self._numbers)}",
            token_ids,
            params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos_token_ids=self._core.info.eos_token_ids,
            tokenizer=self._tokenizer,
        )

    def _run(self, requests: dict[str, OfflineRequest], use_tqdm: bool) -> None:
        """Steps the engine until every request is finished."""
        for request in requests.values():
            request.arrived_at = time.monotonic()
            self._core.add_request(request.engine_request)
        num_unfinished = len(requests)
        with tqdm(total=num_unfinished, unit="prompt", disable=not use_tqdm) as progress:
            while num_unfinished:
                num_finished = self._take(self._core.step(), requests)
                progress.update(num_finished)
                num_unfinished -= num_finished
                if num_unfinished:
                    self._core.wait()

    def _take(self, outputs: Iterable[RequestOutput], requests: dict[str, OfflineRequest]) -> int:
        """Gives each output to its request; returns how many requests ended."""
        num_finished = 0
        for output in outputs:
            request = requests[output.request_id]
            request.take(output)
            if not request.is_finished:
                continue
            num_finished += 1
            # Without a finish reason, a stop text ended it, which the engine cannot see.
            if output.finish_reason is None:
                self._core.abort([output.request_id])
        return num_finished


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A single prompt becomes a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
