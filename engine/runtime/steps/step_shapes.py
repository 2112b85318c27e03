"""The shapes of forward passes, and those that are captured as CUDA graphs. Pure.

What a forward pass launches depends on its shape alone. A step is padded to the next captured
shape: sequences that it lacks run the padding tokens, at most as many as the longest query, in
a row without a request. Three kinds of shapes are captured:

- one token per sequence, by the number of sequences: rows that decode, also beside chunks of one
  token, such as those of loaded prompts and of constrained sequences;
- up to 1 + `max_drafts` tokens per sequence, by the number of tokens: sequences with draft tokens;
- chunks of any length, by the number of tokens, up to 512: there, launching is a small part of a
  step's time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["StepShape", "captured_shapes", "decode_sizes", "smallest_fitting"]

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_MAX_DECODE_ROWS = 512
_CHUNK_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)
_DRAFT_SIZE_STEP = 128  # between the sizes above the last of `_CHUNK_SIZES`


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a forward pass.

    Attributes:
        num_tokens: tokens that it runs.
        num_seqs: sequences that they belong to.
        num_logit_rows: tokens whose logits are computed.
        max_query_len: most tokens of a sequence.
        max_context_len: most tokens of a context.
        has_logit_rows: whether the host names these tokens; otherwise they are all tokens, or the
            stage computes no logits.
    """

    num_tokens: int
    num_seqs: int
    num_logit_rows: int
    max_query_len: int
    max_context_len: int
    has_logit_rows: bool = False

    def fits(self, step: "StepShape") -> bool:
        """Whether a step can be padded to this shape."""
        if step.max_query_len > self.max_query_len or step.num_tokens > self.num_tokens:
            return False
        num_spare_seqs = self.num_seqs - step.num_seqs
        num_padding = self.num_tokens - step.num_tokens
        if num_spare_seqs < 0 or num_spare_seqs * self.max_query_len < num_padding:
            return False
        if self.has_logit_rows:
            return step.num_logit_rows <= self.num_logit_rows
        return not step.has_logit_rows


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows to capture: 1, 2, 4, then multiples of 8, and `max_rows`.

    Sizes above 512 are not captured: there, launching is a small part of a step's time.
    """
    largest = min(max_rows, _MAX_DECODE_ROWS)
    sizes = [size for size in _SMALL_SIZES if size < largest]
    sizes += range(_SIZE_STEP, largest, _SIZE_STEP)
    return (*sizes, largest)


def captured_shapes(
    *, max_rows: int, max_tokens: int, max_model_len: int, max_drafts: int, is_last: bool
) -> list[StepShape]:
    """Returns the shapes to capture, those of the cheapest steps first.

    Args:
        max_rows: maximum number of sequences that run at once.
        max_tokens: maximum number of tokens in a step.
        max_model_len: maximum number of tokens in a sequence.
        max_drafts: maximum number of draft tokens of a sequence.
        is_last: whether the stage computes logits.
    """
    decodes = [StepShape(size, size, size, 1, max_model_len) for size in decode_sizes(max_rows)]
    limit = min(max_tokens, max_model_len, _CHUNK_SIZES[-1])
    chunks = [
        _chunk_shape(size, size, max_rows, max_model_len, max_drafts, is_last=is_last)
        for size in _sizes_up_to(limit)
    ]
    if not max_drafts:
        return decodes + chunks
    longest = 1 + max_drafts
    drafts = [
        _chunk_shape(size, longest, max_rows, max_model_len, max_drafts, is_last=is_last)
        for size in _sizes_up_to(min(max_tokens, max_rows * longest))
    ]
    return decodes + drafts + chunks


def _sizes_up_to(limit: int) -> list[int]:
    """Returns numbers of tokens, ascending; the last is `limit`."""
    largest = _CHUNK_SIZES[-1]
    sizes = [size for size in _CHUNK_SIZES if size < limit]
    sizes += range(largest + _DRAFT_SIZE_STEP, limit, _DRAFT_SIZE_STEP)
    return [*sizes, limit]


def _chunk_shape(
    num_tokens: int,
    max_query_len: int,
    max_rows: int,
    max_model_len: int,
    max_drafts: int,
    *,
    is_last: bool,
) -> StepShape:
    num_logit_rows = min(num_tokens, max_rows * (1 + max_drafts))
    # Padding tokens need sequences of their own beside as many as may run.
    num_padding_seqs = -(-num_tokens // max_query_len)
    return StepShape(
        num_tokens=num_tokens,
        num_seqs=min(num_tokens, max_rows) + num_padding_seqs,
        num_logit_rows=num_logit_rows if is_last else 0,
        max_query_len=max_query_len,
        max_context_len=max_model_len,
        has_logit_rows=is_last,
    )


def smallest_fitting(shapes: Iterable[StepShape], step: StepShape) -> StepShape | None:
    """Returns the cheapest of `shapes` that a step can be padded to, if any.

    Args:
        shapes: as `captured_shapes` returns them.
        step: the sizes of the step.
    """
    return min(_fitting(shapes, step), key=_cost, default=None)


def _fitting(shapes: Iterable[StepShape], step: StepShape) -> Iterator[StepShape]:
    return (shape for shape in shapes if shape.fits(step))


def _cost(shape: StepShape) -> tuple[int, int]:
    return shape.num_tokens, shape.max_query_len
