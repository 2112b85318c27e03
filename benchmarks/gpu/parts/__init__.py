"""The parts of a run: each a module with `measure(plan, ceilings, record)`, in its own process."""
