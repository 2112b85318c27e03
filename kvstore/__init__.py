"""Block keys, the KV connector interface, its backends and their conformance suite."""
