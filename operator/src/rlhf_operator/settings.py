"""What an administrator may set, by environment variables `RLHF_OPERATOR_<FIELD>`; an empty one is as none."""

from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from rlhf_api import FieldError, SpecError


def _network(text: str) -> str:
    try:
        return str(ip_network(text))
    except ValueError:
        raise PydanticCustomError("network", "a network such as 10.0.0.0/24, or an address") from None


Seconds = Annotated[float, Field(gt=0)]
Network = Annotated[str, AfterValidator(_network)]
"""A network as a CIDR."""


class Settings(BaseSettings):
    """The operator's settings. Their defaults are those of a chart without values."""

    model_config = SettingsConfigDict(
        env_prefix="RLHF_OPERATOR_", env_ignore_empty=True, frozen=True, use_attribute_docstrings=True
    )

    namespaces: Annotated[tuple[str, ...], NoDecode] = ()
    """Namespaces whose jobs are run, separated by commas; none means all, which takes cluster-wide rights."""
    default_image: str | None = None
    """Runtime image of jobs that name none."""
    api_server_cidrs: Annotated[tuple[Network, ...], NoDecode] = ()
    """Networks that the API server's service proxy comes from, separated by commas: with them `rlhf logs`, and an
    operator outside of the cluster, reach heads where NetworkPolicies are enforced."""
    via_proxy: bool | None = None
    """Reach Ray through the API server's service proxy. By default so outside of a cluster, and never in one."""
    resync_seconds: Seconds = 60
    """How often all jobs are listed and looked at: how long a change can go unnoticed when a watch goes silent."""
    follow_seconds: Seconds = 30
    """How often a job that trains is looked at; more often in its first minutes."""
    job_api_patience_seconds: Seconds = 300
    """How long Ray's job API may stay away before the cluster counts as lost."""
    retry_delay_seconds: Seconds = 10
    """Delay before a second try; it doubles with each further one, up to 30 times as long."""
    max_concurrent: Annotated[int, Field(ge=1, le=1000)] = 200
    """Jobs that are looked at at once; most of them wait for an answer."""
    api_connections: Annotated[int, Field(ge=1, le=200)] = 16
    """Requests to the API server at once."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """Where Prometheus reads `/metrics`; 0 for a free port."""
    health_port: Annotated[int, Field(ge=0, le=65535)] = 8081
    """Where probes read `/healthz`; 0 for a free port."""
    log_format: Literal["text", "json"] = "text"
    """How log lines are written."""

    @field_validator("namespaces", "api_server_cidrs", mode="before")
    @classmethod
    def _by_commas(cls, value: object) -> object:
        return tuple(filter(None, (name.strip() for name in value.split(",")))) if isinstance(value, str) else value

    @classmethod
    def read(cls) -> "Settings":
        """The settings of this process.

        Raises:
            SpecError: with every variable that cannot be read.
        """
        try:
            return cls()
        except ValidationError as error:
            raise SpecError(
                FieldError(
                    f"RLHF_OPERATOR_{str(problem['loc'][0]).upper()}",
                    repr(problem["input"]),
                    problem["msg"].removeprefix("Input should be "),
                    "correct the variable, or remove it",
                )
                for problem in error.errors()
            ) from None
