"""[ray]: which Ray cluster trains a campaign, and what its nodes get."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from retrain.config.base import Count, NotNegative, Role, Section, fault


def _address(value: str) -> str:
    if value in ("auto", "local"):
        return value
    host, _, port = value.rpartition(":")
    if value.startswith("ray://"):
        what = f'is "{value}", the address of a Ray client, and a campaign shares a directory with its workers'
        raise fault(what, 'address = "auto", typed on a node of the cluster, as with ray job submit')
    if not (host and port.isdigit()):
        raise fault(f'is "{value}"; it is "auto", "local" or host:port', 'address = "auto"')
    return value


class Ray(Section):
    """The cluster of `[campaign] executor = "ray"`; without effect for other executors."""

    role: ClassVar[Role] = Role.NAMES

    address: Annotated[str, AfterValidator(_address)] = "auto"
    """Which cluster: `auto` is the one that `RAY_ADDRESS` names or that runs on this machine, `local` one that is
    started for this campaign and ends with it, else `host:port` of a cluster's head."""
    cpus: Count = 1
    """CPUs that each worker asks the cluster for, and threads that it computes with. A worker holds a base model of its
    own: where a node has little memory for its CPUs, ask for more of them."""
    server_gpus: NotNegative = 1.0
    """GPUs that each server of `[inference] launch` asks the cluster for, where workers have GPUs; parts too."""
    server_cpus: Count = 1
    """CPUs that each such server asks for."""
    ship: bool = True
    """Whether nodes of other machines get this code, and the files beside the campaign's file, through Ray's
    `runtime_env`; turned off, retrain has to be installed on them. `ray job submit` ships what it is told itself."""
    runtime_env: dict[str, str | list[str] | dict[str, str]] = Field(default_factory=dict)
    """Further fields of Ray's `runtime_env`, such as `{ pip = ["math-verify"], env_vars = { HF_HOME = "/shared/hf" }
    }`."""
