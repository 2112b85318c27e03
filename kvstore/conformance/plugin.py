"""The pytest option `--kv-connector`; a plugin, so that pytest knows it in any folder."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that `pytest --pyargs kvstore.conformance` needs."""
    group = parser.getgroup("baton", "Baton's conformance suite for KV connectors")
    group.addoption("--kv-connector", metavar="URL", help="the store or connector to test")
