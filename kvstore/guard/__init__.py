"""Protection from failing stores: breakers, watches, outages, status and metrics."""
