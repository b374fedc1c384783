"""Modes of Ray Serve, which it reads from the environment when it is imported."""

import os
from pathlib import Path


def haproxy_mode(folder: Path) -> None:
    """An HAProxy of Ray's own in front of the gateways, its files in a folder of ours."""
    own = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock"}
    own |= {"SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "server-state"}
    files = {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in own.items()}
    modes = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    os.environ.update({**modes, **files})
