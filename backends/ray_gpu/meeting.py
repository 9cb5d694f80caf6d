"""Where processes of one node meet for `torch.distributed`, without listening to the world.

torch's own meeting point, the `TCPStore` behind `tcp://127.0.0.1:port`, listens on every interface, whatever address it
is given: it is only ever told the port. But it takes a socket that listens already, and that one can be bound.

torch is imported by the functions that need it.
"""

import socket
from datetime import timedelta
from typing import Any

from core.errors import OperationFailed

LOOPBACK = "127.0.0.1"


def loopback_store(port: int, world: int, host: bool, timeout_s: float) -> Any:
    """The store of `world` processes of this node that meet at `port`; `host`: this is the one that listens. Port 0,
    which is enough where nobody else is to come, is whichever is free.

    For `init_process_group(store=..., rank=..., world_size=...)`. Whoever comes with `tcp://127.0.0.1:port` meets them
    too. Raises OperationFailed if the port is taken.
    """
    import torch.distributed as dist

    listener = _listen(port) if host else None
    return dist.TCPStore(
        LOOPBACK,
        listener.getsockname()[1] if listener else port,
        world,
        is_master=host,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )


def _listen(port: int) -> socket.socket:
    """A socket that listens on loopback alone."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except OSError as error:
        listener.close()
        raise OperationFailed(f"port {port} on loopback is taken: {error}") from error
    listener.listen()
    return listener
