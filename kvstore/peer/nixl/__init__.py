"""The connector `nixl://`."""
