"""A runner without a model, so that scheduling can be tested in milliseconds.

The "KV cache" is a table of slots that remembers which token prefix was
written where. A step reads back every slot of the context through the block
table, so a wrong, stale or foreign block is seen at once. The token drawn is
a function of the whole sequence alone.
"""

from collections.abc import Sequence
from hashlib import blake2b

from engine.batch import ScheduledBatch, ScheduledSequence, StepOutput
from engine.config import EngineConfig
from engine.runner import ModelInfo
from kvstore.layout import KvLayout

VOCAB_SIZE = 2
Slot = tuple[int, ...]


def fake_info(block_size: int, max_model_len: int) -> ModelInfo:
    return ModelInfo(
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        fingerprint=b"fake",
        layout=KvLayout(1, 1, block_size, 1, "float32"),
    )


def fake_config(**overrides: object) -> EngineConfig:
    defaults: dict[str, object] = {"model": "fake", "block_size": 4, "max_num_seqs": 4}
    return EngineConfig(**(defaults | overrides))


def next_token(token_ids: Sequence[int]) -> int:
    """The token that the fake model draws after a sequence."""
    return blake2b(bytes(token_ids)).digest()[0] % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], max_tokens: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(max_tokens):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


class FakeRunner:
    """Executes batches on a table of slots; raises AssertionError on any wrong read."""

    def __init__(self, info: ModelInfo, num_blocks: int) -> None:
        self.info = info
        self.num_blocks = num_blocks
        self.failures: list[Exception] = []
        self.batches: list[ScheduledBatch] = []
        self.fault: str | None = None  # "raise" or "not finite": what the next step does
        self.num_raised_in_row = 0
        # kv_pool[block][offset]: the token prefix whose last token's KV lies there.
        self.kv_pool: list[list[Slot | None]] = [
            [None] * info.layout.block_size for _ in range(num_blocks)
        ]

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self.batches.append(batch)
        request_ids = {share.request_id for share in batch.sequences}
        self._check(len(request_ids) == len(batch.sequences), "a sequence is scheduled twice")
        self._check(all(share.num_tokens for share in batch.sequences), "a share is empty")
        fault, self.fault = self.fault, None
        if fault == "raise":
            self.num_raised_in_row += 1
            raise RuntimeError("as the test asked")
        self.num_raised_in_row = 0
        written: set[tuple[int, int]] = set()
        for share in batch.sequences:
            self._write(share, written)
        tokens = [self._draw(share) for share in batch.sequences]
        if fault == "not finite":
            tokens[0] = None
        return StepOutput(batch.step, tuple(tokens))

    def _write(self, share: ScheduledSequence, written: set[tuple[int, int]]) -> None:
        prefix = self._read(share, share.start_position)
        for index, token_id in enumerate(share.token_ids):
            slot = self._slot(share, share.start_position + index)
            self._check(slot not in written, "two sequences write one slot")
            written.add(slot)
            prefix = (*prefix, token_id)
            self.kv_pool[slot[0]][slot[1]] = prefix

    def _draw(self, share: ScheduledSequence) -> int | None:
        context = self._read(share, share.start_position + share.num_tokens)
        return next_token(context) if share.draw is not None else None

    def _read(self, share: ScheduledSequence, num_tokens: int) -> Slot:
        """The sequence's context as the cache has it, each slot checked."""
        context: Slot = ()
        for position in range(num_tokens):
            block, offset = self._slot(share, position)
            slot = self.kv_pool[block][offset]
            self._check(slot is not None, "an unwritten slot is read")
            self._check(slot[:-1] == context, "a foreign or stale slot is read")
            context = slot
        return context

    def _slot(self, share: ScheduledSequence, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.info.layout.block_size)
        return share.block_table[index], offset

    def _check(self, holds: bool, message: str) -> None:
        """Remembers what is wrong: the engine turns a runner's exception into a
        failed request, and tests must see the cause.
        """
        if not holds:
            self.failures.append(AssertionError(message))
            raise self.failures[-1]
