"""The conformance suite for KV stores and connectors: their contracts as tests.

    pytest --pyargs kvstore.conformance --kv-connector 'myscheme://host/…'

The URL must name a backend that nothing else uses during the run. Every connector is tested
against the contract of `kvstore.connector`, in `test_connector_*.py`: the suite opens the URL as
several engines do, in one process and, if the connector is shared, in another. A connector that
keeps leases must take the option `lease_s`, which the suite adds.

A store is also tested against the contract of `kvstore.store`, in all other test files. They add
the options `ttl_s`, `timeout_s` and, if the store's capabilities name them, `lease_s` and
`max_bytes`; so the URL itself must not have these. The suite removes its objects, except those
of the TTL tests.

`conftest.py` holds the fixtures, `engines.py` the engines, `plugin.py` the option, and `workers.py`
the functions of other processes.
"""
