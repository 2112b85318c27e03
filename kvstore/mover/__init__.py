"""Moves blocks between a KV pool and a backend."""
