"""The work of a step: queues, admission, outputs. Pure."""
