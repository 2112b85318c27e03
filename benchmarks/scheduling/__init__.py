"""KV memory and scheduling without a model: what it wastes, saves and costs."""
