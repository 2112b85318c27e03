"""The pytest option `--kv-connector`. A plugin makes it known to pytest in any folder."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option to pytest's command line."""
    group = parser.getgroup("baton", "Baton's conformance suite for KV connectors")
    group.addoption("--kv-connector", metavar="URL", help="the store or connector to test")
