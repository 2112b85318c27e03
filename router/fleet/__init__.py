"""The replicas of both tiers: discovery, connections, load, and which one takes a request."""
