"""Processes that a command starts on this machine: supervision, free ports, folders, their log."""
