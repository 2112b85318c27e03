"""The stages of a request: admission, prefill, decode, completion."""
