"""The conformance suite for KV stores and connectors: their contracts as tests.

    pytest --pyargs kvstore.conformance --kv-connector 'myscheme://host/…'

The URL names a backend that nobody else uses meanwhile. Any connector gets the
tests of `kvstore.connector`, in `test_connector_*.py`: the suite opens the URL
as several engines do, in one process and, where it is shared, in another. One
that keeps leases takes the option `lease_s`, which the suite adds.

A store also gets the tests of `kvstore.store`, in all other files. They add the
options `ttl_s`, `timeout_s` and, where the store's capabilities say that it
takes them, `lease_s` and `max_bytes`; so the URL itself must not hold them. They leave no
objects behind but those that the TTL tests abandon.

`conftest.py` holds the fixtures, `engines.py` the engines, `plugin.py` the option,
`workers.py` what runs in other processes.
"""
