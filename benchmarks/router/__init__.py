"""`baton bench router`: the cost of requests and streamed tokens in a router process."""
