"""`ExpertsConfig`: the mixtures of experts that a checkpoint's config.json describes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.models.config_fields import ConfigFieldError, ConfigFields
from engine.models.expert_storage import ExpertStorage
from kernels import Activation, RoutingRule

__all__ = [
    "MAX_TOKENS_AT_ONCE",
    "ExpertsConfig",
    "experts_config",
    "grouped_experts_config",
    "softmax_rule",
]

_MAX_EXPERTS = 4096  # modules have parts for each, before the weights' shapes are compared
_OPERAND_BYTES = 4  # of an element of a layer's input, in the order of the native kernels
MAX_TOKENS_AT_ONCE = 2048
"""Tokens that a mixture computes at a time, which bounds the memory for their experts' states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixtures of experts of a model, which all have one shape.

    Attributes:
        num_experts: number of experts of a layer.
        width: width of an expert between its projections.
        rule: how tokens choose experts.
        is_sparse: per layer, whether it has experts; other layers have an MLP.
        shared_width: width of the expert that all tokens have beside those they choose; 0 for none.
        gates_shared: whether that expert's outputs are multiplied by a sigmoid of a gate.
        activation: of the experts' gates.
        router_eps: epsilon of the router's norm, whose results are divided by the root of their
            width; None if the router reads what the experts read.
        has_expert_scales: whether the weights of each expert have a factor.
        has_wide_logits: whether the router's outputs are float32, not of the type of its inputs.
        has_ranking_bias: whether a bias is added to the scores that rank experts.
        has_biases: whether the router and the experts have biases.
        storage: the form of the experts in the checkpoint.
    """

    num_experts: int
    width: int
    rule: RoutingRule
    is_sparse: tuple[bool, ...]
    shared_width: int = 0
    gates_shared: bool = True
    router_eps: float | None = None
    has_expert_scales: bool = False
    has_wide_logits: bool = False
    has_ranking_bias: bool = False
    activation: Activation = Activation.SILU
    has_biases: bool = False
    storage: ExpertStorage = ExpertStorage.EACH

    def stored_as(self, names: Iterable[str]) -> "ExpertsConfig":
        """Returns the config with the form in which tensors of these names store experts."""
        return replace(self, storage=self.storage.stored_as(names))

    def num_unused(self, hidden_size: int) -> int:
        """Returns the number of weights of all experts that a token did not choose."""
        unchosen = self.num_experts - self.rule.top_k
        return sum(self.is_sparse) * unchosen * 3 * hidden_size * self.width

    def workspace_bytes(self, hidden_size: int, num_tokens: int, itemsize: int) -> int:
        """Returns the size of the states of each expert of each token, in and after its layers, and
        of the layers' inputs in the order of their kernels.

        Args:
            hidden_size: width of hidden states.
            num_tokens: number of tokens of the step.
            itemsize: bytes of an element.
        """
        states = (self.width + hidden_size) * itemsize
        operands = max(self.width, hidden_size) * _OPERAND_BYTES
        return min(num_tokens, MAX_TOKENS_AT_ONCE) * self.rule.top_k * (states + operands)


def experts_config(
    fields: ConfigFields,
    rule: RoutingRule,
    *,
    count_field: str = "num_experts",
    width_field: str = "moe_intermediate_size",
    top_k_field: str = "num_experts_per_tok",
    activation: Activation | None = None,
) -> ExpertsConfig:
    """Reads the fields that families of mixtures have in common.

    Args:
        fields: of config.json.
        rule: the family's rule; its `top_k` is replaced by that of config.json.
        count_field: name of the number of experts.
        width_field: name of the width of an expert.
        top_k_field: name of the number of experts that a token chooses.
        activation: of the experts' gates; None for SiLU, which `hidden_act` must name.

    Raises:
        ConfigFieldError: a field has an unsupported value.
    """
    num_experts = fields.count(count_field, _MAX_EXPERTS)
    top_k = fields.count(top_k_field)
    if top_k > num_experts:
        raise ConfigFieldError(
            f"{top_k_field} is {top_k}; there are {num_experts} experts ({count_field})"
        )
    shared = "shared_expert_intermediate_size"
    return ExpertsConfig(
        num_experts=num_experts,
        width=fields.count(width_field),
        rule=replace(rule, top_k=top_k),
        is_sparse=_sparse_layers(fields),
        shared_width=fields.count(shared) if fields.has(shared) else 0,
        activation=activation or fields.activation("hidden_act", (Activation.SILU,)),
    )


def grouped_experts_config(
    fields: ConfigFields, rule: RoutingRule, *, has_groups: bool = True
) -> ExpertsConfig:
    """Reads the mixtures of DeepSeek and of families with its router, which has float32 logits.

    Args:
        fields: of config.json.
        rule: the family's rule without `top_k`, number of groups and scale.
        has_groups: whether experts are chosen by group.

    Raises:
        ConfigFieldError: a field has an unsupported value.
    """
    experts = experts_config(fields, rule, count_field="n_routed_experts")
    num_groups, top_groups = (
        fields.count(name) if has_groups else 1 for name in ("n_group", "topk_group")
    )
    group_size, remainder = divmod(experts.num_experts, num_groups)
    if remainder or group_size < rule.group_terms:
        raise ConfigFieldError(
            f"n_group is {num_groups}; n_routed_experts {experts.num_experts} must be a multiple "
            f"of it, with at least {rule.group_terms} experts in a group"
        )
    if not experts.rule.top_k <= top_groups * group_size <= experts.num_experts:
        raise ConfigFieldError(
            f"topk_group is {top_groups}; it must be at most n_group {num_groups}, and so many "
            f"groups must have num_experts_per_tok {experts.rule.top_k} experts"
        )
    rule = replace(
        experts.rule,
        rounds=False,
        scale=fields.number("routed_scaling_factor"),
        num_groups=num_groups,
        top_groups=top_groups,
    )
    return replace(
        experts,
        rule=rule,
        is_sparse=_layers_after_dense(fields),
        shared_width=(fields.optional_count("n_shared_experts") or 0) * experts.width,
        gates_shared=False,
        has_wide_logits=True,
    )


def _layers_after_dense(fields: ConfigFields) -> tuple[bool, ...]:
    """Returns, per layer, whether it has experts; the first ones have none."""
    num_dense = fields.integer("first_k_dense_replace")
    interval = fields.count("moe_layer_freq")
    return tuple(
        layer >= num_dense and layer % interval == 0
        for layer in range(fields.count("num_hidden_layers"))
    )


def softmax_rule(fields: ConfigFields) -> RoutingRule:
    """Returns the rule of families that choose by a softmax over all experts."""
    return RoutingRule(1, normalizes=fields.flag("norm_topk_prob"))


def _sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Returns, per layer, whether it has experts; without fields that say so, all have."""
    num_layers = fields.count("num_hidden_layers")
    if not fields.has("decoder_sparse_step"):
        return (True,) * num_layers
    step, dense = fields.count("decoder_sparse_step"), fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ConfigFieldError(f"mlp_only_layers is {dense!r}; it must be a list of integers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
