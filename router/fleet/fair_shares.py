"""`FairShares`: the order of tenants among waiting requests, by deficit round robin. Pure.

M. Shreedhar and G. Varghese, "Efficient Fair Queueing using Deficit Round Robin", SIGCOMM 1995.
Tenants take turns in rounds. In each round a tenant may use a quantum of tokens per unit of its
weight, and its requests go on while it has any of them left. There is one difference from the
paper: the last request of a turn may use more tokens than are left, and later rounds make up for
it. The length of an answer is known only at its end, so no request can be checked beforehand.

Rounds are numbered and not run through: the number of the round in which a tenant has tokens again
follows from what it has used. So a request costs the same however many tenants wait.
"""

import itertools
import math
from dataclasses import dataclass

__all__ = ["FairShares", "Share"]

QUANTUM_TOKENS = 512
"""What a tenant of weight 1 may use in a round: less than most requests, so that tenants with short
requests do not wait for many of one other tenant."""
_MAX_IDLE = 1024
"""Tenants without waiting requests that have used more than their share; beyond this number they
are forgotten."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one request takes of the replicas, and for whom.

    Attributes:
        tenant: the name of its tenant.
        weight: its tenant gets as much as this number of tenants of weight 1.
        num_tokens: the tokens of its prompt, and those that its answer will probably have.
    """

    tenant: str = ""
    weight: int = 1
    num_tokens: float = 0.0


@dataclass(slots=True)
class _Account:
    """One tenant.

    Attributes:
        seat: its place within each round.
        round: the number of the round in which its next request may go on.
        tokens_left: how many tokens it may still use in that round.
        num_waiting: its waiting requests.
    """

    seat: int
    round: int
    tokens_left: float
    num_waiting: int = 0


class FairShares:
    """The tenants that have waiting requests, and what they have used while others waited."""

    def __init__(self) -> None:
        self._round = 0  # of the last turn
        self._seats = itertools.count()
        self._accounts: dict[str, _Account] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._accounts)

    def join(self, share: Share, first: tuple[int, int] | None = None) -> None:
        """Counts a request as waiting. A tenant without others comes after those of this round.

        Args:
            share: the request's.
            first: the position of the first one with which it competes. It may have waited in vain
                for many rounds, in which others found what they needed.
        """
        account = self._accounts.get(share.tenant)
        if account is None:
            tokens = QUANTUM_TOKENS * share.weight
            last_round = self._round if first is None else min(self._round, first[0])
            account = _Account(next(self._seats), last_round + 1, tokens)
            self._accounts[share.tenant] = account
        account.num_waiting += 1
        self._num_waiting += 1

    def leave(self, share: Share) -> None:
        """Ends what `join` began. Once no request waits, what was used is forgotten: it has made
        no request wait.
        """
        account = self._accounts[share.tenant]
        account.num_waiting -= 1
        self._num_waiting -= 1
        if not self._num_waiting:
            self._accounts.clear()
        elif not account.num_waiting and account.round <= self._round + 1:
            del self._accounts[share.tenant]  # it owes nothing that a new account would not
        elif len(self._accounts) - self._num_waiting > _MAX_IDLE:
            self._forget_idle()

    def position(self, tenant: str) -> tuple[int, int]:
        """The order of a tenant that has waiting requests: a round, and a place within it. The
        least is first; it only grows while the tenant has waiting requests.
        """
        account = self._accounts[tenant]
        return account.round, account.seat

    def take_turn(self, share: Share) -> None:
        """Notes that the first of the waiting requests goes on."""
        self._round = max(self._round, self._accounts[share.tenant].round)
        self.charge(share)

    def charge(self, share: Share) -> None:
        """Notes that a request goes on; without effect unless others of its tenant wait."""
        account = self._accounts.get(share.tenant)
        if account is not None:
            self._use(account, share.num_tokens, share.weight)

    def settle(self, share: Share, num_tokens: float) -> None:
        """Corrects what `charge` noted, as far as it still counts.

        Args:
            share: of a request that has ended, or was not started.
            num_tokens: the tokens that it has really used.
        """
        account = self._accounts.get(share.tenant)
        if account is not None:
            self._use(account, num_tokens - share.num_tokens, share.weight)

    def _use(self, account: _Account, num_tokens: float, weight: int) -> None:
        """Takes tokens of this round, and of as many later ones as it needs."""
        account.tokens_left -= num_tokens
        if account.tokens_left <= 0:
            quantum = QUANTUM_TOKENS * weight
            num_rounds = math.floor(-account.tokens_left / quantum) + 1
            account.round += num_rounds
            account.tokens_left += num_rounds * quantum

    def _forget_idle(self) -> None:
        self._accounts = {
            tenant: account for tenant, account in self._accounts.items() if account.num_waiting
        }
