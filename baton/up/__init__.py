"""`baton up`: a cluster on one machine, whose processes this package supervises."""
