"""What both tiers share: configuration, requests, block pool, scheduler, runtime, models."""
