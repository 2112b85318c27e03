"""`OfflineEngine`: runs requests on an engine in this process, and records token times."""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType
from typing import Self

from baton.common.errors import BatonError
from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from benchmarks.request import BenchRequest, RequestRecord
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineOutput, EngineRequest

__all__ = ["OfflineEngine", "peak_memory_bytes"]


class OfflineEngine:
    """An engine that decodes greedily and ignores the end of sequence.

    Args:
        config: the engine's config.
        core: an existing engine; None to build one.

    Attributes:
        core: the engine.
        start_up_s: seconds to load the model, profile it and allocate, without the import of torch.
    """

    def __init__(self, config: EngineConfig, core: EngineCore | None = None) -> None:
        started = time.perf_counter()
        self.core = core or EngineCore.build(config)
        self.start_up_s = time.perf_counter() - started
        self._numbers = count()

    def run(
        self,
        requests: Sequence[BenchRequest],
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> list[RequestRecord]:
        """Runs all requests. Each starts at once, or when the request that it waits for has ended.

        Times of arrival are ignored.

        Returns:
            The records, in the order of the requests. Failed requests have an error.
        """
        run = _Run(self.core, requests, self._numbers, on_end)
        while run.is_unfinished:
            self.core.run_step(run.record_outputs)
            if run.is_unfinished:
                self.core.wait()
        return run.records

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.core.close()


def peak_memory_bytes() -> int:
    """Returns the most host memory that this process ever had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class _Run:
    """The requests of one call of `run`. Its clock starts at 0 when it is constructed."""

    def __init__(
        self,
        core: EngineCore,
        requests: Sequence[BenchRequest],
        numbers: "count[int]",
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        self._core, self._requests, self._on_end = core, requests, on_end
        self._indices = {f"bench-{next(numbers)}": index for index in range(len(requests))}
        self._followers: dict[int, list[str]] = defaultdict(list)
        self._num_unfinished = len(requests)
        self._started_at = time.perf_counter()
        self.records = [RequestRecord(len(r.prompt_token_ids), 0.0) for r in requests]
        for request_id, index in self._indices.items():
            before = requests[index].after
            if before is None:
                self._add(request_id)
            else:
                self._followers[before].append(request_id)

    @property
    def is_unfinished(self) -> bool:
        """Whether a request has not ended."""
        return self._num_unfinished > 0

    def record_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Records the outputs of a step."""
        now_s = self._now()
        for output in outputs:
            index = self._indices[output.request_id]
            record = self.records[index]
            record.token_times_s += [now_s] * len(output.token_ids)
            if output.is_last:
                self._end(index, output.error)

    def _add(self, request_id: str) -> None:
        index = self._indices[request_id]
        request = self._requests[index]
        engine_request = EngineRequest(
            spec=RequestSpec(
                request_id=request_id,
                prompt_token_ids=tuple(request.prompt_token_ids),
                params=SamplingParams(
                    temperature=0.0, seed=0, max_tokens=request.num_output_tokens
                ),
            )
        )
        self.records[index].sent_s = self._now()
        try:
            self._core.check(engine_request)
        except BatonError as error:
            self._end(index, error)
        else:
            self.record_outputs(self._core.add_request(engine_request))

    def _end(self, index: int, error: BatonError | None) -> None:
        record, num_asked = self.records[index], self._requests[index].num_output_tokens
        record.ended_s = self._now()
        num_tokens = len(record.token_times_s)
        if error is not None:
            record.error = f"{error.code}: {error.message}"
        elif num_tokens != num_asked:
            record.error = f"{num_tokens} tokens came, {num_asked} were asked for"
        self._num_unfinished -= 1
        self._on_end(record)
        for follower in self._followers[index]:
            self._add(follower)

    def _now(self) -> float:
        return time.perf_counter() - self._started_at
