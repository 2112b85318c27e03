"""The helper behind the suite's pairwise cases misses no pair."""

from itertools import combinations, product

import pytest

from tests.support.pairs import pairs


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (2, 2, 2), (6, 7, 2, 3), (3, 18, 2), (1, 4, 1)])
def test_all_pairs_meet_in_few_cases(sizes):
    parameters = [[(name, value) for value in range(size)] for name, size in enumerate(sizes)]
    cases = pairs(*parameters)
    met = {pair for case in cases for pair in combinations(case, 2)}
    asked = {pair for two in combinations(parameters, 2) for pair in product(*two)}
    assert met == asked
    largest, second = sorted(sizes, reverse=True)[:2]
    assert largest * second <= len(cases) <= largest * second + 1
    assert all([name for name, _ in case] == list(range(len(sizes))) for case in cases)
