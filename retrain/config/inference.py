"""[inference]: who samples, this process or servers, and what is asked of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from retrain.config.base import (
    Count,
    Finding,
    NotNegative,
    OptionalPositive,
    OptionalText,
    Positive,
    Role,
    Section,
    Text,
    Unavailable,
    UsedWhen,
)

SERVERS = ("vllm", "sglang", "openai")
"""Values of ``engine`` that sample from servers."""
_ELSEWHERE = ("there is no such engine here", 'engine = "vllm", or "openai" for what speaks its protocol')
_OF_SERVERS = UsedWhen("inference.engine", SERVERS)
_WHERE_WATCHED = UsedWhen("inference.engine", SERVERS, unless="model.quantized", unless_words="[model] quantize")
MISMATCH_LIMITS = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 0.02}
"""Of ``mismatch_limit`` where it is not set (nats²), by the number format of the base in training. Sound servers are at
1e-9 in float32 and at 1e-4 to 3e-3 in bfloat16; an adapter that is one update old lies far above in float32."""
CANARY_TOLERANCES = {"float64": 2e-3, "float32": 2e-3, "bfloat16": 0.1}
"""Of ``tolerance`` where it is not set (nats), likewise."""


def _local_engine(value: Any) -> Any:
    return "local" if value == "pytorch" else value


def _addresses(value: Any) -> Any:
    """One address is a list of one; a blank one is none."""
    if isinstance(value, str):
        return [value] if value.strip() else None
    return value


class Inference(Section):
    """How completions are sampled: by the model that is trained, or by servers that hold the same base model and are
    given the runs' adapters."""

    role: ClassVar[Role] = Role.SAMPLES

    engine: Annotated[
        Literal["local", "vllm", "sglang", "openai"],
        BeforeValidator(_local_engine),
        Unavailable({name: _ELSEWHERE for name in ("max", "mlx")}),
    ] = "local"
    """`local`: the model that is trained also samples. `vllm`, `sglang`: servers of that kind. `openai`: servers with
    OpenAI's completions that return token ids, and load adapters by vLLM's routes. `pytorch` is read as `local`."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Number format of the base model: `auto` is bfloat16 on a GPU and float32 on the CPU. A server has its own."""
    url: Annotated[
        Annotated[list[Text], Field(min_length=1)] | None,
        BeforeValidator(_addresses, json_schema_input_type=list[Text] | str | None),
        Role.NAMES,
        _OF_SERVERS,
    ] = None
    """Address of a server such as `http://gpu1:8000`, or a list of several that share the load."""
    launch: Annotated[OptionalText, Role.NAMES, _OF_SERVERS] = None
    """Command of a server that is started here, watched, started again when it dies or hangs, and ended with the
    campaign, in place of `url`, such as `vllm serve {model} --enable-lora --max-lora-rank 32`. `{model}`, `{host}` and
    `{port}` are filled in; where it has none, a free port and `--host 127.0.0.1` are added. What it says goes to
    `server.log` of the run or campaign. With workers the controller starts it for all of them; with `executor = "ray"`
    Ray finds a node for it, where it listens at the node's address if the cluster has other machines."""
    replicas: Annotated[Count, Role.NAMES, UsedWhen("inference.engine", SERVERS)] = 1
    """How many servers `launch` starts; they share the load, and their logs are `server_1.log` and so on."""
    launch_gpus: Annotated[OptionalText, Role.NAMES, _OF_SERVERS] = None
    """The GPUs of the launched servers, as in CUDA_VISIBLE_DEVICES: `1`, or `1,2`; `replicas` divide them up in order.
    Unset: those that there are. Workers have the others."""
    api_key_env: Annotated[OptionalText, Role.NAMES, _OF_SERVERS] = None
    """Environment variable that holds the servers' API key. The key itself is written nowhere."""
    adapter_dir: Annotated[OptionalText, Role.NAMES, _OF_SERVERS] = None
    """Directory for the adapters of the moment, which this process and the servers see under the same path. Unset:
    `adapters/` in the directory of the run or campaign, for servers on this machine or on the same file system."""
    upload: Annotated[bool, Role.NAMES, UsedWhen("inference.engine", ("vllm", "openai"))] = False
    """Send adapters in the request that loads them, to servers that see no directory of ours: `retrain serve` takes
    that, vLLM does not."""
    timeout_s: Annotated[Positive, Role.SPEED, _OF_SERVERS] = 600.0
    """Seconds after which a request without an answer is given up and made again."""
    patience_s: Annotated[NotNegative, Role.SPEED, _OF_SERVERS] = 600.0
    """Seconds that all servers may be away, being started anew for instance, before the runs stop and are saved; also
    how long a launched server may take to start."""
    max_in_flight: Annotated[Count, Role.SPEED, _OF_SERVERS] = 256
    """Most requests that a server has at a time."""
    sleep: Annotated[bool, Role.SPEED, UsedWhen("inference.engine", ("vllm",))] = False
    """Have vLLM free its GPU while this process trains on it, for one GPU shared by both; it needs
    `--enable-sleep-mode`, and VLLM_SERVER_DEV_MODE=1 in its environment (which `launch` sets)."""
    swap: Annotated[Literal["between", "in_flight"], _OF_SERVERS] = "between"
    """With `max_off_policy_steps`: whether an episode is drawn to its end by the weights that began it, or every turn
    of it by the newest that there are; each token keeps the version that drew it."""
    tolerance: Annotated[OptionalPositive, Role.SPEED, _OF_SERVERS] = None
    """Root mean square (nats) up to which a server's log-probabilities of the canary's tokens may differ from our own
    before anything is trained. Unset: 0.002, and 0.1 where the base is in bfloat16."""
    mismatch_limit: Annotated[OptionalPositive, Role.SPEED, _WHERE_WATCHED] = None
    """`kl_sample_train_v2` (nats²) above which a run warns, and stops when the next step is above it too. Unset: 1e-4,
    and 0.02 where the base is in bfloat16."""

    @property
    def served(self) -> bool:
        return self.engine in SERVERS

    def mismatch_limit_in(self, dtype: str) -> float:
        """``mismatch_limit`` for a base in this number format."""
        return self.mismatch_limit or MISMATCH_LIMITS.get(dtype, MISMATCH_LIMITS["bfloat16"])

    def tolerance_in(self, dtype: str) -> float:
        """``tolerance`` for a base in this number format."""
        return self.tolerance or CANARY_TOLERANCES.get(dtype, CANARY_TOLERANCES["bfloat16"])

    def findings(self) -> Iterator[Finding]:
        """Servers are either there or started here."""
        if not self.served:
            return
        if self.url is None and self.launch is None:
            yield Finding(
                ("inference.engine", "inference.url", "inference.launch"),
                f'is "{self.engine}", and neither url nor launch says where its server is',
                'url = "http://127.0.0.1:8000", or launch = "vllm serve {model} --enable-lora"',
            )
        if self.url is not None and self.launch is not None:
            yield Finding(
                ("inference.launch", "inference.url"),
                "starts a server here, while url names one that is there",
                "remove one of the two",
            )
        for address in self.url or ():
            if not address.startswith(("http://", "https://")):
                yield Finding(
                    ("inference.url",), f'has "{address}", which is no address', f'url = "http://{address.lstrip("/")}"'
                )
        for key, default in (("launch_gpus", None), ("replicas", 1)):
            if self.launch is None and getattr(self, key) != default:
                keys = (f"inference.{key}", "inference.launch")
                yield Finding(keys, "has no effect without launch", "remove the line")
        if self.launch is not None and self.replicas > 1 and (port := re.search(r"--port[ =]+(\d+)", self.launch)):
            yield Finding(
                ("inference.launch", "inference.replicas"),
                f"has {port[0]}, and {self.replicas} servers cannot listen at one port of a machine",
                "remove --port: each gets a free one",
            )
        gpus = len((self.launch_gpus or "").split(","))
        if self.launch_gpus is not None and gpus % self.replicas:
            yield Finding(
                ("inference.launch_gpus", "inference.replicas"),
                f"has {gpus}, which {self.replicas} replicas cannot divide up evenly",
                f"replicas = {gpus}",
            )
