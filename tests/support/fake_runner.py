"""A runner without a model, so that scheduling can be tested in milliseconds.

The "KV cache" is a table of slots that records for which layer group and which
token prefix each was written. A step reads every slot that its windows see,
before it writes and after, so a wrong, stale or foreign block is detected at once.
The states of recurrent layers are the tokens that were applied to them, so a token that
is applied twice, or never, is detected as well.
The drawn token is a function of the whole sequence and, unless the draw is greedy,
of the seed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from engine.batch import (
    INVALID_TOKEN,
    NO_LOGPROBS,
    ChunkOutput,
    ScheduledBatch,
    ScheduledChunk,
    StepOutput,
    TableUpdate,
    TokenLogprobs,
)
from engine.draw_params import DrawParams, LogitRules
from engine.runner import LayersComputed, ModelInfo, NoTurns, StepCosts
from tests.support.fake_model import (
    GREEDY,
    VOCAB_SIZE,
    expected_tokens,
    fake_config,
    fake_info,
    log_probabilities,
    next_token,
    token_logprobs,
    top_tokens,
)

__all__ = [
    "GREEDY",
    "VOCAB_SIZE",
    "FakeRunner",
    "expected_tokens",
    "fake_config",
    "fake_info",
    "log_probabilities",
    "next_token",
    "top_tokens",
]

Prefix = tuple[int, ...]
Slot = tuple[int, Prefix]  # layer group or unit, and the tokens up to the slot's own


@dataclass(slots=True)
class FakeRow:
    """The runner's state of one row; `tables[layer_group][block index]` is a block id."""

    tables: list[dict[int, int]]
    position: int = 0
    last_token: int | None = None  # None before it has drawn a token to run next
    draw: DrawParams = GREEDY
    history: Prefix = ()  # if `draw` has rules: the sequence, from chunks and draws
    wants_logprobs: bool = False
    num_logprobs: int = NO_LOGPROBS
    drafted: Prefix = ()  # the tokens that a draft model has run
    drafted_blocks: tuple[int, ...] = ()  # where it has, in the layer group that keeps all


@dataclass(slots=True)
class _Work:
    """One row's share of a step: tokens to run, from `start` on.

    A share is broken if it follows a failed step, as an overlapped step may: it runs on
    the content of its row's own blocks, its token is unused, and it must not affect
    other rows.
    """

    row_id: int
    row: FakeRow
    start: int
    token_ids: Prefix
    num_drafts: int
    is_broken: bool
    context: Prefix = field(default=())  # all tokens before `start`, as the cache has them

    @property
    def sequence(self) -> Prefix:
        return self.context + self.token_ids

    @property
    def known_end(self) -> int:
        """Position after the last token that is no draft."""
        return self.start + len(self.token_ids) - self.num_drafts


class FakeRunner:
    """Executes batches on a table of slots; raises AssertionError on any wrong read.

    `submits` says when a submitted batch runs: "now", in `submit`; "late", when
    its future's `result` is called; or in a "thread".
    """

    def __init__(
        self,
        info: ModelInfo,
        num_blocks: int,
        *,
        num_host_blocks: int = 0,
        num_slots: int = 0,
        num_host_slots: int = 0,
        max_rows: int = 1024,
        submits: str = "now",
    ) -> None:
        self.info = info
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.num_slots = num_slots
        self.num_host_slots = num_host_slots
        self.costs = StepCosts(prompt_token_s=1e-3, swapped_block_s=1e-3)
        self.turns = NoTurns()
        self.failures: list[Exception] = []
        self.batches: list[ScheduledBatch] = []
        # A fault of the next forward pass: "raise", or "not finite" logits for its first row.
        self.fault: str | None = None
        # Says whether the forward pass of a batch raises; called once per batch with tokens.
        self.breaks: Callable[[ScheduledBatch], bool] = lambda batch: False
        # Whether draft tokens are made by heads, which run no tokens before those of the chunk.
        self.reads_states = False
        self.num_raised_in_row = 0
        # kv_pool[block][offset] is the slot that was written there last.
        self.kv_pool: list[list[Slot | None]] = [self._empty_block() for _ in range(num_blocks)]
        # Behind the blocks lie the slots for states, each a list of numbered units.
        self.num_units = 0 if info.states is None else info.states.units
        self.kv_pool += [[None] * self.num_units for _ in range(num_slots)]
        self.host_pool: list[list[Slot | None] | None] = [None] * (num_host_blocks + num_host_slots)
        self.rows: dict[int, FakeRow] = {}
        self.on_layers: LayersComputed | None = None
        self._max_rows = max_rows
        self._submits = submits
        self._thread: ThreadPoolExecutor | None = None
        self._late: list[_LateFuture] = []
        self._decode_rows: tuple[int, ...] = ()
        self._broken_rows: set[int] = set()  # rows of the last batch if it raised

    def check_extra_args(self, args: Mapping[str, object]) -> None:
        """Accepts all; the logits of this runner have no processors."""

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self.batches.append(batch)
        self._check_rows(batch)
        for update in batch.table_updates:
            self._update_table(update)
        self._move_blocks(batch)
        chunks = [self._start_chunk(chunk, batch) for chunk in batch.chunks]
        decodes = [self._start_decode(row) for row in batch.decode_rows]
        self._broken_rows = {work.row_id for work in (*chunks, *decodes)}
        breaks = batch.num_tokens > 0 and self.breaks(batch)
        fault, self.fault = (self.fault, None) if batch.num_tokens else (None, self.fault)
        self._raise_if(breaks or fault == "raise")
        self._report_layers(batch, 1)
        self._run([*chunks, *decodes])
        self._broken_rows = set()
        self._report_layers(batch, self.info.layout.num_layers)
        if fault == "not finite":
            (chunks + decodes)[0].is_broken = True
        return StepOutput(
            step=batch.step,
            chunks=tuple(
                self._propose(chunk, work, self._chunk_output(chunk, work))
                for chunk, work in zip(batch.chunks, chunks, strict=True)
            ),
            decoded=tuple(self._decode(work) for work in decodes),
            decoded_logprobs=self._decoded_logprobs(decodes),
            decoded_details=self._decoded_details(decodes),
            prompt_details=self._prompt_details(batch.chunks, chunks),
        )

    def submit(self, batch: ScheduledBatch) -> "Future[StepOutput]":
        if self._submits == "thread":
            self._thread = self._thread or ThreadPoolExecutor(1, "fake-runner")
            return self._thread.submit(self.execute, batch)
        future = _LateFuture(self, batch)
        self._late.append(future)
        if self._submits == "now":
            self.run_submitted(future)
        return future

    def run_submitted(self, last: "Future[StepOutput]") -> None:
        """Runs the batches submitted up to `last` that have not run."""
        while not last.done():
            self._late.pop(0).run()

    def watch_layers(self, on_layers: LayersComputed) -> None:
        self.on_layers = on_layers

    def _report_layers(self, batch: ScheduledBatch, num_layers: int) -> None:
        if self.on_layers is not None and batch.chunks:
            self.on_layers(batch.step, num_layers)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    # -- rows

    def _check_rows(self, batch: ScheduledBatch) -> None:
        rows = [chunk.row for chunk in batch.chunks] + list(batch.decode_rows)
        self._check(len(set(rows)) == len(rows), "a row is scheduled twice")
        self._check(all(0 <= row < self._max_rows for row in rows), "there is no such row")
        self._check(all(chunk.token_ids for chunk in batch.chunks), "a chunk is empty")
        is_copy = batch.decode_rows == self._decode_rows
        is_same = batch.decode_rows is self._decode_rows
        self._check(is_same or not is_copy, "decode_rows is a copy of the last")
        self._decode_rows = batch.decode_rows

    def _row(self, row: int) -> FakeRow:
        return self.rows.setdefault(row, FakeRow([{} for _ in range(self.info.num_layer_groups)]))

    def _update_table(self, update: TableUpdate) -> None:
        end = update.first_index + len(update.block_ids)
        limit = -(-self.info.max_model_len // self.info.layout.block_size)
        self._check(0 <= update.first_index <= end <= limit, "a table is longer than the model")
        self._check(0 <= update.row < self._max_rows, "there is no such row")
        table = self._row(update.row).tables[update.layer_group]
        is_of_states = update.layer_group == len(self.info.windows)
        for index, block in enumerate(update.block_ids, update.first_index):
            exists = -1 <= block < self.num_slots if is_of_states else 0 <= block < self.num_blocks
            self._check(exists, "there is no such block")
            table[index] = block

    def _start_chunk(self, chunk: ScheduledChunk, batch: ScheduledBatch) -> _Work:
        row = self._row(chunk.row)
        is_broken = chunk.row in self._broken_rows and self._continues_sequence(chunk, batch)
        row.position = chunk.end
        row.last_token = None
        row.wants_logprobs = chunk.wants_logprobs
        row.num_logprobs = chunk.num_logprobs
        self._check(chunk.num_drafts < chunk.num_tokens, "a chunk has no known token")
        if chunk.draws_for_row:
            (row.draw,) = chunk.draws
            row.history = chunk.history + chunk.token_ids
            row.last_token = INVALID_TOKEN  # until the draw, which may not happen
        return _Work(
            chunk.row, row, chunk.start_position, chunk.token_ids, chunk.num_drafts, is_broken
        )

    def _continues_sequence(self, chunk: ScheduledChunk, batch: ScheduledBatch) -> bool:
        """Whether the row still has the sequence of the previous batch.

        A new sequence gets a table update that begins before the chunk.
        """
        start, block_size = chunk.start_position, self.info.layout.block_size
        updates_of_row = (update for update in batch.table_updates if update.row == chunk.row)
        is_new = start == 0 or any(
            update.first_index * block_size < start for update in updates_of_row
        )
        return self._row(chunk.row).position == start and not is_new

    def _start_decode(self, row_id: int) -> _Work:
        row = self._row(row_id)
        self._check(row.last_token is not None, "a row that has drawn nothing decodes")
        is_broken = row.last_token == INVALID_TOKEN
        work = _Work(row_id, row, row.position, (row.last_token,), 0, is_broken)
        row.history += work.token_ids
        row.position += 1
        row.last_token = INVALID_TOKEN
        return work

    # -- blocks

    def _empty_block(self) -> list[Slot | None]:
        return [None] * self.info.layout.block_size

    def _move_blocks(self, batch: ScheduledBatch) -> None:
        for host, block in batch.swap_ins:
            content = self.host_pool[host]
            self._check(content is not None, "a host block that holds nothing is read")
            self.kv_pool[block] = list(content)
        for block, host in batch.swap_outs:
            self.host_pool[host] = list(self.kv_pool[block])
        sources = [list(self.kv_pool[source]) for source, _ in batch.block_copies]
        for (_, target), content in zip(batch.block_copies, sources, strict=True):
            self.kv_pool[target] = content
        for pairs in (batch.swap_ins, batch.swap_outs, batch.block_copies):
            targets = {target for _, target in pairs}
            self._check(len(targets) == len(pairs), "a block is the target of two copies")

    def _run(self, works: Sequence[_Work]) -> None:
        """Reads all contexts, writes all tokens, and reads again the slots that each row sees."""
        sound = [work for work in works if not work.is_broken]
        for work in sound:
            work.context = self._context(work)
        if self.info.states is not None:
            self._apply_states(works)
        written: set[tuple[int, int]] = set()
        for work in works:
            self._write(work, written)
        for work in sound:
            self._check_seen(work, work.sequence)

    def _context(self, work: _Work) -> Prefix:
        """Returns the tokens before a row's share from the cache, and checks the slots it sees."""
        if work.start == 0:
            return ()
        layer_group = max(range(len(self.info.windows)), key=self._window)
        _, context = self._read(work.row, layer_group, work.start - 1)
        self._check(len(context) == work.start, "a foreign or stale slot is read")
        self._check_seen(work, context)
        return context

    def _check_seen(self, work: _Work, sequence: Prefix) -> None:
        """Checks all slots that the share's queries see, up to the end of `sequence`."""
        for layer_group in range(len(self.info.windows)):
            first = max(0, work.start - self._window(layer_group) + 1)
            for position in range(first, len(sequence)):
                slot = self._read(work.row, layer_group, position)
                is_right = slot == (layer_group, sequence[: position + 1])
                self._check(is_right, "a foreign or stale slot is read")

    def _apply_states(self, works: Sequence[_Work]) -> None:
        """Reads and stores states by the rule of kernels (`engine.kv_cache.state_slots`)."""
        sources = {work.row_id: self._source(work) for work in works if work.start}
        targets = {work.row_id: self._targets(work) for work in works}
        for work in works:
            others = {slot for row, slot in sources.items() if row != work.row_id}
            others |= {slot for row, ends in targets.items() if row != work.row_id for slot in ends}
            is_alone = others.isdisjoint(targets[work.row_id])
            self._check(is_alone, "a slot is written that another row uses")
            if work.start and not work.is_broken:
                state = self.kv_pool[sources[work.row_id]]
                is_right = state == self._state_of(work.context)
                self._check(is_right, "a state is not that of the tokens before")
        for work in works:
            for slot, end in targets[work.row_id].items():
                prefix = (INVALID_TOKEN,) if work.is_broken else work.sequence[:end]
                self.kv_pool[slot] = self._state_of(prefix)

    def _state_of(self, prefix: Prefix) -> list[Slot | None]:
        return [(unit, prefix) for unit in range(self.num_units)]

    def _source(self, work: _Work) -> int:
        index = (work.start - 1) // self.info.layout.block_size
        number = work.row.tables[-1].get(index, -1)
        self._check(number >= 0, "a state is read where none is kept")
        return self.num_blocks + number

    def _targets(self, work: _Work) -> dict[int, int]:
        """Returns the slots that a share stores states to, each with the position stored last."""
        size, table, end = self.info.layout.block_size, work.row.tables[-1], work.known_end
        ends = [position for position in range(work.start + 1, end) if position % size == 0]
        numbers = {position: table.get((position - 1) // size, -1) for position in (*ends, end)}
        self._check(numbers[end] >= 0, "a sequence has no current slot")
        return {self.num_blocks + n: position for position, n in numbers.items() if n >= 0}

    def _write(self, work: _Work, written: set[tuple[int, int]]) -> None:
        for layer_group in range(len(self.info.windows)):
            for position in range(work.start, work.start + len(work.token_ids)):
                block, offset = self._place(work.row, layer_group, position)
                self._check((block, offset) not in written, "two sequences write one slot")
                written.add((block, offset))
                prefix = (INVALID_TOKEN,) if work.is_broken else work.sequence[: position + 1]
                self.kv_pool[block][offset] = (layer_group, prefix)

    def _read(self, row: FakeRow, layer_group: int, position: int) -> Slot:
        block, offset = self._place(row, layer_group, position)
        slot = self.kv_pool[block][offset]
        self._check(slot is not None, "an unwritten slot is read")
        return slot

    def _place(self, row: FakeRow, layer_group: int, position: int) -> tuple[int, int]:
        self._check(position < self.info.max_model_len, "a position is beyond the model's length")
        index, offset = divmod(position, self.info.layout.block_size)
        self._check(index in row.tables[layer_group], "a block is read that is not in the table")
        return row.tables[layer_group][index], offset

    def _window(self, layer_group: int) -> int:
        window = self.info.windows[layer_group]
        return self.info.max_model_len if window is None else window

    # -- draws

    def _chunk_output(self, chunk: ScheduledChunk, work: _Work) -> ChunkOutput | None:
        if not chunk.needs_logits:
            return None
        vocab_size = self.info.vocab_size
        if work.is_broken:
            num_tokens = min(chunk.num_top, vocab_size) or len(chunk.draws)
            logprobs = (math.nan,) * num_tokens if chunk.num_top or chunk.wants_logprobs else ()
            return ChunkOutput((INVALID_TOKEN,) * num_tokens, logprobs)  # no details are read
        if chunk.num_drafts:
            return self._checked_drafts(chunk, work)
        if chunk.num_top:
            tops = top_tokens(work.sequence, chunk.num_top, vocab_size)
            return ChunkOutput(*zip(*tops, strict=True))
        known_tokens = chunk.history + chunk.token_ids
        is_right = (
            known_tokens == work.sequence if _reads_history(chunk.rules) else not chunk.history
        )
        self._check(is_right, "a chunk has the wrong history")
        allowed = None if chunk.mask is None else _tokens_in(chunk.mask, vocab_size)
        tokens = tuple(next_token(work.sequence, draw, vocab_size, allowed) for draw in chunk.draws)
        if work.row.last_token is not None and len(tokens) == 1:
            (work.row.last_token,) = tokens
        every = log_probabilities(work.sequence, vocab_size)
        details = (self._details(work, token) for token in tokens)
        return ChunkOutput(
            tokens,
            tuple(every[token] for token in tokens) if chunk.wants_logprobs else (),
            tuple(detail for detail in details if detail is not None),
        )

    def _checked_drafts(self, chunk: ScheduledChunk, work: _Work) -> ChunkOutput:
        """Draws token after token, until one differs from the draft token in its place."""
        drawn = ChunkOutput(())
        for known in chunk.without_drafts():
            so_far = replace(work, token_ids=known.token_ids)
            output = self._chunk_output(known, so_far)
            drawn = ChunkOutput(
                drawn.token_ids + output.token_ids,
                drawn.logprobs + output.logprobs,
                drawn.details + output.details,
            )
            if chunk.token_ids[known.num_tokens : known.num_tokens + 1] != output.token_ids:
                break
        return drawn

    def _propose(
        self, chunk: ScheduledChunk, work: _Work, output: ChunkOutput | None
    ) -> ChunkOutput | None:
        """Drafts tokens as a draft model, one in three wrong; checks what that has run before."""
        asked = chunk.draft_work
        if asked is None or work.is_broken or min(output.token_ids) < 0:
            return output
        num_known = chunk.num_tokens - chunk.num_drafts
        sequence = work.context + chunk.token_ids[:num_known] + output.token_ids
        end = asked.first + len(asked.token_ids)
        is_right = asked.token_ids == sequence[asked.first : end]
        is_complete = end == chunk.start_position or asked.num_proposals == 0
        is_right &= not asked.token_ids if self.reads_states else is_complete
        self._check(is_right, "a draft model gets the wrong tokens")
        num_run = len(sequence) + asked.num_proposals - 1 if asked.num_proposals else end
        blocks = self._blocks_of(work.row, num_run)
        num_full = asked.first // self.info.layout.block_size
        is_right = work.row.drafted[: asked.first] == sequence[: asked.first]
        is_right &= self.reads_states or work.row.drafted_blocks[:num_full] == blocks[:num_full]
        self._check(is_right, "a draft model has not run the tokens before")
        work.row.drafted = sequence if asked.num_proposals else sequence[:end]
        work.row.drafted_blocks = blocks
        draft_tokens: Prefix = ()
        for _ in range(asked.num_proposals):
            text = sequence + draft_tokens
            token = next_token(text, chunk.draws[0], self.info.vocab_size)
            is_wrong = (len(text) + sum(text)) % 3 == 0
            draft_tokens += ((token + is_wrong) % self.info.vocab_size,)
        return replace(output, proposals=draft_tokens)

    def _blocks_of(self, row: FakeRow, num_tokens: int) -> tuple[int, ...]:
        """Returns the blocks of a sequence's first tokens in the layer group that keeps all."""
        layer_group = max(range(len(self.info.windows)), key=self._window)
        positions = range(0, num_tokens, self.info.layout.block_size)
        return tuple(self._place(row, layer_group, position)[0] for position in positions)

    def _decode(self, work: _Work) -> int:
        if not work.is_broken:
            is_right = work.row.history == work.sequence or not _reads_history(work.row.draw.rules)
            self._check(is_right, "a row has the wrong history")
            work.row.last_token = next_token(work.sequence, work.row.draw, self.info.vocab_size)
        return work.row.last_token

    def _decoded_logprobs(self, decodes: Sequence[_Work]) -> tuple[float, ...]:
        if not any(work.row.wants_logprobs for work in decodes):
            return ()
        return tuple(self._logprob(work) for work in decodes)

    def _decoded_details(self, decodes: Sequence[_Work]) -> tuple[TokenLogprobs | None, ...]:
        if all(work.row.num_logprobs == NO_LOGPROBS for work in decodes):
            return ()
        return tuple(self._details(work, work.row.last_token) for work in decodes)

    def _details(self, work: _Work, token: int) -> TokenLogprobs | None:
        """Returns None if the request asks for none."""
        num_top = work.row.num_logprobs
        if num_top == NO_LOGPROBS:
            return None
        if token == INVALID_TOKEN:
            return TokenLogprobs(math.nan, 1)
        return token_logprobs(work.sequence, token, num_top, self.info.vocab_size)

    def _prompt_details(
        self, chunks: Sequence[ScheduledChunk], works: Sequence[_Work]
    ) -> tuple[tuple[TokenLogprobs, ...], ...]:
        if not any(chunk.prompt_targets for chunk in chunks):
            return ()
        return tuple(
            tuple(self._target_details(chunk, work))
            for chunk, work in zip(chunks, works, strict=True)
        )

    def _target_details(self, chunk: ScheduledChunk, work: _Work) -> Iterator[TokenLogprobs]:
        for index, target in enumerate(chunk.prompt_targets, 1):
            if work.is_broken:
                yield TokenLogprobs(math.nan, 1)
                continue
            before = work.sequence[: chunk.start_position + index]
            num_top = chunk.num_prompt_logprobs
            yield token_logprobs(before, target, num_top, self.info.vocab_size)

    def _logprob(self, work: _Work) -> float:
        """Returns NaN if the request needs no log-probabilities."""
        token = work.row.last_token
        if token == INVALID_TOKEN or not work.row.wants_logprobs:
            return math.nan
        return log_probabilities(work.sequence, self.info.vocab_size)[token]

    # -- faults

    def _raise_if(self, fails: bool) -> None:
        if fails:
            self.num_raised_in_row += 1
            raise RuntimeError("injected by the test")
        self.num_raised_in_row = 0

    def _check(self, holds: bool, message: str) -> None:
        """Records and raises an error if `holds` is false.

        The engine turns a runner's exception into failed requests; tests must see the cause.
        """
        if not holds:
            self.failures.append(AssertionError(message))
            raise self.failures[-1]


class _LateFuture(Future[StepOutput]):
    """A future that runs its batch and earlier ones when its result or exception is read."""

    def __init__(self, runner: FakeRunner, batch: ScheduledBatch) -> None:
        super().__init__()
        self._runner = runner
        self._batch = batch

    def run(self) -> None:
        try:
            output = self._runner.execute(self._batch)
        except BaseException as error:  # as ThreadPoolExecutor does
            self.set_exception(error)
        else:
            self.set_result(output)

    def result(self, timeout: float | None = None) -> StepOutput:
        self._runner.run_submitted(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._runner.run_submitted(self)
        return super().exception(timeout)


def _tokens_in(mask: bytes, vocab_size: int) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token for token in range(vocab_size) if bits >> token & 1]


def _reads_history(rules: LogitRules | None) -> bool:
    return rules is not None and rules.reads_history
