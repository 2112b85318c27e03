"""`baton tune`: searches the flags that serve the most requests within a service level."""
