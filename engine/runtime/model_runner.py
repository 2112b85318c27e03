"""`ModelRunner`: executes scheduled batches on a model with a paged KV pool."""

from collections.abc import Iterator

import torch

import kernels
from baton.errors import ConfigurationError
from engine.batch import DrawParams, ScheduledBatch, ScheduledSequence, StepOutput
from engine.config import EngineConfig
from engine.runner import ModelInfo
from engine.runtime.batch_inputs import build_batch_inputs
from engine.runtime.kv_pool import DeviceMemory, allocate_pool, decide_num_blocks, log_pool
from engine.runtime.loader import LoadedModel, load_model
from engine.runtime.sampler import draw_tokens
from kvstore.layout import KvLayout

__all__ = ["ModelRunner"]

_WARM_UP_TOKENS = 16
_DUMMY_DRAW = DrawParams(temperature=1.0, top_k=50, top_p=0.9, seed=0)


class ModelRunner:
    """The engine's `Runner`: loads the model, sizes its pool, runs its steps.

    `dtype` "auto" is the checkpoint's on every device, so that tiers on unlike
    devices still exchange KV. Most CPUs compute prompts faster in float32 than
    in float16, which halves memory.

    Args:
        config: the flags.
        progress: whether loading shows a progress bar.

    Attributes:
        info: the model's facts.
        num_blocks: blocks in the pool.

    Raises:
        ConfigurationError: a flag or the checkpoint is bad, or the pool cannot
            hold one request.
    """

    info: ModelInfo
    num_blocks: int

    def __init__(self, config: EngineConfig, *, progress: bool = True) -> None:
        self._config = config
        self._device = _resolve_device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        used_by_others = _used_bytes(self._device)
        loaded = load_model(config.model, config.dtype, self._device, progress=progress)
        self._model = loaded.model
        self.info = _model_info(loaded, config)
        free_bytes = self.profile(used_by_others)
        layout, max_model_len = self.info.layout, self.info.max_model_len
        self.num_blocks = decide_num_blocks(config, layout, max_model_len, free_bytes)
        self._kv_pool = allocate_pool(self.num_blocks, layout, self._device)
        log_pool(self.num_blocks, layout, max_model_len)

    @property
    def kv_pool(self) -> torch.Tensor:
        """The pool, `[num_blocks, *info.layout.block_shape]`."""
        return self._kv_pool

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Runs one step: block copies, forward pass, draws."""
        if batch.block_copies:
            kernels.copy_blocks(self._kv_pool, batch.block_copies)
        drawn = iter(self._run(batch, self._kv_pool))
        token_ids = tuple(
            None if sequence.draw is None else next(drawn) for sequence in batch.sequences
        )
        return StepOutput(batch.step, token_ids)

    def profile(self, used_by_others: int) -> int | None:
        """Runs a dummy step before there is a pool.

        On a GPU it is the largest step the flags allow, to measure memory; on
        CPU a small one, to warm up.

        Args:
            used_by_others: bytes in use on the GPU before the model was loaded.

        Returns:
            Bytes left for the pool; None on CPU.
        """
        if self._device.type != "cuda":
            self._run_dummy(_WARM_UP_TOKENS)
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._run_dummy(self._config.max_num_batched_tokens)
        peak_reserved = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        memory = DeviceMemory(
            total=total,
            free=free,
            used_by_others=used_by_others,
            reserved=torch.cuda.memory_reserved(self._device),
            peak_reserved=peak_reserved,
        )
        return memory.left_for_pool(self._config.gpu_memory_utilization)

    def _run_dummy(self, num_tokens: int) -> None:
        """Runs a step of `num_tokens` tokens, all of whose KV goes to one block.

        So what lies there at the end is undefined, but finite, and never used.
        """
        lengths = _dummy_lengths(num_tokens, self._config.max_num_seqs, self.info.max_model_len)
        layout = self.info.layout
        sequences = tuple(
            ScheduledSequence(
                request_id="",
                token_ids=(0,) * length,
                start_position=0,
                block_table=(0,) * -(-length // layout.block_size),
                draw=_DUMMY_DRAW,
            )
            for length in lengths
        )
        self._run(ScheduledBatch(0, sequences), allocate_pool(1, layout, self._device))

    @torch.inference_mode()
    def _run(self, batch: ScheduledBatch, kv_pool: torch.Tensor) -> list[int | None]:
        """Forward pass and draws; one token per sequence that draws."""
        inputs = build_batch_inputs(batch, self.info.layout.block_size, self._device)
        hidden = self._model(inputs.token_ids, inputs.positions, inputs.meta, kv_pool)
        if not inputs.draws:
            return []
        logits = self._model.logits(hidden[inputs.draw_rows])  # [num_draws, vocab]
        return draw_tokens(logits, inputs.draws, inputs.draw_positions)


def _model_info(loaded: LoadedModel, config: EngineConfig) -> ModelInfo:
    max_model_len = config.max_model_len or loaded.max_model_len
    if max_model_len > loaded.max_model_len:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}; the model takes at most {loaded.max_model_len}"
        )
    return ModelInfo(
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        fingerprint=loaded.fingerprint,
        layout=KvLayout(
            num_layers=loaded.num_layers,
            num_kv_heads=loaded.num_kv_heads,
            block_size=config.block_size,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
        ),
    )


def _dummy_lengths(num_tokens: int, max_num_seqs: int, max_model_len: int) -> Iterator[int]:
    """Lengths of the most sequences, the first of them as long as can be."""
    num_seqs = min(max_num_seqs, num_tokens)
    num_spare = num_tokens - num_seqs
    for _ in range(num_seqs):
        num_extra = min(num_spare, max_model_len - 1)
        num_spare -= num_extra
        yield 1 + num_extra


def _resolve_device(name: str) -> torch.device:
    """The device a flag names; "auto" is CUDA's current one where there is one, else the CPU."""
    has_cuda = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not has_cuda):
        return torch.device("cpu")
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count() if has_cuda else 0)]
    if name in ("auto", "cuda") and has_cuda:
        return torch.device("cuda", torch.cuda.current_device())
    if name not in names:
        known = ", ".join(["auto", "cpu", *(["cuda"] if names else []), *names])
        raise ConfigurationError(f"--device is {name!r}; this machine has {known}")
    torch.cuda.set_device(name)
    return torch.device(name)


def _used_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 on CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
