"""The application as Ray's own tools import it: ``serve deploy``, ``serve run``, KubeRay.

They start it on a cluster that is there already and listens where their file says, so the settings'
``http.host`` and ``http.port`` mean nothing here. It starts nothing itself.
"""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from ray import serve

from tasc_runtime.errors import SettingsError
from tasc_serve.app import build, newest_digests
from tasc_serve.settings import load_settings


class Deployed(BaseModel):
    """``args`` of an application in Ray's Serve config file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: Path = Field(description="the settings file, at the same path on every node")
    revision: str = Field(
        "", description="change it to deploy again: Serve ignores a config that has not changed"
    )


def app(args: Deployed) -> serve.Application:
    """The application of the settings file that ``args`` name.

    Raises:
        SettingsError: The file is at fault, or neither it nor ``REDIS_URL`` says where Redis is.
        StoreError: Redis cannot be reached, or has no such task.
    """
    settings = load_settings(args.settings)
    redis_url = settings.redis_url or os.environ.get("REDIS_URL")
    if not redis_url:
        raise SettingsError(
            f"{args.settings} has no redis_url and REDIS_URL is not set; set one of them, since a"
            " Redis server of our own would be on one node only"
        )
    return build(settings, redis_url, newest_digests(settings, redis_url))
