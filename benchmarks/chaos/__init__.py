"""`baton bench chaos`: requests while processes are killed, frozen and restarted."""
