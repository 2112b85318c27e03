"""`WaitingCounts`: how many requests have not begun, by priority and tenant. Pure."""

from router.fleet.fair_shares import Share

__all__ = ["WaitingCounts"]


class WaitingCounts:
    """How many requests of each priority and tenant have not begun."""

    def __init__(self) -> None:
        self._numbers: dict[int, dict[str, int]] = {}
        self._weights: dict[str, int] = {}

    def add(self, priority: int, share: Share, number: int) -> None:
        """Counts requests of a tenant; a negative number ends the count."""
        numbers = self._numbers.setdefault(priority, {})
        numbers[share.tenant] = numbers.get(share.tenant, 0) + number
        self._weights[share.tenant] = share.weight
        if not numbers[share.tenant]:
            del numbers[share.tenant]
            if not any(share.tenant in each for each in self._numbers.values()):
                del self._weights[share.tenant]
        if not numbers:
            del self._numbers[priority]

    def num_ahead(self, priority: int, share: Share) -> float:
        """How many of them go on before a new one: all that are more urgent, and of each tenant as
        many as its turns allow until this tenant's requests have had theirs.
        """
        urgent = [numbers for each, numbers in self._numbers.items() if each < priority]
        number = float(sum(sum(numbers.values()) for numbers in urgent))
        equal = self._numbers.get(priority, {})
        turns = (equal.get(share.tenant, 0) + 1) / share.weight
        for tenant, waiting in equal.items():
            is_own = tenant == share.tenant
            number += waiting if is_own else min(waiting, turns * self._weights[tenant])
        return number
