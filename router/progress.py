"""`Progress`: what a request's candidates have so far, as its next replica must hear it."""

from collections import defaultdict

from baton.sampling_params import SamplingParams
from baton.v1 import decode_pb2, prefill_pb2

__all__ = ["Progress"]


class Progress:
    """The tokens of the candidates that have not ended.

    Candidates that are ranked send their tokens when all have ended. Until then
    only what prefill drew is known of them, and a request that loses its replica
    goes on from there.

    Args:
        params: the request's.

    Attributes:
        num_tokens: tokens that decode replicas have sent.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.num_tokens = 0
        self._is_ranked = params.is_ranked
        self._is_beam_search = params.beam_width is not None
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._ended: set[int] = set()
        self._prefilled: prefill_pb2.PrefillResult | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any token has been drawn."""
        return bool(self._token_ids or self._ended or self._prefilled is not None)

    def begin(self, prefilled: prefill_pb2.PrefillResult) -> None:
        """Notes what prefill drew for a generation that decode is to go on with."""
        self._prefilled = prefilled
        if not self._is_ranked:
            self._token_ids.update((i, [token]) for i, token in enumerate(prefilled.token_ids))

    def add(self, output: decode_pb2.DecodeOutput) -> None:
        """Notes what a decode replica sent; late tokens of a candidate that has ended are none."""
        index, token_ids = output.index, output.token_ids
        self.num_tokens += len(token_ids)
        if output.finish_reason:
            self.end(index)
        elif token_ids and not (self._is_ranked or index in self._ended):
            self._token_ids[index].extend(token_ids)

    def end(self, index: int) -> None:
        """A candidate needs no more tokens. Idempotent."""
        self._ended.add(index)
        self._token_ids.pop(index, None)

    def has_ended(self, index: int) -> bool:
        """Whether a candidate needs no more tokens."""
        return index in self._ended

    def write_to(self, start: decode_pb2.StartDecode) -> None:
        """Tells the replica that goes on."""
        for index, token_ids in self._token_ids.items():
            start.candidates.add(index=index, output_token_ids=token_ids)
        if self._is_ranked and self._prefilled is not None:
            self._write_prefilled(start, self._prefilled)

    def _write_prefilled(
        self, start: decode_pb2.StartDecode, prefilled: prefill_pb2.PrefillResult
    ) -> None:
        drawn = zip(prefilled.token_ids, prefilled.logprobs, strict=True)
        for index, (token_id, logprob) in enumerate(drawn):
            if self._is_beam_search:
                start.first_beams.add(token_id=token_id, logprob=logprob)
            else:
                start.candidates.add(index=index, output_token_ids=[token_id], logprob=logprob)
