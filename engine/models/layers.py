"""Code that the model families share: their interface, norms, attention over the KV cache."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

import kernels
from baton.common.errors import ConfigurationError
from engine.models.config import ModelConfig
from engine.models.linear import Embedding, Linear, cut_of
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.models.tensor_parts import StoredModule, TensorPart, renamed_parts, stored_name
from kernels import Cut, QkNorms, RankGroup, Rotation
from kernels.paged_kv import LayerKv, LayerState, PagedKv
from kvstore.transfer_form import PoolShare

__all__ = [
    "OUTPUT_HEAD",
    "CausalModel",
    "HeadCuts",
    "KeptStates",
    "cached_attention",
    "checkpoint_tensors",
    "select_rows",
]

OUTPUT_HEAD = "lm_head.weight"
"""Name of the output head's tensor in a checkpoint of most families."""


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Memory for the hidden states of some of a step's tokens, from which heads draft tokens.

    Attributes:
        layers: numbers of the layers whose inputs are kept; the number of layers of the model
            stands for the final states.
        memory: `[len(layers), n, hidden_size]`.
        rows: `[n]` int64; indices of the tokens in the step.
        final_rows: `[n]` int64; indices of the tokens among those whose final states are computed.
    """

    layers: Sequence[int]
    memory: torch.Tensor
    rows: torch.Tensor
    final_rows: torch.Tensor

    def keep(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> None:
        """Keeps `rows` of the inputs of a layer, if they are wanted."""
        if layer in self.layers:
            kernels.take_rows(hidden, rows, self.memory[self.layers.index(layer)])


class CausalModel(nn.Module, ABC):
    """A decoder-only model, or a part of one: `model(inputs, positions, kv)`, then `logits`.

    Submodules have the names of the checkpoint, without `checkpoint_prefix`, or those that
    `ModelConfig.names` maps to the checkpoint's.

    Args:
        config: the model's shape.
        head_width: input width of the output head, and of the embedding.
        part: the part of the model that this rank computes.

    Attributes:
        checkpoint_prefix: prefix of the names in a checkpoint, which `ModelConfig.names` may
            map too.
        embedding_name: name of the word embedding.
        layers_name: name of the layers.
        config: the model's shape.
        part: the part of the model.
        lm_head: the output head; None if it shares the embedding's weights, or another stage
            has it.
    """

    checkpoint_prefix: ClassVar[str]
    embedding_name: ClassVar[str] = "embed_tokens"
    layers_name: ClassVar[str] = "layers"
    config: ModelConfig
    lm_head: Linear | None

    def __init__(self, config: ModelConfig, head_width: int, part: ModelPart = WHOLE_MODEL) -> None:
        super().__init__()
        self.config, self.part = config, part
        tokens = cut_of(config.vocab_size, part.ranks)
        has_head = part.is_last and not config.tie_word_embeddings
        self.lm_head = Linear(head_width, tokens, bias=False) if has_head else None

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        kv: PagedKv,
        kept: KeptStates | None = None,
    ) -> torch.Tensor:
        """Runs the layers over one step's tokens, and writes their KV into the pool.

        Args:
            inputs: `[num_tokens]` int64 token ids; for a later stage the `[num_tokens,
                hidden_size]` hidden states of the stage before, undefined afterwards.
            positions: `[num_tokens]` int64.
            kv: the KV that each token writes and reads, and the logit rows.
            kept: receives hidden states; only for a model with one stage.

        Returns:
            Final hidden states of the logit rows, `[num_logit_rows, hidden_size]`; of a stage
            before the last, hidden states of all tokens.
        """
        hidden = self._embed(inputs, positions) if self.part.is_first else inputs
        arguments = self._layer_inputs(inputs, hidden, positions)
        hidden = self._run_layers(hidden, arguments, kv, kept)
        hidden = self._normalize(hidden) if self.part.is_last else hidden
        if kept is not None:
            kept.keep(self.config.num_layers, hidden, kept.final_rows)
        return hidden

    @property
    def embedding_tensor(self) -> str:
        """Name of the word embedding's tensor in a checkpoint."""
        return self._stored_name(f"{self.checkpoint_prefix}{self.embedding_name}.weight")

    @property
    def head_tensor(self) -> str:
        """Name of the output head's tensor in a checkpoint that has one."""
        return self._stored_name(OUTPUT_HEAD)

    @property
    def layers_path(self) -> str:
        """Name of the layers in a checkpoint."""
        return self._stored_name(f"{self.checkpoint_prefix}{self.layers_name}")

    def is_unused(self, name: str) -> bool:
        """Whether checkpoints have a tensor of the model's layers that it does not use."""
        return False

    @property
    def word_embedding(self) -> Embedding | None:
        """The embedding of token ids; None if this part has none."""
        embedding: Embedding | None = getattr(self, self.embedding_name)
        return embedding

    def _stored_name(self, name: str) -> str:
        return stored_name(name, self.config.names)

    @abstractmethod
    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the inputs of the first layer, `[num_tokens, hidden_size]`."""

    @property
    def _numbered_layers(self) -> Iterable[tuple[str, nn.Module]]:
        """The layers of this part, each with its number in the whole model."""
        layers: nn.ModuleDict = getattr(self, self.layers_name)
        return layers.items()

    def _layer_inputs(
        self, inputs: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[Any, ...]:
        """Returns the arguments of each layer between its input and its KV.

        Args:
            inputs: of the model.
            hidden: the input of the first layer of this part.
            positions: of the tokens.
        """
        return ()

    def _run_layers(
        self,
        hidden: torch.Tensor,
        arguments: tuple[Any, ...],
        kv: PagedKv,
        kept: KeptStates | None,
    ) -> torch.Tensor:
        """Runs this part's layers; returns the output of the last one."""
        for (number, layer), layer_kv in zip(self._numbered_layers, kv.layers(), strict=True):
            if kept is not None:
                kept.keep(int(number), hidden, kept.rows)
            hidden = layer(hidden, *arguments, layer_kv)
        return hidden

    @abstractmethod
    def _normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the final norm."""

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes logits: `[rows, head_width]` to float32 `[rows, vocab_size]`.

        Only for the last stage. Ranks other than 0 return only those of their part of the
        vocabulary.

        Args:
            hidden: final hidden states.
            out: contiguous memory for the result, which the caller owns.
        """
        head = self.lm_head or self.word_embedding
        assert head is not None, "only the last stage computes logits"
        config = self.config
        logits = kernels.linear(
            hidden,
            head.weight,
            out_dtype=torch.float32,
            scale=config.logit_scale,
            cap=config.logit_cap,
            out=out if self.part.ranks is None else None,
        )
        if self.part.ranks is None:
            return logits
        gathered = kernels.gather_columns(logits, self.part.ranks, config.vocab_size)
        return gathered if out is None else out.copy_(gathered)

    def checkpoint_tensors(self) -> dict[str, list[TensorPart]]:
        """Returns the parts of each tensor of a checkpoint that this rank has, by name."""
        return checkpoint_tensors(self, self.checkpoint_prefix, self.config.names)

    def parts_by_module(self) -> Iterator[tuple[nn.Module, list[TensorPart]]]:
        """Yields each module and the parts of `checkpoint_tensors` that are its own."""
        return parts_by_module(self, self.checkpoint_prefix, self.config.names)

    def num_weights(self) -> int:
        """Returns the number of weights that this rank has."""
        parts = chain.from_iterable(self.checkpoint_tensors().values())
        return sum(math.prod(part.target.shape) for part in parts)

    def _new_embedding(self, width: int, **scaling: Any) -> Embedding | None:
        """Makes the embedding; None if this part needs it neither for tokens nor for logits.

        Args:
            width: width of a vector.
            **scaling: arguments of `Embedding`.
        """
        is_head = self.config.tie_word_embeddings
        if not (self.part.is_first or (self.part.is_last and is_head)):
            return None
        return Embedding(
            self.config.vocab_size, width, is_head=is_head, ranks=self.part.ranks, **scaling
        )

    def _new_layers(self, make_layer: Callable[[int], nn.Module]) -> nn.ModuleDict:
        """Makes this part's layers, which have their numbers in the whole model as names.

        Args:
            make_layer: makes a layer by its number.
        """
        part_layers = self.part.layers(self.config.num_layers)
        numbers = range(part_layers.start, part_layers.end)
        return nn.ModuleDict({str(number): make_layer(number) for number in numbers})


def checkpoint_tensors(
    module: nn.Module, prefix: str = "", names: Mapping[str, str] = MappingProxyType({})
) -> dict[str, list[TensorPart]]:
    """Returns the parts of a checkpoint's tensors that a module has, by name.

    Args:
        module: a model or a part of one.
        prefix: prefix of the names in the checkpoint, but for the output head's.
        names: the family's names of modules, see `ModelConfig.names`.
    """
    tensors: dict[str, list[TensorPart]] = {}
    for _, parts in parts_by_module(module, prefix, names):
        for part in parts:
            tensors.setdefault(part.name, []).append(part)
    return tensors


def parts_by_module(
    module: nn.Module, prefix: str = "", names: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[nn.Module, list[TensorPart]]]:
    """Yields each submodule and the parts that it has itself; arguments as `checkpoint_tensors`."""
    for path, submodule in module.named_modules():
        full_path = path if path == "lm_head" else prefix + path
        yield submodule, list(renamed_parts(_parts_of(submodule, full_path), names))


def _parts_of(module: nn.Module, path: str) -> Iterable[TensorPart]:
    """Returns the parts of checkpoint tensors that a module has itself, without its submodules."""
    if isinstance(module, StoredModule):
        return module.checkpoint_tensors(path)
    parameters = module.named_parameters(recurse=False)
    return (TensorPart.whole(f"{path}.{name}", parameter) for name, parameter in parameters)


@dataclass(frozen=True, slots=True)
class HeadCuts:
    """The attention heads that a rank has.

    With more ranks than KV heads, several ranks have the same one.

    Attributes:
        query: heads of queries.
        kv: heads of keys and values.
    """

    query: Cut
    kv: Cut

    @classmethod
    def of(cls, config: ModelConfig, ranks: RankGroup | None) -> "HeadCuts":
        """Returns a rank's heads.

        Raises:
            ConfigurationError: the heads cannot be divided among that many ranks.
        """
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        if ranks is None:
            return cls(Cut.whole(num_heads), Cut.whole(num_kv_heads))
        size = ranks.size
        if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
            raise ConfigurationError(
                f"--tensor-parallel-size is {size}; it must divide the model's {num_heads} "
                f"attention heads, and divide its {num_kv_heads} KV heads or be a multiple of them"
            )
        share = PoolShare.of(ranks.rank, size, num_kv_heads)
        count = num_kv_heads // share.degree
        first = share.rank * count
        return cls(ranks.cut(num_heads), Cut(num_kv_heads, first, first + count))


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: LayerKv,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    rotation: Rotation | None = None,
    norms: QkNorms | None = None,
) -> torch.Tensor:
    """Writes the step's KV, then attends over the cache with the tokens in `kv.rows`.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; its content is undefined afterwards.
        key: `[num_tokens, num_kv_heads, head_dim]`; its content is undefined afterwards. With 0
            heads, as `value` then has, the cache is that of another layer, which has written it.
        value: `[num_tokens, num_kv_heads, head_dim]`; may be `key`.
        kv: the layer's KV cache.
        scale: factor on the attention scores.
        sliding_window: number of tokens a query sees, itself included; None for all.
        soft_cap: scores s become `soft_cap * tanh(s / soft_cap)`; None for no cap.
        sinks: `[num_heads]`, of the type of `query`; scores without keys or values, which take
            part in each head's softmax; None for none.
        rotation: rotary angles for query and key; None for no rotation.
        norms: norms of query and key, applied before the rotation; None for no norms.

    Returns:
        `[num_attending, num_heads * head_dim]`.
    """
    query = kernels.rotate_and_write_kv(
        query,
        key,
        value,
        kv.cache if key.shape[1] else kv.cache[:, :, :0],
        kv.written,
        rotation=rotation,
        norms=norms,
        kv_scales=kv.scales,
    )
    query = select_rows(query, kv)
    if len(query):
        query = kernels.paged_attention(
            query,
            kv.cache,
            kv.attended,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            kv_scales=kv.scales,
        )
    return query.flatten(1)


def select_rows(states: torch.Tensor, kv: LayerKv | LayerState) -> torch.Tensor:
    """Selects the tokens in `kv.rows`, which a layer computes further once all KV is written.

    Args:
        states: `[num_tokens, ...]`.
        kv: the layer's KV cache, or its states.

    Returns:
        `[num_attending, ...]`.
    """
    if kv.rows is None:
        return states
    return kernels.take_rows(states.flatten(1), kv.rows).view(len(kv.rows), *states.shape[1:])
