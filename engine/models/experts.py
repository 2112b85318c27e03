"""Mixtures of experts: an MLP of which each token uses a few parts (arXiv:1701.06538).

    logits of experts -> the few highest, weighted -> gate and up -> down -> weighted sum

Ranks have some of the experts each, and a range of the width of the expert that all tokens share.
Hidden states are the same on all ranks; one sum over the ranks joins the outputs of both.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from typing_extensions import override

import kernels
from engine.models.expert_config import MAX_TOKENS_AT_ONCE, ExpertsConfig
from engine.models.expert_storage import expert_biases, expert_matrices
from engine.models.linear import Forms, FusedLinear, GatedLinear, Linear, PackedModule, cut_of
from engine.models.norms import RmsNorm
from engine.models.tensor_parts import StoredModule, TensorPart
from kernels import Activation, Cut, NormKind, RankGroup, Routing, WeightStack, WeightUse

__all__ = ["ExpertLinear", "SparseMlp"]


class ExpertLinear(PackedModule):
    """A linear layer, or a gated pair of them, of each expert.

    Args:
        experts: the experts of this rank.
        in_features: width of the input.
        parts: width of each layer's outputs, by checkpoint name; two make a gated pair.
        config: the mixture.
    """

    def __init__(
        self, experts: Cut, in_features: int, parts: Mapping[str, int], config: ExpertsConfig
    ) -> None:
        use = WeightUse.GATED_LINEAR if len(parts) == 2 else WeightUse.LINEAR
        self._rows_per_expert = sum(parts.values())
        super().__init__(experts.size * self._rows_per_expert, in_features, use)
        self.experts, self._parts = experts, dict(parts)
        self._storage, self._activation = config.storage, config.activation
        bias_shape = experts.size, self._rows_per_expert
        self.bias = nn.Parameter(torch.empty(bias_shape)) if config.has_biases else None

    @override
    def take_forms(self, forms: Forms) -> bool:
        """Takes forms if the matrices of all experts have one."""
        return len({form for _, form in forms}) == 1 and super().take_forms(forms)

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        shape = self.experts.size, self._rows_per_expert, self.weight.num_columns
        ((_, form),) = self._forms
        self.weight = kernels.make_weight_stack(*shape, dtype, device, self.weight.use, form)

    def forward(self, hidden: torch.Tensor, routing: Routing, *, gathers: bool) -> torch.Tensor:
        """Computes `[rows * top_k, width]` by slot; see `kernels.expert_linear`."""
        assert isinstance(self.weight, WeightStack)
        return kernels.expert_linear(
            hidden, self.weight, routing, self.bias, gathers=gathers, activation=self._activation
        )

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        for number in range(self.experts.size):
            expert, first, parts = self.experts.start + number, 0, {}
            for name, width in self._parts.items():
                parts[name] = self.weight.rows(number * self._rows_per_expert + first, width)
                first += width
            yield from expert_matrices(self._storage, path, self.experts, expert, parts)
            if self.bias is not None:
                widths = [*self._parts.values()]
                biases = dict(zip(parts, torch.split(self.bias[number], widths), strict=True))
                yield from expert_biases(self._storage, path, self.experts, expert, biases)


class _Experts(nn.Module):
    """The experts of a layer."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, ranks: RankGroup | None) -> None:
        super().__init__()
        self.cut = cut_of(config.num_experts, ranks)
        parts = {"gate_proj": config.width, "up_proj": config.width}
        self.gate_up_proj = ExpertLinear(self.cut, hidden_size, parts, config)
        parts = {"down_proj": hidden_size}
        self.down_proj = ExpertLinear(self.cut, config.width, parts, config)

    def forward(self, hidden: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Maps `[rows, hidden_size]` to `[rows * top_k, hidden_size]` by slot."""
        gated = self.gate_up_proj(hidden, routing, gathers=True)
        outputs: torch.Tensor = self.down_proj(gated, routing, gathers=False)
        return outputs


class _SharedExpert(nn.Module):
    """The expert that all tokens have; its result, in float32, is this rank's part of a sum."""

    def __init__(self, hidden_size: int, width: int, ranks: RankGroup | None) -> None:
        super().__init__()
        size = cut_of(width, ranks)
        self.gate_up_proj = GatedLinear(hidden_size, size, Activation.SILU, bias=False)
        self.down_proj = Linear(size, hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes `[rows, hidden_size]` float32."""
        gated = self.gate_up_proj(hidden)
        return kernels.linear(gated, self.down_proj.weight, out_dtype=torch.float32)


class _ExpertNumbers(StoredModule):
    """A number for each expert, which is not rounded.

    A bias of the scores that rank experts decides which of two almost equal scores is higher.

    Args:
        num_experts: number of experts of a layer.
    """

    parameter_dtype = torch.float32

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(num_experts))

    @override
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        yield TensorPart.whole(path, self.values)


class SparseMlp(nn.Module):
    """A mixture of experts in the place of an MLP.

    Args:
        hidden_size: width of hidden states.
        config: the mixture.
        ranks: the ranks that share the layer; None for one.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig, ranks: RankGroup | None) -> None:
        super().__init__()
        self._rule, self._num_experts, self._ranks = config.rule, config.num_experts, ranks
        self._gates_shared = config.gates_shared
        logits = {"gate": Cut.whole(config.num_experts)}
        if config.gates_shared and config.shared_width:
            logits["shared_expert_gate"] = Cut.whole(1)
        self.router = FusedLinear(hidden_size, logits, bias=config.has_biases)
        self._logits_dtype = torch.float32 if config.has_wide_logits else None
        self.router_norm, self._logit_scale = None, 1.0
        if config.router_eps is not None:
            self.router_norm = RmsNorm(hidden_size, config.router_eps, NormKind.WIDE)
            self._logit_scale = hidden_size**-0.5
        self.ranking_bias = self._new_numbers(is_used=config.has_ranking_bias)
        self.expert_scales = self._new_numbers(is_used=config.has_expert_scales)
        self.experts = _Experts(hidden_size, config, ranks)
        self.shared_expert = (
            _SharedExpert(hidden_size, config.shared_width, ranks) if config.shared_width else None
        )

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None = None,
        unnormed: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> torch.Tensor:
        """Computes `[rows, hidden_size]` and adds `residual`.

        Args:
            hidden: the experts' inputs.
            residual: of the same shape.
            unnormed: inputs of a router with a norm, of the same shape.
            norm: of the experts' inputs.
        """
        hidden = hidden if norm is None else norm(hidden)
        if len(hidden) <= MAX_TOKENS_AT_ONCE:
            return self._mix(hidden, residual, unnormed)
        starts = range(0, len(hidden), MAX_TOKENS_AT_ONCE)
        slices = [slice(start, start + MAX_TOKENS_AT_ONCE) for start in starts]
        mixed = (
            self._mix(hidden[part], _rows(residual, part), _rows(unnormed, part)) for part in slices
        )
        return torch.cat([*mixed])

    def _mix(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        unnormed: torch.Tensor | None,
    ) -> torch.Tensor:
        router, bias, scales = self.router, self.ranking_bias, self.expert_scales
        logits = kernels.linear(
            hidden if self.router_norm is None else self.router_norm(unnormed),
            router.weight,
            router.bias,
            out_dtype=self._logits_dtype,
            scale=self._logit_scale,
        )
        routing = kernels.route_experts(
            logits[:, : self._num_experts],
            self._rule,
            self.experts.cut,
            None if bias is None else bias.values,
            None if scales is None else scales.values,
        )
        outputs = self.experts(hidden, routing)
        shared = shared_gate = None
        if self.shared_expert is not None:
            shared = self.shared_expert(hidden)
            shared_gate = logits[:, self._num_experts :] if self._gates_shared else None
        if self._ranks is None:
            return kernels.combine_experts(
                outputs, routing, shared=shared, shared_gate=shared_gate, residual=residual
            )
        partial = kernels.combine_experts(
            outputs, routing, shared=shared, shared_gate=shared_gate, out_dtype=torch.float32
        )
        return kernels.reduce_ranks(partial, self._ranks, None, residual, dtype=hidden.dtype)

    def _new_numbers(self, *, is_used: bool) -> _ExpertNumbers | None:
        return _ExpertNumbers(self._num_experts) if is_used else None


def _rows(states: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if states is None else states[part]
