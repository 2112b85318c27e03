"""`baton bench transfer`: how quickly connectors move KV, and what of it prefill hides."""
