"""The KV cache's blocks: tables, pools, prefixes, events. Pure."""
