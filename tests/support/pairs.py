"""Pairwise coverage: fewer cases than a full matrix, but all pairs of values occur."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

__all__ = ["pairs"]

_Place = tuple[int, int]  # a parameter's index, and that of one of its values


def pairs(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns cases in which any two values of different parameters occur together.

    A case has one value of each parameter. The cases are the same each time, in the order of the
    values, and about as many as the two parameters with the most values have pairs.
    """
    missing = _pairs_of_places([range(len(values)) for values in parameters])
    cases = []
    while missing:
        case = _next_case(parameters, missing)
        missing -= set(combinations(case, 2))
        cases.append(case)
    return [tuple(parameters[at][value] for at, value in case) for case in sorted(cases)]


def _pairs_of_places(values: Sequence[range]) -> set[tuple[_Place, _Place]]:
    places = [[(at, value) for value in indices] for at, indices in enumerate(values)]
    return {pair for two in combinations(places, 2) for pair in product(*two)}


def _next_case(
    parameters: Sequence[Sequence[Any]], missing: set[tuple[_Place, _Place]]
) -> list[_Place]:
    """Begins with the first missing pair, and adds values that complete the most others."""
    case = list(min(missing))
    for at in sorted(set(range(len(parameters))) - {place[0] for place in case}):
        case.append(
            max(
                ((at, value) for value in range(len(parameters[at]))),
                key=lambda place: (
                    sum(tuple(sorted((place, other))) in missing for other in case),
                    sum(place in pair for pair in missing),
                ),
            )
        )
        case.sort()
    return case
