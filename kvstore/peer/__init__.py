"""The peer connector: decode takes blocks from where they lie in prefill's pool."""
