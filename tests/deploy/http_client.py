"""Requests of tests; their deadline ends a broken test, and no healthy one on a slow machine."""

from functools import partial

import httpx

from support import DEADLINE_S

get = partial(httpx.get, timeout=DEADLINE_S)
post = partial(httpx.post, timeout=DEADLINE_S)
stream = partial(httpx.stream, timeout=DEADLINE_S)
