"""The engine in this process, driven step by step, without servers."""
