"""Command-line flags of config dataclasses, and their sources: command line, environment, file."""
