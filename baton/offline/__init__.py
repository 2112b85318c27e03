"""Offline use: `LLM` and `AsyncLLM`, the engine in this process."""
