"""A TCP proxy that can fall silent, as a network does that forgets a connection: open, and nothing comes through."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class SilentProxy:
    """Forwards connections to a port of this machine.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._epoch = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """From now on nothing comes through the connections that are open; new ones work."""
        self._epoch += 1

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink, self._epoch), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, epoch: int) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if epoch != self._epoch:
                    threading.Event().wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def silent_proxy(target: int) -> Iterator[SilentProxy]:
    """A proxy that forwards while the context lasts."""
    made = SilentProxy(target)
    try:
        yield made
    finally:
        made.close()
