"""[model], [lora], [backend]: what is trained, and on what."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retrain.config.base import (
    Count,
    Decay,
    Devices,
    Finding,
    OptionalText,
    Plugin,
    Role,
    Section,
    Text,
    Unavailable,
    UsedWhen,
)

MAX_ALPHA = 1e18
"""Upper bound of alpha: above it the squared gradients of B overflow in Adam's float32 state."""
_NO_REMOTE = ("remote training is not available", 'backend = "local"')


class Model(Section):
    """The frozen base model, which all runs of a campaign share, and the rank of the adapter that is trained."""

    role: ClassVar[Role] = Role.SAMPLES

    model: Text = "tiny-reasoner"
    """Hub name, local directory in `transformers` format, or `tiny-reasoner`, the model that ships with retrain."""
    revision: OptionalText = None
    """Branch, tag or commit of a hub model; unset is the default branch."""
    local_files_only: Annotated[bool, Role.NAMES] = False
    """Never ask the hub: use only what is in the local cache."""
    lora_rank: Annotated[Count, Role.LEARNS] = 32
    """Rank of the LoRA adapter."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """The linear layers of the frozen base in 8 or 4 bits, for less memory: sampling and update read the same ones.
    `nf4` needs the extra `quantize`. What it changes is measured when the base is loaded. See docs/performance.md."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model. Leave off unless you have read that code."""

    @property
    def quantized(self) -> bool:
        return self.quantize != "none"


class Lora(Section):
    """The adapter apart from its rank. The defaults follow "LoRA without regret"."""

    role: ClassVar[Role] = Role.LEARNS

    alpha: Annotated[float, Field(ge=0, le=MAX_ALPHA)] = 32.0
    """Scaling: the update is multiplied by alpha/rank. 0 means twice the rank."""
    dropout: Decay = 0.0
    """Dropout on the adapter's input while training; sampling never drops anything."""
    target_modules: Annotated[
        Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)], Role.LEARNS | Role.SAMPLES
    ] = "all-linear"
    """Which layers get an adapter: `all-linear` (every linear layer but the output layer), or a list of module names
    such as `["q_proj", "v_proj"]`."""
    anneal: list[Annotated[list[Count], Field(min_length=2, max_length=2)]] = Field(default_factory=list)
    """Stages `[step, rank]` at which the adapter is compressed while it trains, as in `[[40, 8], [80, 2]]`: from update
    40 on rank 8, from 80 on rank 2. The adapter that is saved has the last rank."""

    def findings(self) -> Iterator[Finding]:
        if self.dropout > 0:
            yield Finding(
                ("lora.dropout",),
                f"is {self.dropout:g}: dropout makes the trainer's logprobs differ from the sampler's, so the "
                "importance ratio is noisy even on-policy",
                "dropout = 0.0",
                warning=True,
            )


class Backend(Section):
    """Where the training happens."""

    role: ClassVar[Role] = Role.SAMPLES

    backend: Annotated[Literal["local"] | Plugin, Unavailable({"tinker": _NO_REMOTE, "prime_rl": _NO_REMOTE})] = "local"
    """`local`: torch, transformers and peft in this process. Or a `module:Class` of your own."""
    options: Annotated[
        dict[str, str | int | float | bool], UsedWhen("backend.backend", ("module:Class",), plugins=True)
    ] = Field(default_factory=dict)
    """Settings of a backend of your own, such as `{ address = "…" }`; it finds them in its configuration."""
    devices: Annotated[Devices, Role.NAMES] = "auto"
    """Where to compute: `auto` (GPUs when there are any), `cpu`, or one GPU such as `gpu:0`. With `shard`, and for
    `[campaign] executor = "processes"`, also several: `all`, a range such as `gpu:0-7`, or a list such as `["gpu:0",
    "gpu:2"]`."""
    shard: Annotated[Literal["none", "dp", "fsdp2"], Role.NAMES] = "none"
    """`dp`: several processes, ranks, train each cohort together. Every rank holds the base; each samples and updates
    with its share of the rollouts. `fsdp2`: the same, and every rank holds a part of the base, for one that does not
    fit on a device. See docs/sharding.md."""
    ranks: Annotated[Literal["auto"] | Count, Role.NAMES] = "auto"
    """How many processes `shard` means. `auto`: those that torchrun has started, else one for each GPU of `devices`, or
    of each worker's `[campaign] gpus_per_cohort`. Without torchrun retrain starts them itself."""
    adapter_path: Annotated[OptionalText, Role.RECORDS] = None
    """Directory that also receives the files of the final adapter, beside whatever else lies there; a campaign writes
    one directory per run beneath it. The run directory's `final/` is written in any case."""

    @property
    def named_gpus(self) -> list[str]:
        """The GPUs that `devices` names one by one; none for `auto`, `all` and `cpu`."""
        if isinstance(self.devices, list):
            return self.devices
        if not self.devices.startswith("gpu:"):
            return []
        first, _, last = self.devices.removeprefix("gpu:").partition("-")
        return [f"gpu:{index}" for index in range(int(first), int(last or first) + 1)]

    @property
    def device(self) -> str:
        """The one device of a process that has not been given another: `auto`, `cpu`, or the first GPU."""
        if self.named_gpus:
            return self.named_gpus[0]
        return "cpu" if self.devices == "cpu" else "auto"

    @property
    def several(self) -> bool:
        """Whether `devices` asks for more than one process can use."""
        return self.devices == "all" or len(self.named_gpus) > 1
