"""Processes of one router that share its ports: their places, counts, metrics and states."""
