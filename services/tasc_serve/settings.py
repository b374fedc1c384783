"""The settings file of the service, read by ``tasc serve --config``."""

import math
import socket
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from tasc_runtime.engine_settings import DraftOverrides, EngineSettings, Section
from tasc_runtime.errors import ServiceError, SettingsError


class LimitSettings(Section):
    """Bounds on what one client can ask for, and for how long anything may take."""

    max_prompt_bytes: int = Field(262_144, ge=1)
    max_body_bytes: int = Field(4_194_304, ge=1)
    max_tokens: int = Field(512, ge=1, description="most max_tokens a request may ask for")
    max_choices: int = Field(16, ge=1, description="most answers (n) to one request")
    max_prompts: int = Field(
        256, ge=1, description="most prompts of one request; with n above 1, their answers"
    )
    max_total_tokens: int = Field(
        4096, ge=1, description="most tokens of all answers to one prompt with n above 1"
    )
    guide_timeout_s: float = Field(
        5.0, gt=0, description="until the guide of a request is compiled, which is done once"
    )
    max_compiling_guides: int = Field(
        16, ge=1, description="different guides being compiled or waiting for it in one replica"
    )
    max_guide_choices: int = Field(20_000, ge=1, description="choices of one guide")
    max_guide_choices_bytes: int = Field(2_000_000, ge=1, description="of one guide, together")
    max_guide_bytes: int = Field(
        65_536, ge=1, description="of a schema, a regular expression or a grammar"
    )
    max_queued_requests: int = Field(256, ge=0, description="requests waiting in one replica")
    request_timeout_s: float = Field(60.0, gt=0)
    idempotency_ttl_s: int = Field(
        3600, ge=1, description="answers are kept for retries with a key"
    )
    max_idempotent_bytes: int = Field(65_536, ge=0, description="a longer answer is made again")
    drain_timeout_s: float = Field(20.0, gt=0)
    start_timeout_s: float = Field(300.0, gt=0, description="until every task answers")
    max_file_bytes: int = Field(104_857_600, ge=1, description="of an uploaded file")
    max_files: int = Field(1000, ge=1, description="at so many, no more files or batches")
    max_files_bytes: int = Field(2_147_483_648, ge=1, description="of all files; the same")
    file_ttl_s: int = Field(604_800, ge=3600, description="of files and ended batches")
    max_uploads: int = Field(
        4, ge=1, description="files being uploaded to one gateway, on its disk until they are whole"
    )
    upload_timeout_s: float = Field(600.0, gt=0, description="until an uploaded file is stored")
    max_batches: int = Field(1000, ge=1, description="batches kept, those that ended counted")
    max_batch_lines: int = Field(100_000, ge=1, description="requests of one batch")
    max_open_batch_lines: int = Field(
        500_000, ge=1, description="lines of one key's batches that have not ended"
    )

    store_threads: int = Field(
        4, ge=1, description="of a gateway that call Redis, each for API keys, retries and files"
    )
    max_store_calls: int = Field(256, ge=1, description="waiting for the threads of one kind")
    store_timeout_s: float = Field(
        2.0,
        gt=0,
        description="until Redis answers; else keys count as last seen, retries run anew",
    )
    store_pause_s: float = Field(1.0, ge=0, description="between two calls while Redis fails")
    file_timeout_s: float = Field(
        20.0, gt=0, description="for Redis to take or give a part of a file, or a batch's record"
    )

    @model_validator(mode="after")
    def _a_whole_batch_fits(self) -> Self:
        if self.max_open_batch_lines < self.max_batch_lines:
            raise ValueError(
                f"max_open_batch_lines is {self.max_open_batch_lines}, less than max_batch_lines, "
                f"which is {self.max_batch_lines}; no such batch would be taken: raise the first"
            )
        return self

    def over_total(self, n: int, max_tokens: int) -> str | None:
        """What is wrong with ``n`` answers of ``max_tokens`` each, if that is too much."""
        total, most = n * max_tokens, self.max_total_tokens
        if n == 1 or total <= most:
            return None
        return (
            f"n is {n} answers of {max_tokens} tokens, {total} together; at most {most} are taken"
        )


class FailoverSettings(Section):
    """What a gateway does about replicas that die or fall silent with requests in hand."""

    heartbeat_timeout_s: float = Field(
        5.0, gt=0, description="a replica not heard of for this long is given up, if another is"
    )
    max_retries: int = Field(3, ge=0, description="replicas that one request may outlive")
    no_replica_timeout_s: float = Field(
        15.0, ge=0, description="how long a request waits for a replica where there is none"
    )
    retry_budget_ratio: float = Field(
        0.2, ge=0, le=1, description="of all requests, those that may be made again"
    )
    retry_budget_burst: int = Field(1000, ge=1, description="that may be made again at once")


class ConnectionSettings(Section):
    """The connection of each gateway to each replica."""

    port: int = Field(
        0,
        ge=0,
        le=65_436,
        description="of replicas for gateways on other nodes: each takes the first free one of the"
        " hundred from here; 0: any free one",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="until a connection is made")
    max_message_bytes: int = Field(67_108_864, ge=65_536, description="of one call or answer")
    max_buffer_bytes: int = Field(
        134_217_728, ge=65_536, description="that may wait to be sent; else it is cut off"
    )

    @model_validator(mode="after")
    def _a_message_fits(self) -> Self:
        if self.max_buffer_bytes < 2 * self.max_message_bytes:
            raise ValueError(
                f"max_buffer_bytes is {self.max_buffer_bytes}, less than twice max_message_bytes, "
                f"which is {self.max_message_bytes}; one message could end a connection: raise it"
            )
        return self


class ShadowSettings(Section):
    """Answers that are decoded again without drafts in rows that nobody needs, and compared."""

    sample_rate: float = Field(0.0, ge=0, le=1, description="share of drafted answers; 0: none")
    max_waiting: int = Field(64, ge=1, description="answers of one replica that wait for a row")
    max_age_s: float = Field(30.0, gt=0, description="older ones are not checked any more")


class CollectSettings(Section):
    """Finished answers that are kept for `tasc refresh`, of chats that ask for nothing special."""

    sample_rate: float = Field(0.0, ge=0, le=1, description="of the answers; 0: none is kept")
    max_rows: int = Field(10_000, ge=1, description="kept for the task; the oldest go")
    max_bytes: int = Field(
        67_108_864, ge=1024, le=2**31, description="kept for the task; the oldest go"
    )
    max_buffer_bytes: int = Field(
        8_388_608, ge=1024, description="of one replica on their way there; more are dropped"
    )
    flush_interval_s: float = Field(2.0, gt=0, description="longest time until one is in the store")


class AutoscalingSettings(Section):
    """How many replicas a task has, by the requests they hold, running and queued."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: float | None = Field(
        None, gt=0, description="of one replica; more replicas beyond; unset: engine.rows"
    )
    look_back_period_s: float = Field(30.0, gt=0, description="their mean over so long counts")
    upscale_delay_s: float = Field(10.0, ge=0)
    downscale_delay_s: float = Field(300.0, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}, max_replicas {self.max_replicas}; "
                "swap them, or set both alike"
            )
        return self


class ServedTask(Section):
    """A task of the store that this service answers for, in a Serve deployment of its own."""

    name: str
    replicas: int = Field(1, ge=1)
    autoscaling: AutoscalingSettings | None = Field(None, description="in place of replicas")
    max_replicas_per_node: int | None = Field(
        None, ge=1, le=100, description="fewer are lost with a node; unset: any number"
    )
    num_cpus: float = Field(0.5, ge=0, description="logical CPUs Ray reserves for one replica")
    num_gpus: float = Field(0.0, ge=0, description="GPUs Ray reserves for one replica")
    max_surge_percent: int = Field(
        25,
        ge=0,
        le=100,
        description="replicas that a rolling update may add at a time, rounded up; 0: old ones "
        "stop first, for clusters without CPUs or GPUs to spare",
    )
    max_requests_per_s: float | None = Field(
        None, gt=0, le=1e6, description="of all clients together; more are answered 429"
    )
    draft: DraftOverrides = DraftOverrides()
    shadow: ShadowSettings = ShadowSettings()
    collect: CollectSettings = CollectSettings()

    @property
    def replica_range(self) -> tuple[int, int]:
        """How many replicas there are at least and at most."""
        scaling = self.autoscaling
        if scaling is None:
            return self.replicas, self.replicas
        return scaling.min_replicas, scaling.max_replicas

    @property
    def surge_replicas(self) -> int:
        """How many more there may be during a rolling update."""
        return math.ceil(self.max_surge_percent * self.replica_range[1] / 100)


class AuthSettings(Section):
    """Whether requests need an API key, and how keys are remembered."""

    required: bool = Field(False, description="false: no key is required, none is read")
    cache_ttl_s: float = Field(
        10.0, gt=0, description="a revoked or a new key is noticed within this time"
    )
    max_cached_keys: int = Field(
        10_000, ge=1, description="keys remembered by a gateway, and as many unknown ones"
    )


class HttpSettings(Section):
    """Where the service listens, and how many gateways share the work."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 takes a free one")
    gateways: int = Field(1, ge=1)
    max_gateways_per_node: int | None = Field(
        None, ge=1, le=100, description="fewer are lost with a node; unset: any number"
    )
    gateway_num_cpus: float = Field(0.5, ge=0)
    proxy: Literal["haproxy", "python"] = Field(
        "haproxy", description="Ray Serve's, of a Ray of our own; python where haproxy is missing"
    )
    gateway_ports: int = Field(
        0,
        ge=0,
        le=65_000,
        description="first of the 64 that gateways behind HAProxy listen on; 0 takes free ones",
    )


class MetricsSettings(Section):
    """Each process serves its metrics on a free port and registers it in the store."""

    host: str | None = Field(None, description="unset: the node's address in the Ray cluster")
    ttl_s: float = Field(15.0, gt=0, description="a port not renewed for this long is forgotten")


class ServeSettings(Section):
    """Everything the service needs to know. ``tasks`` must name at least one task, each once."""

    redis_url: str | None = Field(
        None, repr=False, description="unset: REDIS_URL, else an embedded server"
    )
    tasks: tuple[ServedTask, ...] = Field(min_length=1)
    http: HttpSettings = HttpSettings()
    engine: EngineSettings = EngineSettings()
    limits: LimitSettings = LimitSettings()
    failover: FailoverSettings = FailoverSettings()
    connection: ConnectionSettings = ConnectionSettings()
    auth: AuthSettings = AuthSettings()
    metrics: MetricsSettings = MetricsSettings()
    poll_interval_s: float = Field(
        2.0, gt=0, description="longest time until a new index or record is seen"
    )
    cache_dir: Path | None = Field(None, description="node-local index cache; unset: per user")

    @property
    def gateway_limits(self) -> LimitSettings:
        """The limits with no more answers to one request than a replica holds."""
        capacity = self.engine.rows + self.limits.max_queued_requests
        names = ("max_choices", "max_prompts")
        most = {name: min(getattr(self.limits, name), capacity) for name in names}
        return self.limits.model_copy(update=most)

    @model_validator(mode="after")
    def _a_body_fits_a_message(self) -> Self:
        body, most = self.limits.max_body_bytes, self.connection.max_message_bytes
        if most < 2 * body:
            raise ValueError(
                f"connection.max_message_bytes is {most}, less than twice limits.max_body_bytes, "
                f"which is {body}; a prompt might not reach a replica: raise the first"
            )
        return self

    @model_validator(mode="after")
    def _tasks_are_named_once(self) -> Self:
        names = [task.name for task in self.tasks]
        if twice := {n for n in names if names.count(n) > 1}:
            raise ValueError(f"task {', '.join(sorted(twice))} is listed twice; list each once")
        return self


def load_settings(path: Path) -> ServeSettings:
    """Read a YAML settings file.

    Raises:
        SettingsError: It cannot be read, is no YAML mapping, or a field is unknown or out of range.
    """
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        # Not chained: the library's message quotes the line, and with it maybe a password.
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
