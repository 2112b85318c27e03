"""`join_host_port`: the text of an address. A leaf module like `baton.common.errors`."""

__all__ = ["join_host_port"]


def join_host_port(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
