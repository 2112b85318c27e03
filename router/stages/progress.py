"""`Progress`: the tokens that a request's candidates have, for the replica that continues it."""

from collections import defaultdict
from collections.abc import Sequence

from baton.common.request.answer import CandidateOutput
from baton.common.request.sampling_params import SamplingParams
from baton.v1 import decode_pb2, prefill_pb2

__all__ = ["Progress"]


class Progress:
    """The tokens of the candidates that have not ended.

    Ranked candidates send their tokens when all have ended. Until then only their
    first tokens, drawn by prefill, are known; a request that loses its replica
    continues from these.

    Args:
        params: the request's.

    Attributes:
        num_tokens: tokens that replicas have sent.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.num_tokens = 0
        self._is_ranked = params.is_ranked
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._ended: set[int] = set()
        self._ranked_start: prefill_pb2.PrefillResult | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any token has been drawn."""
        return bool(self._token_ids or self._ended or self._ranked_start)

    def add_prefilled(
        self, result: prefill_pb2.PrefillResult, outputs: Sequence[CandidateOutput]
    ) -> None:
        """Adds the first tokens, which a prefill replica sent; `outputs` has those of `result`."""
        if result.candidates or result.first_beams:
            self._ranked_start = result
        for output in outputs:
            self.add(output)

    def add(self, output: CandidateOutput) -> None:
        """Adds an output of a replica. Late tokens of a candidate that has ended are dropped."""
        index, token_ids = output.index, output.token_ids
        self.num_tokens += len(token_ids)
        if output.finish_reason:
            self.end(index)
        elif token_ids and not (self._is_ranked or index in self._ended):
            self._token_ids[index].extend(token_ids)

    def end(self, index: int) -> None:
        """Notes that a candidate needs no more tokens. Idempotent."""
        self._ended.add(index)
        self._token_ids.pop(index, None)

    def has_ended(self, index: int) -> bool:
        """Whether a candidate needs no more tokens."""
        return index in self._ended

    def write_to(self, start: decode_pb2.StartDecode) -> None:
        """Adds the candidates' tokens to the message for the replica that continues."""
        for index, token_ids in self._token_ids.items():
            start.candidates.add(index=index, output_token_ids=token_ids)
        if self._ranked_start is not None:
            start.candidates.extend(self._ranked_start.candidates)
            start.first_beams.extend(self._ranked_start.first_beams)
