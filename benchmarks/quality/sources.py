"""Where logits of whole texts come from: Baton in this process, llama.cpp in its own."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from baton.common.errors import ConfigurationError
from benchmarks.peers.comparison import running
from benchmarks.peers.peer_process import PeerProcess
from engine.config import EngineConfig
from engine.runtime.launch.launcher import Launcher
from engine.runtime.weights.loader import layer_groups_of
from kernels import AttentionMetadata
from kernels.paged_kv import PagedKv
from kvstore.mover.pool_objects import view_blocks

__all__ = ["BatonSource", "LogitsSource", "PeerSource"]


class LogitsSource(Protocol):
    """An engine with a model."""

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits after each token of a text, `[num_tokens, vocab]` float32."""


class BatonSource:
    """A model on Baton's kernels: whole texts go through it as one prompt each.

    Prompts and single tokens have the same bits, so that holds for decoding too.

    Args:
        config: the engine's flags; `max_model_len` is the longest text.

    Attributes:
        vocab_size: the model's vocabulary.

    Raises:
        ConfigurationError: the model has recurrent layers, whose states this does not keep.
    """

    def __init__(self, config: EngineConfig) -> None:
        launched = Launcher(config, progress=False, ranks=None).launch()
        if launched.info.states is not None:
            raise ConfigurationError(f"{config.model} has recurrent layers, which are not compared")
        self.vocab_size = launched.info.vocab_size
        self._model, self._layout = launched.model, launched.info.layout
        self._slots = layer_groups_of(launched.model.config).slots_of(stage=0, num_stages=1)
        self._num_layer_groups = launched.info.num_layer_groups
        self._views = view_blocks(launched.pools.kv, self._layout)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits after each token of a text, `[num_tokens, vocab]` float32."""
        kv = PagedKv(
            self._views.states,
            [self._metadata(group, len(token_ids)) for group in range(self._num_layer_groups)],
            self._slots,
            scales=self._views.scales,
            group_shapes=self._views.group_shapes,
        )
        positions = torch.arange(len(token_ids))
        return self._model.logits(self._model(torch.tensor(token_ids), positions, kv))

    def _metadata(self, layer_group: int, num_tokens: int) -> AttentionMetadata:
        """Returns a sequence of whole blocks in a row, behind those of the layer groups before."""
        block_size = self._layout.block_size
        num_blocks = -(-num_tokens // block_size)
        blocks = torch.arange(num_blocks, dtype=torch.int32) + layer_group * num_blocks
        return AttentionMetadata(
            block_tables=blocks[None],
            query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
            context_lens=torch.tensor([num_tokens], dtype=torch.int32),
            slot_mapping=torch.arange(num_tokens) + layer_group * num_blocks * block_size,
            max_query_len=num_tokens,
            max_context_len=num_tokens,
        )


class PeerSource:
    """A paused worker that writes logits.

    Args:
        peer: the worker.
        vocab_size: the model's vocabulary.
    """

    def __init__(self, peer: PeerProcess, vocab_size: int) -> None:
        self._peer, self._vocab_size = peer, vocab_size

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits after each token of a text, `[num_tokens, vocab]` float32."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "logits"
            with running(self._peer):
                self._peer.write_logits(token_ids, file)
            return torch.from_numpy(np.fromfile(file, np.float32)).view(-1, self._vocab_size)
