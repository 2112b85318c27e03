"""A worker's prefix cache for routers other than Baton's: vLLM's KV events over ZMQ."""
