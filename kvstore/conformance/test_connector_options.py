"""The capabilities that a connector declares, and its URL's options."""

import pytest

from baton.common.errors import ConfigurationError
from kvstore.conformance.conftest import joined, members_of, with_option
from kvstore.conformance.engines import TinyEngine, random_prompt
from kvstore.connector import ConnectorCapabilities
from kvstore.handoff import connector_name
from kvstore.registry import open_connector


def test_capabilities_agree_with_each_other(capabilities: ConnectorCapabilities) -> None:
    if capabilities.shared_between_hosts:
        assert capabilities.shared_between_processes
    if capabilities.lends_blocks:
        assert capabilities.keeps_leases, "lent blocks have a lease"


def test_handoffs_bear_the_connectors_name(kv_connector_url: str, publisher: TinyEngine) -> None:
    keys = random_prompt(2)
    handoff = publisher.scheduler.make_handoff("h", b"namespace", keys, 7)
    assert handoff.connector == publisher.scheduler.scheme == connector_name(kv_connector_url)
    assert (handoff.handoff_id, handoff.namespace) == ("h", b"namespace")
    assert (handoff.block_keys, handoff.num_tokens) == (keys, 7)
    assert handoff.lease_ms > 0


def test_an_unknown_option_is_an_error_that_names_it(kv_connector_url: str) -> None:
    *others, last = members_of(kv_connector_url)
    url = joined([*others, with_option(last, "no_such_option=1")])
    with pytest.raises(ConfigurationError, match="no_such_option"):
        open_connector(url)
