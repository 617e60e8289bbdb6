"""[backend], [inference], [ray], [slurm]: devices, engines and cluster resources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from retrain.config.base import (
    ActiveIf,
    ConfigIssue,
    Count,
    Devices,
    NotNegative,
    OptionalCount,
    OptionalPositive,
    OptionalText,
    Plugin,
    Role,
    Seconds,
    Section,
    Text,
    UnsupportedValues,
    fault,
)

_NO_REMOTE = ("remote training is not available", 'backend = "local"')


class BackendSection(Section, role=Role.SAMPLES):
    """Backend and devices of training."""

    backend: Annotated[Literal["local"] | Plugin, UnsupportedValues({"tinker": _NO_REMOTE, "prime_rl": _NO_REMOTE})] = (
        "local"
    )
    """`local`: torch, transformers and peft in this process. Or a `module:Class` of your own."""
    options: Annotated[
        dict[str, str | int | float | bool], ActiveIf("backend.backend", ("module:Class",), plugins=True)
    ] = Field(default_factory=dict)
    """Settings of your own backend, such as `{ address = "…" }`, which it reads from its configuration."""
    devices: Annotated[Devices, Role.NAMES] = "auto"
    """Devices: `auto` (GPUs when there are any), `cpu`, or one GPU such as `gpu:0`. With `shard` or `[campaign]
    executor = "processes"` also several: `all`, a range such as `gpu:0-7`, or a list such as `["gpu:0", "gpu:2"]`."""
    shard: Annotated[Literal["none", "dp", "fsdp2"], Role.NAMES] = "none"
    """`dp`: several processes, called ranks, train each cohort together; each holds the base, and samples and updates
    with its share of the rollouts. `fsdp2`: each rank holds a shard of the base, for a base that does not fit on a
    device. See docs/gpu_servers.md."""
    ranks: Annotated[Literal["auto"] | Count, Role.NAMES] = "auto"
    """Number of processes of `shard`. `auto`: those that torchrun has started, else one for each GPU of `devices`, or
    of each worker's `[campaign] gpus_per_cohort`. Without torchrun, retrain starts them itself."""
    adapter_path: Annotated[OptionalText, Role.RECORDS] = None
    """Directory that also receives the files of the final adapter, beside its other contents; a campaign writes one
    directory per run beneath it. The run directory's `final/` is written in any case."""

    @property
    def named_gpus(self) -> list[str]:
        """GPUs that `devices` lists; none for `auto`, `all` and `cpu`."""
        if isinstance(self.devices, list):
            return self.devices
        if not self.devices.startswith("gpu:"):
            return []
        first, _, last = self.devices.removeprefix("gpu:").partition("-")
        return [f"gpu:{index}" for index in range(int(first), int(last or first) + 1)]

    @property
    def device(self) -> str:
        """Device of a process that was not assigned one: `auto`, `cpu`, or the first GPU."""
        if self.named_gpus:
            return self.named_gpus[0]
        return "cpu" if self.devices == "cpu" else "auto"

    @property
    def several(self) -> bool:
        return self.devices == "all" or len(self.named_gpus) > 1


SERVERS = ("vllm", "sglang", "openai")
"""Values of ``engine`` that sample from servers."""
AUTO = "auto"
Released = Literal["", "kv", "weights"]
"""Memory that a sleeping server frees: none, its KV cache, or its weights too."""
_ELSEWHERE = ("there is no such engine here", 'engine = "vllm", or "openai" for a compatible server')
_MAYBE_SERVED = (*SERVERS, AUTO)
_OF_SERVERS = ActiveIf("inference.engine", _MAYBE_SERVED)
_WHERE_WATCHED = ActiveIf("inference.engine", _MAYBE_SERVED, unless="model.quantized", unless_text="[model] quantize")
MISMATCH_LIMITS = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 0.02}
"""Defaults of ``mismatch_limit`` (nats²) by the base's number format. Correct servers measure 1e-9 in float32 and 1e-4
to 3e-3 in bfloat16. With an adapter that is one update old, float32 is far above its limit."""
CANARY_TOLERANCES = {"float64": 2e-3, "float32": 2e-3, "bfloat16": 0.1}
"""Defaults of ``tolerance`` (nats) by the base's number format."""


def _addresses(value: object) -> object:
    """Return a single address as a list, a blank text as None, and any other value unchanged."""
    if isinstance(value, str):
        return [value] if value.strip() else None
    return value


class Inference(Section, role=Role.SAMPLES):
    """Engine of completions: the trained model, or servers that hold the same base and load the adapters."""

    engine: Annotated[
        Literal["auto", "local", "vllm", "sglang", "openai"],
        BeforeValidator(lambda value: "local" if value == "pytorch" else value),
        UnsupportedValues({name: _ELSEWHERE for name in ("max", "mlx")}),
    ] = "auto"
    """`auto`: `vllm` on a GPU where vLLM is installed and fits, else `local`; with `url` or `launch` always `vllm`.
    `local`: the trained model also samples. `vllm`, `sglang`: servers of that kind. `openai`: servers with OpenAI's
    completions that return token ids and load adapters by vLLM's routes. `pytorch` is read as `local`."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Number format of the base model: `auto` is bfloat16 on a GPU and float32 on the CPU. Servers choose their own."""
    url: Annotated[
        Annotated[list[Text], Field(min_length=1)] | None,
        BeforeValidator(_addresses, json_schema_input_type=list[Text] | str | None),
        Role.NAMES,
        _OF_SERVERS,
    ] = None
    """Address of a server such as `http://gpu1:8000`, or a list of several that share the load."""
    launch: Annotated[OptionalText, Role.NAMES, _OF_SERVERS] = None
    """Command that starts a server for the campaign, in place of `url`. `auto`, the default of `engine = "vllm"`:
    retrain composes vLLM's command and divides the GPU; `plan.json` has the result. Else a command such as `vllm serve
    {model} --enable-lora --max-lora-rank 32`. The server is restarted when it dies or hangs. `{model}` (the directory
    of the model's files; those of a hub model are downloaded first), `{host}` and `{port}` are filled in; if missing, a
    free port and `--host 127.0.0.1` are added. Output goes to `server.log` of the run or campaign. With workers, the
    controller starts it for all of them, or each worker its own if it sleeps (`auto` with `executor = "processes"`);
    with `executor = "ray"` it runs on a node that Ray chooses, and listens at the node's address if the cluster has
    other machines."""
    launch_options: Annotated[OptionalText, Role.NAMES, _OF_SERVERS] = None
    """Options that are appended to the command of `launch = "auto"`; an option that is there already is replaced."""
    python: Annotated[OptionalText, Role.NAMES, _OF_SERVERS] = None
    """Python interpreter of another environment that holds vLLM, for `engine = "auto"` and `launch = "auto"`. Unset is
    the one that runs retrain."""
    replicas: Annotated[Count, Role.NAMES, _OF_SERVERS] = 1
    """Number of servers that `launch` starts; they share the load and log to `server_1.log` and so on."""
    launch_gpus: Annotated[
        OptionalText,
        BeforeValidator(lambda value: str(value) if type(value) is int else value),  # --set inference.launch_gpus=1
        Role.NAMES,
        _OF_SERVERS,
    ] = None
    """GPUs of the launched servers, as in CUDA_VISIBLE_DEVICES: `1`, or `1,2`; `replicas` divide them up in order.
    Unset is all, or the worker's for a server that sleeps. Workers use the others."""
    api_key_env: Annotated[OptionalText, Role.NAMES, _OF_SERVERS] = None
    """Environment variable that holds the servers' API key. The key itself is never written to a file."""
    adapter_dir: Annotated[OptionalText, Role.NAMES, _OF_SERVERS] = None
    """Directory through which adapters reach the servers; both sides must see it under the same path. Unset is
    `adapters/` in the directory of the run or campaign, for servers on this machine or on the same file system."""
    upload: Annotated[bool, Role.NAMES, ActiveIf("inference.engine", ("vllm", "openai"))] = False
    """Send adapters in the load request, for servers without a shared directory: `retrain serve`, not vLLM."""
    timeout_s: Annotated[Seconds, Role.SPEED, _OF_SERVERS] = 600.0
    """Seconds after which a request without an answer is cancelled and sent again."""
    patience_s: Annotated[NotNegative, Role.SPEED, _OF_SERVERS] = 600.0
    """Seconds that all servers may be unavailable, as during a restart, before the runs save and stop; also the limit
    for the start of a launched server."""
    max_in_flight: Annotated[Count, Role.SPEED, _OF_SERVERS] = 256
    """Most concurrent requests to a server."""
    sleep: Annotated[
        bool | Literal["kv", "weights"],
        BeforeValidator(lambda value: False if value == AUTO else value),
        Role.SPEED,
        ActiveIf("inference.engine", ("vllm", AUTO)),
    ] = False
    """Memory that vLLM frees of its GPU while this process trains on the same one: `kv`, its KV cache; `weights` (or
    `true`), also its weights, which go to the machine's memory. `false` (or `auto`): what `launch = "auto"` plans, and
    nothing for other servers. Needs `--enable-sleep-mode`, and VLLM_SERVER_DEV_MODE=1 in the server's environment;
    `launch` sets the second."""
    swap: Annotated[Literal["between", "in_flight"], _OF_SERVERS] = "between"
    """With `max_off_policy_steps`: sample an episode to its end with the weights that began it (`between`), or each
    turn with the newest weights (`in_flight`); each token records its policy version."""
    tolerance: Annotated[OptionalPositive, Role.SPEED, _OF_SERVERS] = None
    """Largest root mean square difference (nats) between a server's log-probabilities and the trainer's on the canary,
    which is checked before training. Unset: 0.002, and 0.1 with a base in bfloat16."""
    mismatch_limit: Annotated[OptionalPositive, Role.SPEED, _WHERE_WATCHED] = None
    """`kl_sample_train_v2` (nats²) above which a run warns; it stops when the next step exceeds it too. Unset: 1e-4,
    and 0.02 with a base in bfloat16."""

    @model_validator(mode="before")
    @classmethod
    def _infer_server(cls, data: object) -> object:
        """Set ``engine = "vllm"`` where only a server is given, and ``launch = "auto"`` where only vLLM is."""
        if not isinstance(data, dict):
            return data
        launch, engine = str(data.get("launch") or "").strip(), data.get("engine", AUTO)
        has_server = bool(launch or str(data.get("url") or "").strip())
        if launch == AUTO or (engine == "vllm" and not has_server):
            data = data | {"launch": AUTO}
        return data | {"engine": "vllm"} if engine == AUTO and has_server else data

    @property
    def served(self) -> bool:
        return self.engine in SERVERS

    @property
    def released(self) -> Released:
        """Memory that a server on the trainer's GPU frees during updates; "" for servers that do not sleep."""
        return "weights" if self.sleep is True else self.sleep or ""

    @property
    def beside_trainer(self) -> bool:
        """True if every training process launches servers of its own, which sleep on its GPU during updates."""
        return self.launch is not None and bool(self.released) and self.launch_gpus is None

    def mismatch_limit_in(self, dtype: str) -> float:
        return self.mismatch_limit or MISMATCH_LIMITS.get(dtype, MISMATCH_LIMITS["bfloat16"])

    def tolerance_in(self, dtype: str) -> float:
        return self.tolerance or CANARY_TOLERANCES.get(dtype, CANARY_TOLERANCES["bfloat16"])

    def issues(self) -> Iterator[ConfigIssue]:
        if not self.served:
            return
        if self.launch == AUTO and self.engine != "vllm":
            fix = 'engine = "vllm", or the command of your server'
            message = f'is "auto", which starts vLLM, and engine is "{self.engine}"'
            yield ConfigIssue(("inference.launch", "inference.engine"), message, fix)
        for key in ("launch_options", "python") if self.launch != AUTO else ():
            if getattr(self, key) is not None:
                yield ConfigIssue((f"inference.{key}", "inference.launch"), 'has no effect without launch = "auto"')
        if self.url is None and self.launch is None:
            message = f'is "{self.engine}", and neither url nor launch gives its server'
            fix = 'url = "http://127.0.0.1:8000", or launch = "vllm serve {model} --enable-lora"'
            yield ConfigIssue(("inference.engine", "inference.url", "inference.launch"), message, fix)
        yield from self._launch_issues()
        for address in self.url or ():
            if not address.startswith(("http://", "https://")):
                message = f'has "{address}", which is no address'
                yield ConfigIssue(("inference.url",), message, f'url = "http://{address.lstrip("/")}"')

    def _launch_issues(self) -> Iterator[ConfigIssue]:
        if self.url is not None and self.launch is not None:
            message = "starts a server here, while url names one that is there"
            yield ConfigIssue(("inference.launch", "inference.url"), message, "remove one of the two")
        for key, default in (("launch_gpus", None), ("replicas", 1)):
            if self.launch is None and getattr(self, key) != default:
                yield ConfigIssue((f"inference.{key}", "inference.launch"), "has no effect without launch")
        if self.launch is not None and self.replicas > 1 and (port := re.search(r"--port[ =]+(\d+)", self.launch)):
            message = f"has {port[0]}, and {self.replicas} servers cannot listen at one port of a machine"
            fix = "remove --port: each gets a free one"
            yield ConfigIssue(("inference.launch", "inference.replicas"), message, fix)
        gpus = len((self.launch_gpus or "").split(","))
        if self.launch_gpus is not None and gpus % self.replicas:
            message = f"has {gpus}, which {self.replicas} replicas cannot divide up evenly"
            yield ConfigIssue(("inference.launch_gpus", "inference.replicas"), message, f"replicas = {gpus}")


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


class Ray(Section, role=Role.NAMES):
    """Cluster of `[campaign] executor = "ray"`; other executors ignore it."""

    address: Annotated[str, AfterValidator(_address)] = "auto"
    """Cluster address: `auto` is the one in `RAY_ADDRESS` or running on this machine, `local` one that is started for
    this campaign and ends with it, else `host:port` of a cluster's head."""
    cpus: Count = 1
    """CPUs per worker, and threads that it computes with. Every worker holds a base model; if nodes have little memory
    per CPU, ask for more CPUs."""
    server_gpus: NotNegative = 1.0
    """GPUs per server of `[inference] launch`, where workers have GPUs; fractions are allowed."""
    server_cpus: Count = 1
    """CPUs per server of `[inference] launch`."""
    ship: bool = True
    """Send this code, and the files beside the campaign's file, to other nodes through Ray's `runtime_env`; if false,
    retrain must be installed on them. `ray job submit` sends its own working directory."""
    runtime_env: dict[str, str | list[str] | dict[str, str]] = Field(default_factory=dict)
    """Further fields of Ray's `runtime_env`, such as `{ pip = ["math-verify"], env_vars = { HF_HOME = "/shared/hf" }
    }`."""


LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
"""Options of sbatch that request GPUs; with one of them in ``extra``, retrain requests none itself."""


def minutes_of(limit: str) -> int:
    """Return a time limit of sbatch in whole minutes, rounded up. Formats: minutes, minutes:seconds,
    hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds. Raises ValueError for anything
    else."""
    match = LIMIT.fullmatch(limit)
    if match is None:
        raise ValueError(limit)
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None and len(parts) < 3:
        parts.insert(0, 0)  # no hours
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return (int(days or 0) * 24 + hours) * 60 + minutes + (seconds > 0)


def _limit(text: str) -> str:
    if LIMIT.fullmatch(text) is None or minutes_of(text) < 1:
        raise fault(f'is "{text}": no time limit as sbatch takes it', 'time = "4:00:00" or "2-12:00:00"')
    return text


def _memory(text: str | None) -> str | None:
    if text is not None and re.fullmatch(r"\d+[KMGT]?", text) is None:
        raise fault(f'is "{text}": no amount of memory as sbatch takes it', 'memory = "64G"')
    return text


def _option_names(options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    reserved = {
        "array": "workers in [campaign]", "time": "time", "signal": "notice_s", "requeue": "nothing, it is always on",
        "output": "nothing, logs lie in workers/", "error": "nothing, logs lie in workers/",
    }  # fmt: skip
    for name in options:
        if re.fullmatch(r"[a-z][a-z0-9-]*", name) is None:
            raise fault(f'has "{name}": an option of sbatch by its long name', 'exclude = "node7"')
        if name in reserved:
            raise fault(f'has "{name}", which stands here in its own place', reserved[name])
    return options


class Slurm(Section, role=Role.NAMES):
    """Workers as tasks of one Slurm job array, for `[campaign] executor = "slurm"`. Each has one GPU, or none with
    `[backend] devices = "cpu"`."""

    partition: OptionalText = None
    """Partition of the jobs; unset is the cluster's default."""
    time: Annotated[str, AfterValidator(_limit)] = "4:00:00"
    """Time limit of a worker as sbatch takes it (`4:00:00`, `2-12:00:00`, or a text of minutes). Training may take
    longer: a worker that reaches the limit saves, requeues itself, and continues."""
    notice_s: Count = 90
    """Seconds before the time limit at which a worker gets SIGUSR1: enough for the current step and for saving."""
    account: OptionalText = None
    """Account that is charged."""
    qos: OptionalText = None
    """Quality of service."""
    constraint: OptionalText = None
    """Features that a node must have, as sbatch takes them (`a100&nvlink`)."""
    gpu_type: OptionalText = None
    """GPU type by Slurm's name for it, such as `h100`; unset is any."""
    cpus: OptionalCount = None
    """Cores of a worker, which are also its threads; unset is the cluster's default."""
    memory: Annotated[OptionalText, AfterValidator(_memory)] = None
    """Memory of a worker, such as `64G`; unset is the cluster's default."""
    setup: list[Text] = Field(default_factory=list)
    """Lines of shell that run on the node before the worker starts, such as `module load cuda`."""
    extra: Annotated[dict[str, str | int | bool], AfterValidator(_option_names)] = Field(default_factory=dict)
    """Further options of sbatch by their long names, such as `{ exclude = "node7", gres = "gpu:1" }`; an option that
    requests GPUs replaces the default request."""
    template: OptionalText = None
    """Your own script for `sbatch`, as a jinja2 template; unset is `retrain/campaign/executors/slurm.sh.j2`, which
    lists the variables that a template may use."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local` runs the tasks on this machine's CPU without Slurm, to test the configuration."""

    @property
    def minutes(self) -> int:
        return minutes_of(self.time)
