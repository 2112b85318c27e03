"""A pytest plugin: keeps every fifth case of each test, other ones for each set of CPU kernels.

Load it with `-p tests.support.fifth_of_cases`. Five sets together have all cases.
"""

import os
from collections import defaultdict

import pytest

from kernels.library.library import WISH_VARIABLE
from kernels.library.variants import VARIANTS

_SETS = [variant.name for variant in VARIANTS]


@pytest.hookimpl(trylast=True)  # after pytest has deselected tests by their marks
def pytest_collection_modifyitems(config, items):
    choice = os.environ[WISH_VARIABLE]
    first = _SETS.index(choice) if choice in _SETS else 0
    cases = defaultdict(list)
    for item in items:
        cases[item.path, item.originalname].append(item)
    kept = set()
    for of_test in cases.values():
        step = min(5, len(of_test))
        kept.update(of_test[first % step :: step])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
