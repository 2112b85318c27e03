"""Who calls the router, and what they may do."""
