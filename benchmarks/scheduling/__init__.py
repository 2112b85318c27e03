"""Measures KV memory and scheduling without a model: waste, savings and costs."""
