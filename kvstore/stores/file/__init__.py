"""The store `file://`."""
