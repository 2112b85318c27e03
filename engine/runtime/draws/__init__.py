"""Draws of tokens: rows, rules, samplers, log-probabilities."""
