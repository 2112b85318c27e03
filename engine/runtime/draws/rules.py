"""`RowRules`: stores the logit rules of rows, and applies them to the logits of a step.

A step without rules costs nothing: there is no table before the first row with rules, and no
kernel is launched for steps in which no row has any.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

import kernels
from engine.batch import ScheduledChunk
from engine.draw_params import LogitRules
from engine.runtime.device import copy_rows, to_device
from engine.runtime.draws.sampler import Scores
from kernels import RuleTable

__all__ = ["RowRules", "RuledRows"]

_PADDING = -1
_WORD_BITS = 32
_NO_PENALTIES = (1.0, 0.0, 0.0)  # a row of `RuleTable.penalties`
_MIN_WIDTH = 8  # of the table's lists, so that they seldom grow
_NO_RULES = LogitRules(num_prompt=0)


@dataclass(frozen=True, slots=True)
class RuledRows:
    """The decoding rows of a step that have logit rules.

    Attributes:
        rows: `[n]` int64; the rows.
        places: `[n]` int64; their indices among the rows that decode.
    """

    rows: torch.Tensor
    places: torch.Tensor

    @classmethod
    def among(
        cls, row_ids: np.ndarray, has_rules: np.ndarray, device: torch.device
    ) -> "RuledRows | None":
        """Returns those of `row_ids` that have rules, given by row; None if none has."""
        places = np.flatnonzero(has_rules[row_ids])
        if not len(places):
            return None
        return cls(to_device(row_ids[places], device), to_device(places, device))


class RowRules:
    """The rules of the rows and the tokens of their sequences, on the device of the logits.

    Args:
        num_rows: maximum number of sequences that run at once.
        max_len: maximum number of tokens of a sequence.
        vocab_size: number of tokens.
        device: the device of the logits.
    """

    def __init__(self, num_rows: int, max_len: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows, self._max_len = num_rows, max_len
        self._vocab_size, self._device = vocab_size, device
        self._table: RuleTable | None = None
        self._mask_of: tuple[tuple[int, ...] | None, np.ndarray] | None = None
        self._history_of: tuple[tuple[int, ...], np.ndarray] | None = None
        self._rules_of: list[LogitRules | None] = [None] * num_rows  # those in the table
        self._num_stored = [0] * num_rows  # first tokens of their sequences in the histories
        self._masked: set[int] = set()  # rows whose allowed tokens in the table are a chunk's mask

    @torch.inference_mode()
    def apply_to_chunks(self, ruled: Sequence[tuple[int, ScheduledChunk]], scores: Scores) -> None:
        """Stores the rules and masks of chunks that draw, and changes their logits in place.

        Args:
            ruled: pairs of a row of the scores and the chunk with rules or a mask that draws from
                it; one or more.
            scores: the step's scores.
        """
        for _, chunk in ruled:
            self._store(chunk)
        self._store_masks([chunk for _, chunk in ruled if chunk.mask is not None])
        positions_of_rows = [
            (chunk.row, place, chunk.token_ids[-1], chunk.start_position + chunk.num_tokens)
            for place, chunk in ruled
        ]
        columns = np.ascontiguousarray(np.array(positions_of_rows, np.int64).T)
        rows, places, tokens, positions = to_device(columns, self._device)
        self._apply(scores, RuledRows(rows, places), tokens, positions)

    @torch.inference_mode()
    def apply_to_decodes(
        self,
        ruled: RuledRows,
        scores: Scores,
        last_tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Changes the logits of decoding rows in place, and adds their last tokens to their
        sequences.

        Args:
            ruled: the rows that have rules. A chunk has stored them, unless its step failed; then
                the table holds other valid rules for the row, and its token is not used.
            scores: scores of the `n` rows that decode.
            last_tokens: `[num_rows]` int64; by row, the token that it has run.
            positions: `[n]` int64; positions of the tokens to draw.
        """
        tokens = last_tokens.index_select(0, ruled.rows)
        self._apply(scores, ruled, tokens, positions.index_select(0, ruled.places))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles the kernels, with a table of one row that is not kept.

        Decoding rows' logits may follow those of chunks, at addresses of another alignment.
        """
        table = _new_table(1, self._max_len, self._vocab_size, self._device)
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        for logits in torch.zeros(2, 1, self._vocab_size, device=self._device):
            kernels.apply_logit_rules(
                logits,
                *kernels.row_maxima(logits),
                table,
                rule_ids=zero,
                tokens=zero,
                positions=zero + 1,
                logit_rows=zero,
            )

    def _apply(
        self, scores: Scores, ruled: RuledRows, tokens: torch.Tensor, positions: torch.Tensor
    ) -> None:
        kernels.apply_logit_rules(
            scores.logits,
            scores.maxima,
            scores.likeliest,
            self._current_table(),
            rule_ids=ruled.rows,
            tokens=tokens,
            positions=positions,
            logit_rows=ruled.places,
        )

    def _store(self, chunk: ScheduledChunk) -> None:
        """Writes a chunk's rules and its sequence's tokens into the table, if they differ."""
        row, rules = chunk.row, chunk.rules or _NO_RULES
        stored = self._rules_of[row]
        is_known = stored is rules or stored == rules
        if not is_known:
            self._store_lists(row, rules)
        if stored is not rules:
            self._rules_of[row], self._num_stored[row] = rules, 0
        if chunk.mask is None and (row in self._masked or not is_known):
            allowed = self._current_table().allowed[row]
            allowed.copy_(to_device(self._mask(rules.allowed), self._device))
            self._masked.discard(row)
        if rules.reads_history:
            self._store_history(chunk)

    def _store_lists(self, row: int, rules: LogitRules) -> None:
        """Writes rules into a row of the table, all but the allowed tokens."""
        bias_ids = np.array([token for token, _ in rules.bias], np.int32)
        biases = np.array([bias for _, bias in rules.bias], np.float32)
        stop_ids = np.array(rules.stop_token_ids, np.int32)
        words = rules.bad_words
        words_shape = len(words), max(map(len, words), default=0)
        table = self._table = self._table_for(len(bias_ids), len(stop_ids), words_shape)
        penalties = rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty
        contents = (
            (table.lengths, np.array((rules.num_prompt, rules.min_length), np.int64)),
            (table.penalties, np.array(penalties, np.float32)),
            (table.bias_ids, _padded(bias_ids, table.bias_ids.shape[1])),
            (table.biases, _padded(biases, table.biases.shape[1])),
            (table.stop_ids, _padded(stop_ids, table.stop_ids.shape[1])),
            (table.bad_words, _padded_words(words, table.bad_words.shape[1:])),
        )
        for tensor, values in contents:
            tensor[row].copy_(to_device(values, self._device))

    def _store_masks(self, masked: Sequence[ScheduledChunk]) -> None:
        """Writes the masks of chunks into their rows, as far as rules allow their tokens."""
        if not masked:
            return
        rows = np.array([chunk.row for chunk in masked], np.int64)
        words = np.frombuffer(bytearray().join([chunk.mask or b"" for chunk in masked]), np.int32)
        masks = words.reshape(len(masked), -1)
        for index, chunk in enumerate(masked):
            if chunk.rules is not None and chunk.rules.allowed is not None:
                masks[index] &= self._mask(chunk.rules.allowed)
        self._masked.update(rows.tolist())
        copy_rows(self._current_table().allowed, rows, masks)

    def _store_history(self, chunk: ScheduledChunk) -> None:
        """Writes the tokens of a chunk's sequence into its row of `RuleTable.history`; only those
        of the chunk if the others are there.

        The last array is kept for the next call: a request's candidates share the prompt.
        """
        start, end = chunk.start_position, chunk.start_position + chunk.num_tokens
        row = self._current_table().history[chunk.row]
        assert len(chunk.history) == start, "a chunk whose rules read the history has it"
        if self._num_stored[chunk.row] != start:
            if self._history_of is None or self._history_of[0] is not chunk.history:
                self._history_of = chunk.history, np.array(chunk.history, np.int32)
            row[:start].copy_(to_device(self._history_of[1], self._device))
        row[start:end].copy_(to_device(np.array(chunk.token_ids, np.int32), self._device))
        self._num_stored[chunk.row] = end

    def _mask(self, allowed: tuple[int, ...] | None) -> np.ndarray:
        """Returns a row of `RuleTable.allowed`; kept for the next call, as candidates share it."""
        if self._mask_of is None or self._mask_of[0] is not allowed:
            self._mask_of = allowed, _make_mask(allowed, self._vocab_size)
        return self._mask_of[1]

    def _current_table(self) -> RuleTable:
        """Returns the table; allocates it if no chunk has stored rules yet, such as after a
        failed step.
        """
        if self._table is None:
            self._table = self._table_for(0, 0, (0, 0))
        return self._table

    def _table_for(self, num_biases: int, num_stops: int, words: tuple[int, ...]) -> RuleTable:
        """Returns the table, wide enough for a row with lists of these lengths."""
        table = self._table
        if table is None:
            table = _new_table(self._num_rows, self._max_len, self._vocab_size, self._device)
        return replace(
            table,
            bias_ids=_widened(table.bias_ids, (num_biases,)),
            biases=_widened(table.biases, (num_biases,)),
            stop_ids=_widened(table.stop_ids, (num_stops,)),
            bad_words=_widened(table.bad_words, words),
        )


def _new_table(num_rows: int, max_len: int, vocab_size: int, device: torch.device) -> RuleTable:
    """Returns a table whose lists are empty and whose penalties are off; all other entries are 0,
    which is a valid token.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

    return RuleTable(
        history=_new_history(num_rows, max_len, device),
        lengths=zeros(2, dtype=torch.int64),
        penalties=torch.tensor([_NO_PENALTIES], device=device).repeat(num_rows, 1),
        bias_ids=zeros(0),
        biases=zeros(0, dtype=torch.float32),
        stop_ids=zeros(0),
        bad_words=zeros(0, 0),
        allowed=zeros(-(-vocab_size // _WORD_BITS)),
    )


def _new_history(num_rows: int, max_len: int, device: torch.device) -> torch.Tensor:
    """Returns `[num_rows, max_len]` int32 zeros.

    On a CPU, the system provides memory only for what is written: numpy asks it for zeros, while
    torch writes them.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_rows, max_len), np.int32))
    return torch.zeros(num_rows, max_len, dtype=torch.int32, device=device)


def _widened(tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Returns `[m, *sizes]` or larger, with the tensor's contents at the end of each axis."""
    pairs = list(zip(sizes, tensor.shape[1:], strict=True))
    if all(size <= present for size, present in pairs):
        return tensor
    new = [max(present, _rounded_up(size)) for size, present in pairs]
    widened = tensor.new_full((len(tensor), *new), _PADDING)
    widened[(slice(None), *_ends(new, tensor.shape[1:]))] = tensor
    return widened


def _rounded_up(size: int) -> int:
    """Returns a power of two of at least `size`; 0 for 0."""
    return max(_MIN_WIDTH, 1 << (size - 1).bit_length()) if size else 0


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    """Returns `size` numbers: padding, then `values`."""
    padded = np.full(size, _PADDING, values.dtype)
    padded[size - len(values) :] = values
    return padded


def _padded_words(words: Sequence[tuple[int, ...]], shape: Sequence[int]) -> np.ndarray:
    """Returns an array of `shape`, int32, whose last rows end with the words."""
    padded = np.full(shape, _PADDING, np.int32)
    for row, word in enumerate(words, len(padded) - len(words)):
        padded[row, -len(word) :] = word
    return padded


def _ends(shape: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Returns the last `sizes[i]` entries of each axis i of `shape`."""
    return tuple(slice(whole - size, whole) for whole, size in zip(shape, sizes, strict=True))


def _make_mask(allowed: tuple[int, ...] | None, vocab_size: int) -> np.ndarray:
    num_words = -(-vocab_size // _WORD_BITS)
    if allowed is None:
        return np.full(num_words, _PADDING, np.int32)  # all bits are set
    bits = np.zeros(num_words * _WORD_BITS, bool)
    bits[np.array(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
