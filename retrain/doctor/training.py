"""Check the gradient against plain formulas in higher precision, and a resumed run against an uninterrupted one."""

import copy
import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from retrain.device import available_memory
from retrain.doctor.results import FAIL, SKIP, Result, judged
from retrain.doctor.subject import LAYERS, DoctorModel, Sizes
from retrain.files import dumps, read_json, write_json
from retrain.policy.base import BaseModel, architecture_of
from retrain.policy.local import LocalPolicy, optimizer_tensors
from retrain.policy.lora import Lanes, LoraWeights
from retrain.policy.quantized import QuantizedLinear
from retrain.threads import Workers
from retrain.training.checkpoints import Snapshot, checkpoint_directory, load_checkpoint, write_checkpoint
from retrain.types import Sample, Want
from retrain.util.processes import with_imports

HIGHER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
COPIES_SHARE, PROCESS_SHARE = 0.5, 0.8
"""Shares of the available memory that copies for the gradient, and the model in a new process, may take."""
LANES, STEPS, SAVED = 2, 4, 2
STALE_SAMPLER = "updates do not advance the policy's version, so that runs would sample with old weights: report it"
PROCESS_SECONDS = 300.0
_RESUME = "import sys; from retrain.doctor.training import resume; resume(sys.argv[1])"


def gradient(subject: DoctorModel) -> Result:
    """Compare the gradient of one update with ``plain_gradient`` in higher precision, which shares no code with it.

    In a model with more than ``LAYERS`` layers, both use the first ``LAYERS`` only.
    """
    base = subject.base
    higher = HIGHER.get(base.dtype)
    if higher is None:
        return Result(SKIP, f"{subject.dtype} is the highest precision that there is")
    depth = int(base.model.config.get_text_config().num_hidden_layers)
    layers = min(depth, LAYERS)
    parameters = replace(architecture_of(base), layers=layers).parameters()
    needed = parameters * (higher.itemsize + (base.dtype.itemsize if layers < depth else 0))
    if needed > COPIES_SHARE * available_memory(base.device):
        return Result(SKIP, f"the first {layers} layers in {higher} take {needed / 2**30:.1f} GiB, which are not free")
    policy = subject.trained(0, clipped=False)
    sizes = Sizes(min(3, subject.sizes.prompts), min(3, subject.sizes.samples), subject.sizes.tokens)
    samples = subject.sampled(policy, sizes)
    with ExitStack() as stack:
        learner = policy if layers == depth else _on_first_layers(subject, policy, layers, stack)
        scored = learner.score(samples, frozenset({Want.LOGPROBS})).logprobs or []
        for sample, logprobs_T in zip(samples, scored, strict=True):
            sample.logprobs[sample.action_mask] = logprobs_T
        weights = learner.adapter.frozen()
        ours = subject.update(learner, samples, lr=0.0).cpu()
        model = plain_copy(base, subject.lanes, layers, higher)
        theirs = plain_gradient(model, weights, samples, higher).double().cpu()
    cosine = float(torch.dot(ours, theirs) / (ours.norm() * theirs.norm()))
    values = {"gradient_angle": 1 - cosine, "gradient_norm": abs(float(ours.norm() / theirs.norm()) - 1)}
    summary = f"against {str(higher).removeprefix('torch.')}"
    if layers < depth:
        summary += f", first {layers} of {depth} layers"
    return judged(subject.kinds, values, summary, numbers=len(ours), norm=float(theirs.norm()))


def _on_first_layers(subject: DoctorModel, policy: LocalPolicy, layers: int, stack: ExitStack) -> LocalPolicy:
    """Return the policy on a copy of the first layers of the base, which ``stack`` frees."""
    base, modules = subject.base, subject.lanes.target_modules
    model = plain_copy(base, subject.lanes, layers, base.dtype, "sdpa")
    shallow = BaseModel(base.name, model, base.tokenizer, base.device, base.dtype, base.eos_ids, base.pad_id, "")
    stack.callback(shallow.release)
    learner = LocalPolicy(shallow, Lanes(shallow, modules), policy.config, (0,), Workers())
    tensors = policy.adapter.tensors()
    learner.adapter.load({shape.name: tensors[shape.name] for shape in learner.adapter.shapes})
    return learner


def plain_copy(base: BaseModel, lanes: Lanes, layers: int, dtype: torch.dtype, attention: str = "eager") -> nn.Module:
    """Return a transformers model with the base's frozen weights and first ``layers`` layers, without adapters."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(base.model.config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    with torch.random.fork_rng([base.device] if base.device.type == "cuda" else []), torch.device(base.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.eval().requires_grad_(False)
    weights = dict(base.model.named_parameters())
    for name, module in base.model.named_modules():
        if isinstance(module, QuantizedLinear):
            weights[f"{name}.weight"] = module.weight
    for shape in lanes.shapes:  # a lane wraps the layer that it adapts as its attribute ``base``
        prefix = f"{shape.name}.base."
        for name in [name for name in weights if name.startswith(prefix)]:
            weights[f"{shape.name}.{name.removeprefix(prefix)}"] = weights.pop(name)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[name])
    return model


def plain_gradient(model: nn.Module, adapter: LoraWeights, samples: Sequence[Sample], dtype: torch.dtype) -> Tensor:
    """Return the gradient of −Σ A·log π / tokens, which every policy loss has at ratio 1, in the order of
    ``Adapter.flat``.

    Uses autograd alone: one sequence at a time, plain attention, all logits at once, ΔW·x added to each layer's output.
    """
    device = next(model.parameters()).device
    leaves: list[Tensor] = []
    tokens = sum(int(sample.action_mask.sum()) for sample in samples)
    with ExitStack() as stack:
        for shape in adapter.shapes:
            a, b = (store[shape.name].detach().to(dtype).requires_grad_() for store in (adapter.A, adapter.B))
            leaves += [a, b]

            def add(_: nn.Module, inputs: tuple[Tensor], out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                return out + adapter.scale * (inputs[0] @ a.t()) @ b.t()

            stack.callback(model.get_submodule(shape.name).register_forward_hook(add).remove)
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids).to(device)[None]
            mask = torch.from_numpy(sample.action_mask[1:]).to(device)
            logits_TV = model(input_ids=ids, use_cache=False).logits[0, :-1][mask]
            logprobs_T = torch.log_softmax(logits_TV.to(dtype), -1).gather(1, ids[0, 1:][mask][:, None])[:, 0]
            advantages_T = torch.from_numpy(sample.advantages[sample.action_mask]).to(device, dtype)
            loss = -(advantages_T * logprobs_T).sum() / tokens
            for sum_of, part in zip(total, torch.autograd.grad(loss, leaves), strict=True):
                sum_of += part
    return torch.cat([part.flatten() for part in total])


def resumed_equals_uninterrupted(subject: DoctorModel) -> Result:
    """Compare four training steps with two steps, a checkpoint, and two more in a new process, bit for bit.

    Each update must also advance the policy's version: without that, a run samples with the weights of its start.
    """
    needed = subject.base.weight_bytes
    if needed > PROCESS_SHARE * available_memory(subject.base.device):
        return Result(SKIP, f"a second copy of the model takes {needed / 2**30:.1f} GiB, which are not free")
    with TemporaryDirectory(prefix="retrain-doctor-") as place:
        folder = Path(place)
        policies = [subject.policy(lane) for lane in range(LANES)]
        train(subject, policies, range(SAVED))
        for lane, policy in enumerate(policies):
            snapshot = policy.snapshot(resumable=True)
            state = Snapshot(SAVED, snapshot, dumps({"policy": policy.state()}) + "\n")
            write_checkpoint(checkpoint_directory(folder / f"lane_{lane}", SAVED), state)
        ours = train(subject, policies, range(SAVED, STEPS))
        (folder / "source.pickle").write_bytes(pickle.dumps(subject.source))
        if subject.on_gpu:
            torch.cuda.empty_cache()  # for the other process
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RESUME, str(folder)],
            capture_output=True, encoding="utf-8", errors="replace", timeout=PROCESS_SECONDS, check=False,
            env=with_imports({**os.environ, "HF_HUB_OFFLINE": "1"}),
        )  # fmt: skip
        if done.returncode != 0 or not (folder / "digests.json").is_file():
            last = (done.stderr.strip().splitlines() or ["no word of it"])[-1]
            return Result(FAIL, f"the new process ended with status {done.returncode}: {last}", todo="see there")
        theirs = read_json(folder / "digests.json")
    differing = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    summary = f"{LANES} lanes, {STEPS} steps against {SAVED} + a new process + {STEPS - SAVED}"
    versions = [policy.version for policy in policies]
    fault = "" if versions == [STEPS] * LANES else f"{STALE_SAMPLER}: {versions} after {STEPS} updates each"
    values = {"resume_differs": len(differing)}
    return judged(subject.kinds, values, summary, fault=fault, compared=len(ours), differing=differing)


def resume(path: str) -> None:
    """Load the checkpoints of all lanes, train on, and write the digests; runs in the new process."""
    folder = Path(path)
    source = pickle.loads((folder / "source.pickle").read_bytes())
    with DoctorModel.open(source) as subject:
        policies = [subject.policy(lane) for lane in range(LANES)]
        for lane, policy in enumerate(policies):
            policy.restore(load_checkpoint(checkpoint_directory(folder / f"lane_{lane}", SAVED), policy)["policy"])
        write_json(folder / "digests.json", train(subject, policies, range(SAVED, STEPS)))


def train(subject: DoctorModel, policies: Sequence[LocalPolicy], steps: range) -> dict[str, str]:
    """Train all lanes, sampled in one batch, and return digests of samples, losses, adapters and optimizer states.

    Kernels are deterministic on a GPU, as with ``[training] deterministic``; on a CPU all are.
    """
    digests = {}
    deterministic = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        torch.use_deterministic_algorithms(deterministic or subject.on_gpu)
        for number in steps:
            requests = subject.requests(subject.publish(policies), number)
            groups = subject.engine.sample(requests)
            per_lane, losses = len(requests) // len(policies), []
            for lane, policy in enumerate(policies):
                part = slice(lane * per_lane, (lane + 1) * per_lane)
                losses.append(subject.train(policy, subject.samples(requests[part], groups[part]), number))
            actions = [[action.token_ids, action.logprobs_T.tolist()] for group in groups for action in group]
            digests[f"sampled in step {number}"] = _digest(repr(actions).encode())
            digests[f"losses of step {number}"] = repr(losses)
    for lane, policy in enumerate(policies):
        digests[f"lane {lane} adapter"] = _digest(policy.adapter.flat.detach().cpu().numpy().tobytes())
        digests[f"lane {lane} version"] = str(policy.version)
        for name, tensor in optimizer_tensors(policy.optimizer).items():
            digests[f"lane {lane} {name}"] = _digest(tensor.numpy().tobytes())
    return digests


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
