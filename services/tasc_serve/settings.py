"""The settings file of the service, read by ``tasc serve --config``."""

import logging
import math
import socket
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from tasc_runtime.engine_settings import DraftOverrides, EngineOverrides, EngineSettings, Section
from tasc_runtime.errors import ServiceError, SettingsError
from tasc_store import redact

log = logging.getLogger(__name__)

Count = Annotated[int, Field(ge=1)]


class LimitSettings(Section):
    """Limits of requests, files and batches, and time limits."""

    max_prompt_bytes: Count = Field(
        262_144,
        description="Maximum size of a prompt; a longer one is answered with 400. If n is above 1, "
        "each prompt counts n times, and the total is at most max_choices times this size.",
    )
    max_body_bytes: Count = Field(4_194_304, description="Maximum size of an HTTP body.")
    max_tokens: Count = Field(
        512,
        description="Maximum max_tokens of a request; the task's own max_tokens may be greater.",
    )
    max_choices: Count = Field(16, description="Maximum number of answers (n) to one request.")
    max_prompts: Count = Field(
        256,
        description="Maximum number of prompts in one request; if n is above 1, the maximum of "
        "prompts times n.",
    )
    max_total_tokens: Count = Field(
        4096,
        description="Maximum tokens of all answers to one prompt if n is above 1. For several "
        "answers with logprobs, tokens * (1 + logprobs) is at most 21 times this number; echoed "
        "prompts count too.",
    )
    guide_timeout_s: PositiveFloat = Field(
        5.0, description="Maximum time to compile a new guide; after this time the answer is 503."
    )
    max_compiling_guides: Count = Field(
        16, description="Maximum number of different guides that one replica compiles or queues."
    )
    max_queued_requests: NonNegativeInt = Field(
        256,
        description="Maximum number of requests that wait in one replica; more are answered with "
        "503.",
    )
    request_timeout_s: PositiveFloat = Field(
        60.0, description="Maximum time of a request; after this time the answer is 504."
    )
    stream_keep_alive_s: PositiveFloat = Field(
        3.0,
        description="Maximum silence of a stream. Then a comment is sent, so that no proxy "
        "ends the connection. Also the maximum wait for the status code of a stream.",
    )
    idempotency_ttl_s: Count = Field(
        3600,
        description="How long answers to requests with an Idempotency-Key are kept for retries.",
    )
    max_idempotent_bytes: NonNegativeInt = Field(
        65_536,
        description="Maximum size of an answer that is kept for retries; a longer one is "
        "generated again from the same seed.",
    )
    drain_timeout_s: PositiveFloat = Field(
        20.0, description="How long a stopping service lets running requests finish."
    )
    start_timeout_s: PositiveFloat = Field(
        300.0, description="How long a start may take until every task answers."
    )
    max_file_bytes: Count = Field(104_857_600, description="Maximum size of an uploaded file.")
    max_files: Count = Field(
        1000,
        description="Maximum number of files in the store; at this number no more files or "
        "batches are accepted.",
    )
    max_files_bytes: Count = Field(
        2_147_483_648,
        description="Maximum size of all files together; at this size no more files or batches "
        "are accepted.",
    )
    file_ttl_s: int = Field(
        604_800, ge=3600, description="How long files and ended batches are kept."
    )
    max_uploads: Count = Field(
        4,
        description="Maximum number of simultaneous uploads to one gateway, which keeps them on "
        "its disk until they are complete.",
    )
    upload_timeout_s: PositiveFloat = Field(
        600.0, description="Maximum time until an uploaded file is received and stored."
    )
    max_batches: Count = Field(
        1000,
        description="Maximum number of batches in the store, ended ones included; more are "
        "answered with 429.",
    )
    max_batch_lines: Count = Field(100_000, description="Maximum number of requests in one batch.")
    max_open_batch_lines: Count = Field(
        500_000,
        description="Maximum number of lines in the unfinished batches of one API key, or in all "
        "unfinished batches if no key is required.",
    )

    store_threads: Count = Field(
        4,
        description="Number of threads of a gateway for each kind of Redis call: API keys, "
        "retries, files.",
    )
    max_store_calls: Count = Field(
        256, description="Maximum number of calls of each kind that wait for a thread."
    )
    store_timeout_s: PositiveFloat = Field(
        2.0,
        description="Maximum time of a Redis call. After this time, API keys are used as last "
        "read, and answers to retries are generated again.",
    )
    store_pause_s: NonNegativeFloat = Field(
        1.0, description="Pause between two Redis calls while Redis fails."
    )
    file_timeout_s: PositiveFloat = Field(
        20.0, description="Maximum time to read or write a part of a file or the record of a batch."
    )

    @model_validator(mode="after")
    def _a_whole_batch_fits(self) -> Self:
        if self.max_open_batch_lines < self.max_batch_lines:
            raise ValueError(
                f"max_open_batch_lines is {self.max_open_batch_lines}, less than max_batch_lines, "
                f"which is {self.max_batch_lines}; no batch of that size would be accepted: set "
                f"max_open_batch_lines to {self.max_batch_lines} or more"
            )
        return self


class FailoverSettings(Section):
    """How gateways react to replicas that die or fall silent while they hold requests."""

    heartbeat_timeout_s: PositiveFloat = Field(
        5.0,
        description="A silent replica is given up after this time if another replica is available.",
    )
    max_retries: NonNegativeInt = Field(
        3, description="Maximum times that a request is sent again because its replica was lost."
    )
    no_replica_timeout_s: NonNegativeFloat = Field(
        15.0,
        description="How long a request waits for a replica if there is none; then the answer is "
        "503.",
    )
    retry_budget_ratio: float = Field(
        0.2, ge=0, le=1, description="Share of all requests that may be sent to another replica."
    )
    retry_budget_burst: Count = Field(
        1000, description="Number of requests that may be sent to another replica at once."
    )


class ConnectionSettings(Section):
    """The connections from gateways to replicas."""

    port: int = Field(
        0,
        ge=0,
        le=65_436,
        description="First port of replicas for gateways on other nodes. Each replica takes the "
        "first free port of the 100 ports from this one on. 0: any free port.",
    )
    connect_timeout_s: PositiveFloat = Field(5.0, description="Maximum time to open a connection.")
    max_message_bytes: int = Field(
        67_108_864,
        ge=65_536,
        description="Maximum size of one call or answer; a peer that leaves twice as much unread "
        "is disconnected.",
    )

    @property
    def max_unsent_bytes(self) -> int:
        """Maximum size of data that waits to be sent: two messages, so that one always fits in."""
        return 2 * self.max_message_bytes


class ShadowSettings(Section):
    """Shadow checks: answers are decoded again without drafts, in idle rows, and compared."""

    sample_rate: float = Field(
        0.0, ge=0, le=1, description="Share of drafted answers to check; 0: none."
    )
    max_waiting: Count = Field(
        64, description="Maximum number of answers per replica that wait for an idle row."
    )
    max_age_s: PositiveFloat = Field(
        30.0, description="Maximum age of a waiting answer; older ones are not checked."
    )


class CollectSettings(Section):
    """Collection of answers for `tasc refresh`, from chats without special options only."""

    sample_rate: float = Field(0.0, ge=0, le=1, description="Share of answers to keep; 0: none.")
    max_rows: Count = Field(
        10_000,
        description="Maximum number of answers to keep for the task; the oldest are removed.",
    )
    max_bytes: int = Field(
        67_108_864,
        ge=1024,
        le=2**31,
        description="Maximum size of the answers to keep for the task; the oldest are removed.",
    )
    max_buffer_bytes: int = Field(
        8_388_608,
        ge=1024,
        description="Maximum size of answers in one replica that are not in the store yet; more "
        "are dropped.",
    )
    flush_interval_s: PositiveFloat = Field(
        2.0, description="Maximum time until an answer is in the store."
    )


class AutoscalingSettings(Section):
    """Scales the replicas of a task by the number of running and queued requests."""

    min_replicas: Count = Field(1, description="Minimum number of replicas.")
    max_replicas: Count = Field(4, description="Maximum number of replicas.")
    target_ongoing_requests: float | None = Field(
        None,
        gt=0,
        description="Requests per replica above which replicas are added; unset: engine.rows.",
    )
    look_back_period_s: PositiveFloat = Field(
        30.0, description="Period over which the number of requests is averaged."
    )
    upscale_delay_s: NonNegativeFloat = Field(
        10.0, description="How long the load must be higher before replicas are added."
    )
    downscale_delay_s: NonNegativeFloat = Field(
        300.0, description="How long the load must be lower before replicas are removed."
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}, max_replicas {self.max_replicas}; "
                "swap them, or set both alike"
            )
        return self


class ServedTask(Section):
    """A task of the store to serve; each task has a separate Ray Serve deployment."""

    name: str = Field(description="Name of the task.")
    replicas: Count = Field(1, description="Number of replicas; each has its own model and batch.")
    autoscaling: AutoscalingSettings | None = Field(
        None, description="Number of replicas by load, instead of `replicas`."
    )
    max_replicas_per_node: int | None = Field(
        None,
        ge=1,
        le=100,
        description="Maximum number of replicas on one node, which limits the loss if the node "
        "fails; unset: any number.",
    )
    num_cpus: NonNegativeFloat = Field(
        0.5, description="Logical CPUs that Ray reserves for one replica."
    )
    num_gpus: NonNegativeFloat = Field(0.0, description="GPUs that Ray reserves for one replica.")
    max_surge_percent: int = Field(
        25,
        ge=0,
        le=100,
        description="Percentage of the replicas that a rolling update may add at a time; their "
        "number is rounded up. 0: old replicas stop first, for clusters without spare CPUs or "
        "GPUs.",
    )
    max_requests_per_s: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Maximum rate of requests of all clients together; more are answered with "
        "429. Unset: no limit.",
    )
    draft: DraftOverrides = Field(
        DraftOverrides(), description="Draft settings that replace the task's draft settings."
    )
    engine: EngineOverrides | None = Field(
        None,
        description="Settings of this task's engines; those that are set replace the ones in "
        "`engine` of the service, such as `backend: vllm`.",
    )
    shadow: ShadowSettings = Field(ShadowSettings(), description="Checks of answers in production.")
    collect: CollectSettings = Field(
        CollectSettings(), description="Answers to keep for the next index."
    )

    @property
    def replica_range(self) -> tuple[int, int]:
        """The minimum and maximum number of replicas."""
        scaling = self.autoscaling
        if scaling is None:
            return self.replicas, self.replicas
        return scaling.min_replicas, scaling.max_replicas

    @property
    def surge_replicas(self) -> int:
        """Maximum number of additional replicas during a rolling update."""
        return math.ceil(self.max_surge_percent * self.replica_range[1] / 100)


class AuthSettings(Section):
    """Whether requests need an API key, and how keys are cached."""

    required: bool = Field(
        False, description="Whether requests need an API key; if false, keys are not read."
    )
    cache_ttl_s: PositiveFloat = Field(
        10.0, description="Maximum time until a new or revoked key takes effect."
    )
    max_cached_keys: Count = Field(
        10_000,
        description="Maximum number of known keys, and of unknown keys, that a gateway remembers.",
    )


class HttpSettings(Section):
    """The address of the service, and its number of gateways."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: a free port.")
    gateways: Count = Field(1, description="Number of gateway processes.")
    max_gateways_per_node: int | None = Field(
        None,
        ge=1,
        le=100,
        description="Maximum number of gateways on one node, which limits the loss if the node "
        "fails; unset: any number.",
    )
    gateway_num_cpus: NonNegativeFloat = Field(
        0.5, description="Logical CPUs that Ray reserves for one gateway."
    )
    proxy: Literal["haproxy", "python"] = Field(
        "haproxy",
        description="Ray Serve's proxy if `tasc serve` starts Ray; python is used where HAProxy "
        "is missing.",
    )
    gateway_ports: int = Field(
        0,
        ge=0,
        le=65_000,
        description="First of the 64 ports that gateways behind HAProxy listen on; 0: free ports.",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="Origins of web pages whose scripts may call the service, as browsers send "
        "them (`https://example.org`), or `*` for any.",
    )


class MetricsSettings(Section):
    """Each process serves its metrics on a free port and registers the port in the store."""

    host: str | None = Field(
        None, description="Address to listen on; unset: the node's address in the Ray cluster."
    )
    ttl_s: PositiveFloat = Field(
        15.0,
        description="A process that has not renewed its registration for this time is no longer "
        "listed.",
    )


class ServeSettings(Section):
    """All settings of a service. ``tasks`` must name at least one task, each once."""

    redis_url: str | None = Field(
        None,
        repr=False,
        description="URL of Redis. The option --redis-url or the environment variable REDIS_URL "
        "takes precedence. If none of them is set, an embedded server is used.",
    )
    files_url: str | None = Field(
        None,
        repr=False,
        description="Folder of uploaded files and batch results, or an fsspec URL such as "
        "`s3://bucket/files`. Gateways and workers that do not share this folder refuse to start. "
        "Unset: `files` in the folder of `--data-dir`; a gateway that does not share this folder "
        "then accepts no files.",
    )
    tasks: tuple[ServedTask, ...] = Field(min_length=1, description="Tasks to serve, at least one.")
    http: HttpSettings = Field(HttpSettings(), description="Where the service listens.")
    engine: EngineSettings = Field(EngineSettings(), description="The engine of each replica.")
    limits: LimitSettings = Field(
        LimitSettings(), description="Limits of requests, files and batches."
    )
    failover: FailoverSettings = Field(
        FailoverSettings(), description="What happens when a replica fails."
    )
    connection: ConnectionSettings = Field(
        ConnectionSettings(), description="Connections between gateways and replicas."
    )
    auth: AuthSettings = Field(AuthSettings(), description="API keys.")
    metrics: MetricsSettings = Field(MetricsSettings(), description="Where metrics are served.")
    poll_interval_s: PositiveFloat = Field(
        2.0, description="Maximum time until a new index or task version is noticed."
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder for draft indexes on each node; unset: `tasc-serve/indexes` in "
        "XDG_CACHE_HOME, by default `~/.cache`.",
    )

    def engine_of(self, task: ServedTask) -> EngineSettings:
        """The settings of a task's engines."""
        return task.engine.over(self.engine) if task.engine else self.engine

    @property
    def gateway_limits(self) -> LimitSettings:
        """The limits; one request has at most as many answers as fit into one replica."""
        rows = min(self.engine_of(task).rows for task in self.tasks)
        capacity = rows + self.limits.max_queued_requests
        names = ("max_choices", "max_prompts")
        lowered = {name: min(getattr(self.limits, name), capacity) for name in names}
        return self.limits.model_copy(update=lowered)

    @property
    def capacity(self) -> int:
        """Maximum number of requests in rows and queues of all replicas."""
        queued = self.limits.max_queued_requests
        return sum(
            (self.engine_of(task).rows + queued) * task.replica_range[1] for task in self.tasks
        )

    @property
    def max_in_flight(self) -> int:
        """Maximum number of requests in a gateway, to limit memory; more than all queues hold."""
        return 3 * self.capacity

    def store_url(self, named: str | None) -> str | None:
        """Returns the URL of Redis; logs a warning if ``redis_url`` differs.

        Args:
            named: The URL in the option or the environment, which takes precedence.
        """
        if named and self.redis_url and named != self.redis_url:
            log.warning(
                "using Redis at %s from --redis-url or REDIS_URL, not %s from the settings file; "
                "unset REDIS_URL to use the URL in the settings file",
                redact(named),
                redact(self.redis_url),
            )
        return named or self.redis_url

    @model_validator(mode="after")
    def _files_are_at_one_place(self) -> Self:
        url = self.files_url
        if url is not None and "://" not in url and not Path(url).is_absolute():
            raise ValueError(
                f"files_url is {url!r}, which depends on the current folder of each process; use "
                "an absolute path, or a URL such as s3://bucket/files"
            )
        return self

    @model_validator(mode="after")
    def _a_body_fits_a_message(self) -> Self:
        body, message = self.limits.max_body_bytes, self.connection.max_message_bytes
        if message < 2 * body:
            raise ValueError(
                f"connection.max_message_bytes is {message}, less than twice "
                f"limits.max_body_bytes, which is {body}; a prompt might not reach a replica: set "
                f"connection.max_message_bytes to {2 * body} or more"
            )
        return self

    @model_validator(mode="after")
    def _engines_of_tasks_are_valid(self) -> Self:
        for task in self.tasks:
            try:
                self.engine_of(task)
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]["msg"]
                raise ValueError(f"engine of task {task.name}: {fault}") from None
        return self

    @model_validator(mode="after")
    def _tasks_are_named_once(self) -> Self:
        names = [task.name for task in self.tasks]
        if twice := {n for n in names if names.count(n) > 1}:
            raise ValueError(f"task {', '.join(sorted(twice))} is listed twice; list each once")
        return self


def load_settings(path: Path) -> ServeSettings:
    """Reads a YAML settings file.

    Raises:
        SettingsError: The file cannot be read or is not a YAML mapping, or a field is unknown or
            out of range.
    """
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        # Not chained, because the library's message quotes the line, which may have a password.
        raise SettingsError(f"{path} cannot be read as YAML: {_fault(error)}") from None
    except FileNotFoundError as error:
        raise SettingsError(f"there is no file {path}; check the spelling of the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as YAML: {error}") from error
    try:
        return ServeSettings.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()
        )
        raise SettingsError(f"{path}: {faults}") from error


def _fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}"
    return "it has a character that YAML does not allow"


def require_free(host: str, port: int) -> None:
    """Raises ServiceError if ``port`` cannot be bound; port 0 means any free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceError(
                f"{host}:{port} cannot be used ({error}); end the process that uses it, or "
                "choose another port: http.port in the settings, --port of `tasc demo --serve`"
            ) from error
