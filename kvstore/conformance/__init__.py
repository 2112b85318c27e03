"""The conformance suite for KV stores: the contract of `kvstore.store` as tests.

    pytest --pyargs kvstore.conformance --kv-connector 'myscheme://host/…'

The URL names a backend that nobody else uses meanwhile. The suite adds the
options `ttl_s`, `timeout_s` and, where the store's capabilities say that it
takes them, `lease_s` and `max_bytes`; so the URL itself must not hold them. It leaves no
objects behind but those that its TTL tests abandon.

`conftest.py` holds the fixtures, `plugin.py` the option, `workers.py` what runs
in other processes; each `test_*.py` is one part of the contract.
"""
