"""The outputs of a fake decode worker for one request's candidates, step by step."""

from typing import Any

from baton.v1 import common_pb2, decode_pb2, request_pb2


class FakeCandidates:
    """One request's candidates on a decode worker."""

    def __init__(self, worker: Any, start: decode_pb2.StartDecode) -> None:
        self._worker = worker
        self._spec = start.spec
        self._is_first = True
        self._ranked: list[request_pb2.CandidateOutput] = []
        self._owes_prompt = not (start.candidates or start.first_beams)
        self._begun = {
            candidate.index: list(candidate.output_token_ids) for candidate in start.candidates
        }
        begins = range(num_candidates(start.spec))
        if start.first_beams:
            self._begun = {index: [start.first_beams[index].token_id] for index in begins}
        self.unfinished = {
            index: len(self._begun.get(index, ()))
            for index in (self._begun if start.candidates else begins)
        }

    @property
    def num_tokens(self) -> int:
        """Returns the largest number of tokens of an unfinished candidate."""
        return max(self.unfinished.values())

    def advance(self) -> list[request_pb2.CandidateOutput]:
        """Runs one step; returns its outputs."""
        for request_id, index in self._worker.finished_candidates:
            if request_id == self._spec.request_id:
                self.unfinished.pop(index, None)
        outputs = [self._advance(index) for index in list(self.unfinished)]
        if is_ranked(self._spec):
            self._ranked += [output for output in outputs if output.finish_reason]
            outputs = [] if self.unfinished else self._best()
        if outputs:
            outputs[-1].is_last = not self.unfinished
            self._add_prompt_figures(outputs[0])
        return outputs

    def _advance(self, index: int) -> request_pb2.CandidateOutput:
        position = self.unfinished[index]
        script = self._worker.script_of(index)
        is_over = position and script[position - 1] in self._spec.stop_token_ids
        end = position if is_over else position + 1
        output = request_pb2.CandidateOutput(
            request_id=self._spec.request_id,
            index=index,
            token_ids=script[:end] if is_ranked(self._spec) else script[position:end],
            finish_reason=self._worker.finish_reason(self._spec, end, index),
        )
        add_logprobs(output, self._spec)
        self.unfinished[index] = end
        if output.finish_reason:
            del self.unfinished[index]
        return output

    def _add_prompt_figures(self, output: request_pb2.CandidateOutput) -> None:
        if self._is_first:
            self._is_first = False
            output.cached_tokens = 2 * self._worker.info.block_size
            output.timings.CopyFrom(common_pb2.Timings(queue_ms=10, prefill_ms=20, load_ms=30))
            if self._owes_prompt:
                add_prompt_logprobs(output, self._spec)

    def _best(self) -> list[request_pb2.CandidateOutput]:
        """Returns the best candidates: those with the highest indices."""
        best = sorted(self._ranked, key=lambda output: -output.index)
        best = best[: self._spec.sampling.n or 1]
        for rank, output in enumerate(best):
            output.index, output.score = rank, -0.5 - rank
        return best


def fake_logprobs(token_id: int, num_top: int) -> common_pb2.TokenLogprobs:
    """Returns what the fakes report of a token."""
    return common_pb2.TokenLogprobs(
        logprob=-token_id / 8,
        rank=token_id,
        top_token_ids=range(num_top),
        top_logprobs=[-number / 4 for number in range(num_top)],
    )


def add_logprobs(output: request_pb2.CandidateOutput, spec: request_pb2.RequestSpec) -> None:
    if spec.sampling.HasField("logprobs"):
        num_top = spec.sampling.logprobs
        output.logprobs.extend(fake_logprobs(token_id, num_top) for token_id in output.token_ids)


def add_prompt_logprobs(output: request_pb2.CandidateOutput, spec: request_pb2.RequestSpec) -> None:
    if spec.sampling.HasField("prompt_logprobs"):
        num_top = spec.sampling.prompt_logprobs
        targets = spec.prompt_token_ids[1:]
        output.prompt_logprobs.extend(fake_logprobs(token_id, num_top) for token_id in targets)


def num_candidates(spec: request_pb2.RequestSpec) -> int:
    sampling = spec.sampling
    return sampling.beam_search.beam_width or sampling.best_of or sampling.n or 1


def is_ranked(spec: request_pb2.RequestSpec) -> bool:
    has_beams = spec.sampling.HasField("beam_search")
    return has_beams or num_candidates(spec) > (spec.sampling.n or 1)


def given_tokens(start: decode_pb2.StartDecode) -> dict[int, list[int]]:
    """Returns the tokens that a start message gives for each candidate."""
    return {candidate.index: list(candidate.output_token_ids) for candidate in start.candidates}
