"""The parts of a run. Each is a module with `measure(plan, ceilings, record)`."""
