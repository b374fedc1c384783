"""Ports of this machine: a free one, or whether one can be had. It listens on none."""

import socket

from tasc_runtime.errors import ServiceError


def free_port(host: str) -> int:
    """A port that is free now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def require_free(host: str, port: int) -> None:
    """Raise ServiceError unless ``port`` can be bound; 0 always can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceError(
                f"{host}:{port} cannot be used ({error}); end what uses it or choose another port"
            ) from error
