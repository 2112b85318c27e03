"""The store `redis://`."""
