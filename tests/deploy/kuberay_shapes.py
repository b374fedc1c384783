"""The fields of KubeRay's objects that our files use; other ones, such as typos, are refused."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class Auth(Shape):
    mode: Literal["token", "disabled"]
    secret_name: str


class Autoscaler(Shape):
    idle_timeout_seconds: int
    resources: dict[str, Any]
    security_context: dict[str, Any]


class Head(Shape):
    ray_start_params: dict[str, str]
    template: dict[str, Any]


class Workers(Head):
    group_name: str
    replicas: int
    min_replicas: int = Field(ge=1)
    max_replicas: int


class Cluster(Shape):
    ray_version: str
    auth_options: Auth
    enable_in_tree_autoscaling: bool = False
    autoscaler_options: Autoscaler | None = None
    head_group_spec: Head
    worker_group_specs: list[Workers] = Field(min_length=1)


class ServiceSpec(Shape):
    serve_config_v2: str = Field(min_length=1)
    exclude_head_pod_from_serve_svc: bool
    ray_cluster_deletion_delay_seconds: int
    ray_cluster_config: Cluster


class Applied(Shape):
    api_version: Literal["ray.io/v1"]
    metadata: dict[str, str]


class RayService(Applied):
    kind: Literal["RayService"]
    spec: ServiceSpec


class JobSpec(Shape):
    entrypoint: str
    submission_mode: Literal["K8sJobMode"]
    backoff_limit: int
    shutdown_after_job_finishes: Literal[True]
    ttl_seconds_after_finished: int
    submitter_pod_template: dict[str, Any]
    ray_cluster_spec: Cluster


class RayJob(Applied):
    kind: Literal["RayJob"]
    spec: JobSpec
