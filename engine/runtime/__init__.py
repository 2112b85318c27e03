"""Executes batches: loader, KV pool, model runner, sampler. Imports torch."""
