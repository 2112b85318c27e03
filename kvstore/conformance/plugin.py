"""The pytest option `--kv-connector` of the conformance suite.

`pytest -p kvstore.conformance.plugin` loads it. It is not loaded by other runs of pytest.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option to pytest's command line."""
    group = parser.getgroup("baton", "Baton's conformance suite for KV connectors")
    group.addoption("--kv-connector", metavar="URL", help="the store or connector to test")
