"""The routing policies that come with Baton, one file each."""

from collections.abc import Mapping

from baton.common.flags.plugins import load_plugin
from router.routing.policies.consistent_hash import ConsistentHashPolicy
from router.routing.policies.least_load import LeastLoadPolicy
from router.routing.policies.power_of_two import PowerOfTwoPolicy
from router.routing.policies.prefix import PrefixPolicy
from router.routing.policies.round_robin import RoundRobinPolicy
from router.routing.policy import PolicySettings, RoutingPolicy

__all__ = ["POLICIES", "make_policy"]

POLICIES: Mapping[str, type[RoutingPolicy]] = {
    policy.name: policy
    for policy in (
        PrefixPolicy,
        LeastLoadPolicy,
        RoundRobinPolicy,
        ConsistentHashPolicy,
        PowerOfTwoPolicy,
    )
}


def make_policy(name: str, settings: PolicySettings) -> RoutingPolicy:
    """Makes the policy with a name.

    Args:
        name: one of `POLICIES`, the name of an entry point `baton.routing_policies`, or
            `module:Class`.
        settings: the settings of policies.

    Raises:
        ConfigurationError: the name is unknown, or is of no policy that can be imported.
    """
    group = "baton.routing_policies"
    policy_class = load_plugin(name, RoutingPolicy, "--routing-policy", group, POLICIES)
    policy: RoutingPolicy = policy_class(settings)
    return policy
