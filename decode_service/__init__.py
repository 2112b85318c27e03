"""The decode service: takes handed-over KV and generates tokens."""
