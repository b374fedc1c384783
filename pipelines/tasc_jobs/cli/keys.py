"""The commands under `tasc key`: API keys of a service. No key is kept or logged here."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from tasc_jobs.cli.options import AsJson, StoreOptions, grouped, print_result
from tasc_runtime.progress import note
from tasc_store import ApiKey, ApiKeys, TaskStore, connect

key_app = typer.Typer(
    help="Make, list and revoke API keys, which services require if auth.required is true.",
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
    name: Annotated[str, typer.Argument(help="Name of the owner.")],
    tasks: Annotated[
        str,
        typer.Option(help="Tasks that the key may use, separated by commas.", show_default="all"),
    ] = "",
    requests_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of requests per minute.", show_default=_NO_LIMIT),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of answer tokens per minute, counted when an answer ends. A key "
            "that exceeded the limit has to wait.",
            show_default=_NO_LIMIT,
        ),
    ] = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it. It is shown only once, because the store keeps only its hash.

    Clients send it as `Authorization: Bearer KEY`. A service requires keys if its settings have
    `auth: {required: true}`.
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
    note(f"key {key.id} of {name} is shown only now; store it safely")
    print_result({**asdict(key), "key": secret}, secret, as_json)


@key_app.command("list", epilog="tasc key list")
@grouped()
def key_list(*, store: StoreOptions, as_json: AsJson = False) -> None:
    """List the id, name, tasks and limits of every key, but not the keys."""
    with store.open() as url:
        found = ApiKeys(connect(url)).known()
    text = "\n".join([_HEADER, *map(_listed, found)])
    print_result({"keys": [asdict(key) for key in found]}, text, as_json)


@key_app.command("revoke", epilog="tasc key revoke 3f9c2a71")
@grouped()
def key_revoke(
    *,
    id: Annotated[str, typer.Argument(help="Id of the key, as `tasc key list` shows it.")],
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Revoke a key for good. Services refuse it within `auth.cache_ttl_s`, by default 10 seconds.

    While a service cannot reach Redis, it uses the keys as it last saw them.
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
