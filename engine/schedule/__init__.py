"""What a step computes: queues, admission, outputs. Pure."""
