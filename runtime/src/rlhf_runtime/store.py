"""The store that processes of a group meet at."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def open_store(host: str, timeout_seconds: float) -> TCPStore:
    """Bind a free port of this machine's address `host`, and of no other: whoever reaches the port is let in.

    Args:
        host: Name or address, IPv4 or IPv6.
        timeout_seconds: How long a call of the store may wait.

    Raises:
        OSError: when `host` is not this machine's.
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener.detach(),
    )
