"""The commands under `tasc key`: API keys of a service. No key is kept or logged here."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from tasc_jobs.cli.options import AsJson, StoreOptions, grouped, print_result
from tasc_runtime.progress import note
from tasc_store import ApiKey, ApiKeys, TaskStore, connect

key_app = typer.Typer(
    help="Make, list and revoke the API keys that a service asks for (auth.required).",
    no_args_is_help=True,
)
_EXAMPLES = """\
For everything: tasc key create backend

For two tasks, at most ten requests a second: tasc key create crm --tasks tickets,tags
--requests-per-minute 600

Into a variable: KEY=$(tasc key create backend)"""
_HEADER = "id\tname\ttasks\trequests/min\ttokens/min\tcreated\tstate"
_NO_LIMIT = "no limit"


@key_app.command("create", epilog=_EXAMPLES)
@grouped()
def key_create(
    *,
    name: Annotated[str, typer.Argument(help="Whose it is, for people.")],
    tasks: Annotated[
        str,
        typer.Option(
            help="Names of the tasks it may use, separated by commas.", show_default="all"
        ),
    ] = "",
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Most requests.", show_default=_NO_LIMIT)
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of answers, counted when they end: a minute that went over is "
            "waited for before the next request.",
            show_default=_NO_LIMIT,
        ),
    ] = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once: the store keeps its hash only.

    Clients send it as `Authorization: Bearer KEY`; a service asks for keys with `auth: {required:
    true}` among its settings.
    """
    allowed = tuple(task for part in tasks.split(",") if (task := part.strip()))
    with store.open() as url:
        client = connect(url)
        unknown = sorted(set(allowed) - set(TaskStore(client).names()))
        secret, key = ApiKeys(client).create(
            name,
            tasks=allowed,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )
    if unknown:
        note(f"there is no task {', '.join(unknown)} yet")
    note(f"the key of {name}, whose id is {key.id}; this is the only time it is shown")
    print_result({**asdict(key), "key": secret}, secret, as_json)


@key_app.command("list")
@grouped()
def key_list(*, store: StoreOptions, as_json: AsJson = False) -> None:
    """Show every key's id, name, tasks and limits; no key itself."""
    with store.open() as url:
        found = ApiKeys(connect(url)).known()
    text = "\n".join([_HEADER, *map(_listed, found)])
    print_result({"keys": [asdict(key) for key in found]}, text, as_json)


@key_app.command("revoke")
@grouped()
def key_revoke(
    *,
    id: Annotated[str, typer.Argument(help="An id that `tasc key list` shows.")],
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Close a key for good. Services refuse it within `auth.cache_ttl_s`, 10 seconds by default.

    While a service cannot reach Redis it goes on with the keys as it last saw them.
    """
    with store.open() as url:
        key = ApiKeys(connect(url)).revoke(id)
    print_result(asdict(key), f"revoked key {key.id} of {key.name}", as_json)


def _listed(key: ApiKey) -> str:
    limits = (_limit(key.requests_per_minute), _limit(key.tokens_per_minute))
    created = datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    state = "revoked" if key.revoked else "open"
    return "\t".join((key.id, key.name, ",".join(key.tasks) or "all", *limits, created, state))


def _limit(limit: int | None) -> str:
    return "-" if limit is None else str(limit)
