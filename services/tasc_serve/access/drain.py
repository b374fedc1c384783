"""Whether a gateway takes requests, and how many it has. It answers none."""

import asyncio
import time

from tasc_serve.errors import ApiError

_LOOK_S = 0.05


class InFlight:
    """Open until the gateway is drained; belongs to one event loop.

    Attributes:
        inside: Requests that are being answered.
    """

    def __init__(self) -> None:
        self.inside = 0
        self.open = True

    def enter(self) -> None:
        """A request has come; `leave` ends it.

        Raises:
            ApiError: The gateway is being stopped; another one takes it.
        """
        self.require_open()
        self.inside += 1

    def leave(self) -> None:
        """A request that entered has been answered, or its client is gone."""
        self.inside -= 1

    def require_open(self) -> None:
        """Raises ApiError: the gateway is being stopped."""
        if not self.open:
            message = "this gateway is being stopped; send the request again"
            raise ApiError(503, message, headers={"Connection": "close"})

    async def drain(self, timeout_s: float) -> int:
        """Close, and wait until nobody is inside; how many are when the time has passed."""
        self.open = False
        deadline = time.monotonic() + timeout_s
        while self.inside and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        return self.inside
