"""The scheduler without a model: the time of its steps."""
