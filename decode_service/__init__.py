"""The decode tier's server: takes handed-over KV and generates tokens."""
