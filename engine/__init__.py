"""The engine of both tiers: configuration, requests, block pool, scheduler, runtime, models."""
