"""gRPC plumbing that the router and both tiers share. Knows no engine and no model."""
