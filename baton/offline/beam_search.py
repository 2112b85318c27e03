"""Beam search under vLLM's names. The search is the engine's (`SamplingParams.beam_width`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.common.request.results import CompletionOutput, RequestOutput
from baton.common.request.sampling_params import SamplingParams

__all__ = [
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "beam_search_output",
]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How `LLM.beam_search` searches.

    Attributes:
        beam_width: how many beams run, and how many sequences are returned.
        max_tokens: the most tokens to generate.
        ignore_eos: continue past the model's end-of-sequence token.
        temperature: has no effect: beams are ranked by the model's own probabilities.
        length_penalty: a hypothesis' summed log-probability is divided by its number of
            generated tokens to this power.
        include_stop_str_in_output: whether a sequence includes its stop token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """The parameters of the same search.

        Raises:
            InvalidArgumentError: a value is out of range; names the field.
        """
        return SamplingParams(
            beam_width=self.beam_width,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A sequence that the search found.

    Attributes:
        tokens: the prompt and the generated tokens, without the stop token.
        cum_logprob: sum of the log-probabilities of the generated tokens.
        text: the text of `tokens`, special tokens included.
        finish_reason: "stop" or "length".
        stop_reason: the stop token, if one ended it.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The sequences that a search found, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(
    result: RequestOutput, params: BeamSearchParams, decode: Callable[[Sequence[int]], str]
) -> BeamSearchOutput:
    """Returns the sequences of a search's result; `decode` returns the text of tokens."""
    prompt = result.prompt_token_ids or []
    return BeamSearchOutput([_sequence(found, prompt, params, decode) for found in result.outputs])


def _sequence(
    found: CompletionOutput,
    prompt: list[int],
    params: BeamSearchParams,
    decode: Callable[[Sequence[int]], str],
) -> BeamSearchSequence:
    num_tokens = len(found.token_ids)
    omits_stop = found.finish_reason == "stop" and not params.include_stop_str_in_output
    tokens = prompt + found.token_ids[: num_tokens - omits_stop]
    return BeamSearchSequence(
        tokens=tokens,
        # The search's score is the sum over the length to the power of `length_penalty`.
        cum_logprob=(found.score or 0.0) * num_tokens**params.length_penalty,
        text=decode(tokens),
        finish_reason=found.finish_reason,
        stop_reason=found.stop_reason,
    )
