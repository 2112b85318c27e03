"""The engine and its loop: steps, commands from other threads, coroutines."""
