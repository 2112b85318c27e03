"""Batches on their way from rank 0, which schedules, to the other ranks of its group.

The others get all that decides what they compute: tokens, tables and copies. Only rank 0 draws
tokens, so they get no parameters of draws. Messages are pickled: the ranks are one program.
"""

import json
import pickle
from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from baton.common.errors import ConfigurationError
from baton.common.request.sampling_params import SamplingParams
from baton.common.version import __version__
from engine.batch import ScheduledBatch, ScheduledChunk, TableUpdate
from engine.config import EngineConfig
from engine.draw_params import DrawParams
from engine.runner import ModelInfo
from engine.runtime.device import fetch
from kernels import EngineRanks

__all__ = [
    "BatchReceiver",
    "BatchSender",
    "check_same_engine",
    "check_same_pools",
    "least_of_all",
]

_SAME_FLAGS = (
    *("num_gpu_blocks_override", "kv_cache_memory_bytes", "swap_space"),
    *("enforce_eager", "speculative_config", "quantization", "quantized_compute"),
    "attention_backend",
)
_DRAW = DrawParams(SamplingParams(temperature=0.0), seed=0)


def check_same_engine(ranks: EngineRanks, config: EngineConfig, info: ModelInfo) -> None:
    """Checks that all ranks compute the same model with the same limits.

    Raises:
        ConfigurationError: this rank differs from rank 0; names in what.
    """
    limits = {
        "Baton": __version__,
        "the checkpoint": info.fingerprint.hex(),
        "the KV cache": str(info.layout),
        "the layout of states": str(info.states),
        "--max-model-len": str(info.max_model_len),
        "--max-num-seqs": str(config.max_step_seqs),
        "--max-num-batched-tokens": str(config.max_step_tokens),
        **{f"--{name.replace('_', '-')}": str(getattr(config, name)) for name in _SAME_FLAGS},
    }
    _check_same(ranks, limits)


def check_same_pools(
    ranks: EngineRanks, num_blocks: int, num_host_blocks: int, num_slots: int
) -> None:
    """Checks that all ranks have the blocks and slots that rank 0 schedules.

    Raises:
        ConfigurationError: this rank has more or fewer of them than rank 0.
    """
    counts = {
        "the number of KV blocks": num_blocks,
        "the number of host blocks": num_host_blocks,
        "the number of slots for states": num_slots,
    }
    _check_same(ranks, {name: str(count) for name, count in counts.items()})


def least_of_all(ranks: EngineRanks, number: int, device: torch.device) -> int:
    """Returns the least of the numbers of all ranks, which all call this.

    The ranks of a stage add up a tensor in which each has a place. The result goes from stage to
    stage as hidden states do, and from rank 0 to all.

    Args:
        ranks: the group.
        number: this rank's number, below 2**24, so that float32 has it exactly.
        device: the rank's.

    Raises:
        RanksLostError: another rank is lost.
    """
    group, least = ranks.group, number
    if group is not None:
        numbers = torch.zeros((1, group.size), device=device)
        numbers[0, group.rank] = number
        fetched = fetch(device, (group.all_reduce(numbers).min(),))
        if ranks.device_group is not None:  # whose sum waits for ranks that may be lost
            ranks.device_group.wait(fetched.is_done)
        least = int(fetched.tensors[0])
    if ranks.num_stages == 1:
        return least
    passed = torch.tensor([least])
    if ranks.stage > 0:
        ranks.receive_hidden(passed)
        passed.clamp_(max=least)
    if ranks.stage < ranks.num_stages - 1:
        ranks.send_hidden(passed)
    if ranks.rank == 0:
        ranks.send(str(int(passed)).encode())
        return int(passed)
    return int(ranks.receive(waits_forever=True))


def _check_same(ranks: EngineRanks, facts: Mapping[str, str]) -> None:
    if ranks.rank == 0:
        ranks.send(json.dumps(facts).encode())
        return
    for name, expected in json.loads(ranks.receive(waits_forever=True)).items():
        if facts.get(name) != expected:
            raise ConfigurationError(
                f"{name} of rank {ranks.rank} is {facts.get(name)}, of rank 0 {expected}; "
                "all ranks of an engine need the same"
            )


class BatchSender:
    """Sends rank 0's batches.

    Args:
        ranks: the group.

    Attributes:
        num_work_messages: returns how many messages of work for the connector were sent before
            (`engine.runtime.ranks.transfers`).
    """

    def __init__(self, ranks: EngineRanks) -> None:
        self._ranks = ranks
        self._decode_rows: tuple[int, ...] = ()
        self.num_work_messages: Callable[[], int] = lambda: 0

    def send(self, batch: ScheduledBatch) -> None:
        """Sends a batch; the ranks compute it as soon as they have it.

        Raises:
            RanksLostError: a rank is lost, or too late.
        """
        rows = None if batch.decode_rows is self._decode_rows else batch.decode_rows
        self._decode_rows = batch.decode_rows
        message = _packed(batch, rows), self.num_work_messages()
        self._ranks.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class BatchReceiver:
    """Receives rank 0's batches.

    Args:
        ranks: the group.
    """

    def __init__(self, ranks: EngineRanks) -> None:
        self._ranks = ranks
        self._decode_rows: tuple[int, ...] = ()

    def receive(self) -> tuple[ScheduledBatch, int]:
        """Waits for the next batch, however long that takes.

        Returns:
            The batch, and `BatchSender.num_work_messages` when it was sent.

        Raises:
            RanksLostError: a rank is lost.
        """
        # The ranks are one program, and the message comes from one of them.
        packed, num_work_messages = pickle.loads(self._ranks.receive(waits_forever=True))  # noqa: S301
        batch = _unpacked(packed, self._decode_rows)
        self._decode_rows = batch.decode_rows
        return batch, num_work_messages


def _packed(batch: ScheduledBatch, decode_rows: tuple[int, ...] | None) -> tuple[Any, ...]:
    """Returns a batch as plain values that are quickly pickled: numbers lie in arrays of bytes.

    Args:
        batch: the batch.
        decode_rows: its rows; None if they are those of the batch before.
    """
    return (
        batch.step,
        None if decode_rows is None else _bytes(decode_rows),
        [
            (
                *(chunk.row, _bytes(chunk.token_ids), chunk.start_position),
                *(len(chunk.draws), chunk.num_top, chunk.num_drafts, _bytes(chunk.prompt_targets)),
            )
            for chunk in batch.chunks
        ],
        [
            (update.row, update.layer_group, update.first_index, update.block_ids)
            for update in batch.table_updates
        ],
        _bytes(chain.from_iterable(batch.swap_ins)),
        _bytes(chain.from_iterable(batch.swap_outs)),
        _bytes(chain.from_iterable(batch.block_copies)),
    )


def _unpacked(packed: tuple[Any, ...], rows_before: tuple[int, ...]) -> ScheduledBatch:
    """Returns the batch; its chunks have as many draws as before, but without parameters.

    Args:
        packed: of `_packed`.
        rows_before: the rows of the batch before; the same object stands for the same rows, as
            runners compare by identity.
    """
    step, rows, chunks, updates, *pairs = packed
    return ScheduledBatch(
        step,
        tuple(
            ScheduledChunk(
                *(row, _numbers(tokens), start, (_DRAW,) * num_draws, num_top, num_drafts),
                prompt_targets=_numbers(targets),
            )
            for row, tokens, start, num_draws, num_top, num_drafts, targets in chunks
        ),
        rows_before if rows is None else _numbers(rows),
        tuple(TableUpdate(*update) for update in updates),
        *(tuple(zip(numbers[::2], numbers[1::2], strict=True)) for numbers in map(_numbers, pairs)),
    )


def _bytes(numbers: Iterable[int]) -> bytes:
    return array("q", numbers).tobytes()


def _numbers(data: bytes) -> tuple[int, ...]:
    return tuple(array("q", data))
