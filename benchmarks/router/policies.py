"""`baton bench router --part policies`: routing policies on a trace, in virtual time."""

import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import fmean

from benchmarks.report import Table
from benchmarks.router.simulation.requests import read_lines
from benchmarks.router.simulation.run import ORACLE, Outcome, Setting, simulate
from router.routing.policies import POLICIES

__all__ = ["PolicyRow", "measure_policies", "policy_table"]

_SEEDS = (0, 1, 2)
_NUMBERS_OF_ROUTERS = (1, 4, 8)
_MANY_ROUTERS_POLICY = "prefix"
_SMOKE_REQUESTS, _SMOKE_REPLICAS = 60, 3


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """Figures of a policy.

    Attributes:
        policy: its name, or `ORACLE`.
        num_routers: routers that choose, each for a part of the requests.
        outcome: the means over the seeds.
        spread_s: the largest difference of the 90th percentile of first tokens between two seeds.
    """

    policy: str
    num_routers: int
    outcome: Outcome
    spread_s: float


def measure_policies(*, is_smoke: bool, trace: Path | None = None) -> Sequence[PolicyRow]:
    """Runs a trace for each policy, and for several routers.

    Args:
        is_smoke: whether to make everything tiny.
        trace: a file in Mooncake's format; None for conversations that are made up.

    Raises:
        ConfigurationError: the file is bad.
    """
    setting = Setting(lines=read_lines(trace))
    if is_smoke:
        lines = setting.lines[:_SMOKE_REQUESTS]
        setting = Setting(lines=lines, num_replicas=_SMOKE_REPLICAS)
    cases = [(_MANY_ROUTERS_POLICY, number) for number in _NUMBERS_OF_ROUTERS]
    cases += [(policy, 1) for policy in POLICIES if policy != _MANY_ROUTERS_POLICY]
    cases.append((ORACLE, 1))  # it takes as long as four others
    outcomes: dict[tuple[str, int], list[Outcome]] = {case: [] for case in cases}
    # Seed by seed, so that what is shown of a run that is interrupted compares all cases.
    for seed in _SEEDS[:1] if is_smoke else _SEEDS:
        for policy, num_routers in cases:
            outcome = _measure(setting, policy, num_routers, seed)
            outcomes[policy, num_routers].append(outcome)
    return [_row(*case, runs) for case, runs in outcomes.items()]


def _measure(setting: Setting, policy: str, num_routers: int, seed: int) -> Outcome:
    started = time.process_time()
    outcome = simulate(setting, policy, num_routers, seed)
    figures = ", ".join(
        f"{field.name} {getattr(outcome, field.name):.4f}" for field in fields(Outcome)
    )
    sys.stderr.write(
        f"policies: {policy}, {num_routers} routers, seed {seed}: {figures} "
        f"({time.process_time() - started:.0f} s)\n"
    )
    return outcome


def _row(policy: str, num_routers: int, outcomes: Sequence[Outcome]) -> PolicyRow:
    means = {
        field.name: fmean(getattr(outcome, field.name) for outcome in outcomes)
        for field in fields(Outcome)
    }
    p90s = [outcome.first_token_p90_s for outcome in outcomes]
    return PolicyRow(policy, num_routers, Outcome(**means), max(p90s) - min(p90s))


def policy_table(rows: Sequence[PolicyRow]) -> Table:
    """Shows the figures."""
    columns = (
        "policy",
        "routers",
        "hit rate",
        "possible",
        "follow-up hits",
        "first token p50 (s)",
        "p90 (s)",
        "most/mean load",
        "believed/held",
        "computed by decode",
        "p90 spread (s)",
    )
    return Table(
        "Routing policies on a trace, in virtual time, from empty caches",
        columns,
        [(row.policy, row.num_routers, *astuple(row.outcome), row.spread_s) for row in rows],
        "means of three seeds; the oracle is the policy prefix in a router that sees all pools and "
        "queues at once",
    )
