"""`FairShares`: whose turn it is."""

import random
from collections import Counter

import pytest

from router.fleet.fair_shares import QUANTUM_TOKENS, FairShares, Share


def serve(shares: FairShares, sizes: dict[Share, list[int]], number: int) -> Counter[str]:
    """Serves tenants that always have waiting requests, of these sizes in turn; returns the tokens
    of each.
    """
    served: Counter[str] = Counter()
    for share in sizes:
        shares.join(share)
    for _ in range(number):
        share = min(sizes, key=lambda share: shares.position(share.tenant))
        size = sizes[share].pop()
        shares.take_turn(Share(share.tenant, share.weight, size))
        served[share.tenant] += size
    return served


def test_tenants_get_tokens_by_weight_whatever_the_sizes_of_their_requests():
    draw = random.Random(0)
    small, large, heavy = Share("small"), Share("large"), Share("heavy", 3)
    sizes = {
        small: [draw.randint(1, 60) for _ in range(20_000)],
        large: [draw.randint(1, 9000) for _ in range(20_000)],
        heavy: [draw.randint(1, 1000) for _ in range(20_000)],
    }
    served = serve(FairShares(), sizes, 15_000)
    bound = 2 * QUANTUM_TOKENS + 9000
    assert served["large"] == pytest.approx(served["small"], abs=bound)
    assert served["heavy"] == pytest.approx(3 * served["small"], abs=3 * bound)


def test_a_tenant_that_comes_has_neither_saved_turns_nor_old_debts():
    shares, busy, idle = FairShares(), Share("busy"), Share("idle")
    shares.join(busy)
    for _ in range(100):
        shares.take_turn(Share("busy", 1, QUANTUM_TOKENS))
    shares.join(idle)
    order = []
    for _ in range(6):
        tenant = min(("busy", "idle"), key=shares.position)
        order.append(tenant)
        shares.take_turn(Share(tenant, 1, QUANTUM_TOKENS))
    assert sorted(order) == ["busy"] * 3 + ["idle"] * 3
    assert order[0] != order[1]


def test_leaving_the_queue_does_not_pay_a_debt():
    shares, greedy, other = FairShares(), Share("greedy"), Share("other")
    shares.join(other)
    shares.join(greedy)
    shares.take_turn(Share("greedy", 1, 100 * QUANTUM_TOKENS))
    shares.leave(greedy)
    shares.join(greedy)
    served = 0
    while min(("greedy", "other"), key=shares.position) == "other":
        shares.take_turn(Share("other", 1, QUANTUM_TOKENS))
        served += 1
    assert 98 <= served <= 102


def test_nothing_is_remembered_once_nobody_waits():
    shares, share = FairShares(), Share("a")
    shares.charge(Share("a", 1, 1e6))
    assert len(shares) == 0
    shares.join(share)
    shares.take_turn(Share("a", 1, 1e6))
    shares.leave(share)
    assert len(shares) == 0


def test_tenants_without_requests_are_forgotten_if_they_are_many():
    shares, waiting = FairShares(), Share("waiting")
    shares.join(waiting)
    for number in range(5000):
        share = Share(f"t{number}", 1, 1e6)
        shares.join(share)
        shares.take_turn(share)
        shares.leave(share)
    assert len(shares) <= 1100
    assert shares.position("waiting") < (2, 0)


def test_what_an_answer_had_less_than_expected_is_given_back():
    shares, a, b = FairShares(), Share("a", 1, 4 * QUANTUM_TOKENS), Share("b", 1, QUANTUM_TOKENS)
    shares.join(a)
    shares.join(b)
    shares.take_turn(a)
    shares.settle(a, 0)
    served: Counter[str] = Counter()
    for _ in range(40):
        tenant = min("ab", key=shares.position)
        served[tenant] += 1
        shares.take_turn(Share(tenant, 1, QUANTUM_TOKENS))
    assert served["a"] == pytest.approx(20, abs=2)


def test_turns_elsewhere_do_not_put_a_newcomer_behind_one_that_waits_in_vain():
    shares, stuck = FairShares(), Share("stuck")
    shares.join(stuck)
    for number in range(50):
        other = Share(f"t{number}", 1, QUANTUM_TOKENS)
        shares.join(other)
        shares.take_turn(other)
        shares.leave(other)
    shares.join(Share("new"), shares.position("stuck"))
    shares.take_turn(Share("stuck", 1, 2 * QUANTUM_TOKENS))
    assert shares.position("new") < shares.position("stuck")
