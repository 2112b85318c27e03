"""`pairs`, the helper that makes the pairwise cases of the tests."""

from itertools import combinations, product

import pytest

from tests.support.pairs import pairs


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (2, 2, 2), (6, 7, 2, 3), (3, 18, 2), (1, 4, 1)])
def test_few_cases_cover_all_pairs(sizes):
    parameters = [[(name, value) for value in range(size)] for name, size in enumerate(sizes)]
    cases = pairs(*parameters)
    covered = {pair for case in cases for pair in combinations(case, 2)}
    all_pairs = {pair for two in combinations(parameters, 2) for pair in product(*two)}
    assert covered == all_pairs
    largest, second = sorted(sizes, reverse=True)[:2]
    assert largest * second <= len(cases) <= largest * second + 1
    assert all([name for name, _ in case] == list(range(len(sizes))) for case in cases)
