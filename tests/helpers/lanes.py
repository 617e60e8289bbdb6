"""LoRA lanes that are sampled, scored and updated."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrain.algorithms import (
    GROUP_ADVANTAGES,
    LOSSES,
    GroupAdvantage,
    Modes,
    PluginLoss,
    RegexDetector,
    build_algorithm,
    load_modes,
)
from retrain.algorithms.algorithm import Algorithm, CreditStep, StepContext
from retrain.config import parse_dict
from retrain.config.modes import advantage_of
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import Engine
from retrain.engines.step import DecodeSettings
from retrain.environments.protocol import Observation, Step
from retrain.files import read_json, read_jsonl
from retrain.maths.corrections import Correction
from retrain.policy.adapter_io import peft_config
from retrain.policy.base import BaseModel
from retrain.policy.critic import MOMENTS, WEIGHTS
from retrain.policy.local import LocalPolicy, LocalSnapshot
from retrain.policy.lora import Adapter, Lanes, LayerShape, LoraWeights, new_optimizer
from retrain.policy.objective import EntropyTerm, KLTerm, Objective, PolicyTerm, Term
from retrain.policy.packing import Budget
from retrain.policy.update import PendingUpdate, UpdateContext, policy_step
from retrain.rng import generator
from retrain.threads import Workers
from retrain.training.checkpoints import Snapshot
from retrain.types import (
    Action,
    CreditedBatch,
    CreditedGroup,
    Denominators,
    Group,
    PolicyRef,
    RewardResult,
    Sample,
    SampleRequest,
    Scores,
    StepBatch,
)

from .campaigns import is_timing_key, toy_toml
from .models import campaign_head

AS_ON_A_GPU = DecodeSettings(calls=8, columns=16, compiled=False)


def trained(lanes: Lanes, seed: int, rank: int = 4, size: float = 0.3) -> Adapter:
    """Return an adapter whose ΔW is not 0."""
    adapter = lanes.new_adapter(rank, 8.0).initialise(seed)
    noise = generator("noise", seed)
    with torch.no_grad():
        for b in adapter.B.values():
            b.copy_(torch.from_numpy(noise.normal(0, size, b.shape)))
    return adapter


def ref(lane: int) -> PolicyRef:
    """Return the reference under which ``sample`` publishes the adapter of this lane."""
    return PolicyRef(str(lane), 0)


def lane_of(request: SampleRequest) -> int:
    return int(request.policy.run_id)


def requests(
    lane: int = 0, *, prompts: int = 3, samples: int = 4, max_tokens: int = 12, temperature: float = 1.0, **cut: Any
) -> list[SampleRequest]:
    """Return requests of one lane with prompts of different lengths; ``cut`` truncates the distribution."""
    sizes = [3, 9, 5, 7, 4, 6]
    return [
        SampleRequest(
            ref(lane), tuple(int(t) for t in generator("prompt", lane, p).integers(3, 200, sizes[p % len(sizes)])),
            samples, max_tokens, temperature, ("test", lane, p), **cut,
        )
        for p in range(prompts)
    ]  # fmt: skip


def save_adapter(directory: Path, adapter: Adapter, base_name: str) -> None:
    weights = adapter.frozen("cpu")
    LocalSnapshot(weights, partial(peft_config, weights, base_name, None, 0.0)).export(directory, directory)


def small_snapshot(step: int, size: int = 4) -> Snapshot:
    """Return the state of a run whose adapter has one small layer."""
    weights = LoraWeights(
        [LayerShape("layer", size, size)], 2, 1.0, 2, torch.cat([torch.arange(2.0 * size), torch.ones(2 * size)])
    )
    policy = LocalSnapshot(weights, {"r": 2}.copy, {"exp_avg": torch.ones(size)})
    return Snapshot(step, policy, f'{{"step": {step}}}\n')


def publish(engine: Engine, adapters: Sequence[Adapter]) -> None:
    for lane, adapter in enumerate(adapters):
        engine.publish(ref(lane), LocalSnapshot(adapter.frozen()))


def sample(
    engine: Engine, asked: Sequence[SampleRequest], adapters: Sequence[Adapter], **options: Any
) -> list[list[Action]]:
    """Publish these adapters as lanes 0, 1, … and sample."""
    publish(engine, adapters)
    return engine.sample(asked, **options)


def tokens(groups: Sequence[Sequence[Action]]) -> list[list[list[int]]]:
    return [[action.token_ids for action in group] for group in groups]


def assert_same(groups: Sequence[Sequence[Action]], others: Sequence[Sequence[Action]], atol: float = 1e-4) -> None:
    """Check that both have the same tokens, and the same log-probabilities up to rounding."""
    assert tokens(groups) == tokens(others)
    for one, other in zip(chain(*groups), chain(*others), strict=True):
        assert one.stop_reason == other.stop_reason
        np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=atol)


def decoded(base, lanes, adapters, asked, **options):
    """Return tokens, log-probabilities and entropies of all completions, exactly."""
    groups = sample(LocalEngine(base, lanes, **options), asked, adapters)
    return [(c.token_ids, c.logprobs_T.tolist(), c.entropy_T.tolist()) for group in groups for c in group]


def fresh_logprobs(base, lanes, adapter, prompt_ids, token_ids, temperature):
    """Return log-probabilities and entropies of a completion by one unpadded forward pass without a cache."""
    zeros = np.zeros(len(token_ids))
    with torch.no_grad():
        scores = fresh_scores(lanes, adapter, Sample.single_turn(prompt_ids, token_ids, zeros, zeros), temperature)
    return scores[0].numpy(), scores[1].numpy()


def assert_fresh(base, lanes, adapters, asked, groups):
    """Check log-probabilities and entropies against one unpadded forward pass for every completion."""
    for request, group in zip(asked, groups, strict=True):
        assert len(group) == request.samples
        for completion in group:
            adapter = adapters[lane_of(request)]
            expected, entropy = fresh_logprobs(
                base, lanes, adapter, request.prompt_ids, completion.token_ids, request.temperature
            )
            np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)
            np.testing.assert_allclose(completion.entropy_T, entropy, atol=1e-4)


def rollout(base, lanes, adapter, temperature: float = 1.0, asked: Sequence[SampleRequest] = ()) -> list[Sample]:
    """Sample with this adapter and return samples with random advantages of every token."""
    asked, noise = asked or requests(prompts=5, samples=3, temperature=temperature), generator("advantages")
    return [
        Sample.single_turn(r.prompt_ids, c.token_ids, c.logprobs_T, noise.normal(size=len(c)), support=c.support)
        for r, group in zip(asked, sample(LocalEngine(base, lanes), asked, [adapter]), strict=True)
        for c in group
    ]


def drawn(of: Sample) -> np.ndarray:
    return of.token_ids[of.action_mask]


def with_tokens(of: Sample, **values: Any) -> Sample:
    """Replace ``advantages``, ``logprobs`` or ``loss_mask`` of the action tokens by one value or an array [T]."""
    changed = {name: getattr(of, name).copy() for name in values}
    for name, value in values.items():
        changed[name][of.action_mask] = value
    return replace(of, **changed)


def in_turns(of: Sample) -> Sample:
    """Return the sample as several turns: after every three action tokens, two become tokens that were read."""
    place_T = np.arange(len(drawn(of)))
    read = np.zeros(len(of), dtype=bool)
    read[of.action_mask] = (place_T % 5 >= 3) & (place_T < place_T[-1])
    return replace(
        of, action_mask=of.action_mask & ~read, logprobs=np.where(read, 0, of.logprobs),
        versions=np.where(read, -1, of.versions), advantages=np.where(read, 0, of.advantages),
        loss_mask=of.loss_mask & ~read,
    )  # fmt: skip


def with_values(samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """Return the samples with made-up values from before the update and targets, which a critic's loss reads."""
    noise = np.random.default_rng(seed)

    def table(sample: Sample) -> np.ndarray:
        return np.where(sample.action_mask, noise.normal(size=len(sample)), 0.0)

    return [replace(sample, values=table(sample), value_targets=table(sample)) for sample in samples]


def totals(samples: Sequence[Sample]) -> Denominators:
    return Denominators(sum(len(drawn(s)) for s in samples), len(samples))


def fresh_logits(lanes: Lanes, adapter: Adapter, of: Sample) -> torch.Tensor:
    """Return the logits [T, V] of the action tokens, with gradient, by one unpadded forward pass."""
    with lanes.single(adapter):
        logits = lanes.base.model(input_ids=torch.from_numpy(of.token_ids)[None], use_cache=False).logits[0, :-1]
    return logits[torch.from_numpy(of.action_mask[1:])]


def fresh_scores(lanes: Lanes, adapter: Adapter, of: Sample, temperature: float = 1.0):
    """Return log-probabilities [T] and entropies [T] by one unpadded pass, with gradient, over recorded supports."""
    logits_TV = fresh_logits(lanes, adapter, of)
    logits_TV = (logits_TV.float() if logits_TV.dtype == torch.bfloat16 else logits_TV) / temperature
    if of.support is not None:
        mask_TV = torch.full_like(logits_TV, -1e30)
        rows = np.repeat(np.arange(len(mask_TV)), np.diff(of.support.offsets))
        mask_TV[torch.from_numpy(rows), torch.from_numpy(of.support.ids).long()] = 0
        logits_TV = logits_TV + mask_TV
    logprobs_TV = torch.log_softmax(logits_TV, -1)
    chosen_T = logprobs_TV.gather(1, torch.from_numpy(drawn(of))[:, None])[:, 0]
    return chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def objective(
    *, loss: str | Callable[..., Any] = "ppo", correction: Correction | None = None, normalizer: str = "tokens",
    temperature: float = 1.0, max_tokens: int = 256, kl_coef: float = 0.0, log_kl: bool = False,
    entropy_coef: float = 0.0, **parameters: Any,
) -> Objective:  # fmt: skip
    """Return the terms of these keys; ``parameters`` are those of the policy loss."""
    policy_loss = LOSSES[loss](**parameters) if isinstance(loss, str) else PluginLoss(loss)
    terms: list[Term] = [PolicyTerm(policy_loss, correction)]
    if kl_coef or log_kl:
        terms.append(KLTerm(kl_coef))
    if entropy_coef:
        terms.append(EntropyTerm(entropy_coef))
    return Objective(tuple(terms), normalizer, temperature, max_tokens)


def adamw(adapter: Adapter, lr: float = 1e-3, weight_decay: float = 0.0) -> torch.optim.AdamW:
    return new_optimizer([adapter.flat], lr, parse_dict({"training": {"weight_decay": weight_decay}}))


def update(
    lanes: Lanes, adapter: Adapter, samples: Sequence[Sample], *, optimizer: torch.optim.Optimizer | None = None,
    denominators: Denominators | None = None, lr: float = 1e-3, step: int = 0, stream: tuple[int | str, ...] = (),
    probe: Sequence[Sample] = (), micro_batch_tokens: int = 16384, budget: Budget | None = None,
    grad_clip_norm: float = 0.0, dropout: float = 0.0, workers: Workers | None = None, bfloat16: bool = False,
    **keys: Any,
) -> dict[str, Any]:  # fmt: skip
    """Make one optimizer step on these samples with the objective of ``keys``, by default without clipping."""
    batch = StepBatch(samples, denominators or totals(samples), step, stream, probe)
    context = UpdateContext(lanes, budget or Budget(micro_batch_tokens), workers or Workers(), dropout, bfloat16)
    optimizer = optimizer or adamw(adapter)
    pending = PendingUpdate(context, adapter, optimizer, batch, objective(**keys), lr)
    return policy_step(pending, grad_clip_norm).metrics


def gradient(lanes: Lanes, samples: Sequence[Sample], seed: int = 0, **keys: Any):
    """Return the gradient and the metrics of one update of a trained adapter."""
    adapter = trained(lanes, seed)
    metrics = update(lanes, adapter, samples, **keys)
    assert adapter.flat.grad is not None
    return adapter.flat.grad.clone(), metrics


def relative_gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference, relative to ``other``."""
    return float((one - other).detach().norm() / other.detach().norm())


def local_policy(base: BaseModel, lanes: Lanes, seed: int = 0, **sections: dict[str, Any]) -> LocalPolicy:
    """Return a run's policy of rank 4; ``sections`` are those of its file."""
    sections["model"] = {"lora_rank": 4} | sections.get("model", {})
    return LocalPolicy(base, lanes, parse_dict(sections), (0, seed), Workers())


OWN = ("gae", 'kl_coef = 0.05\nkl_in_reward = "k1"\ncritic = {warmup_steps = 1, lr = 0.02, lora_rank = 3}\n')
SHARED = ("gae", "critic = {share_adapter = true}\n")
ALL = (("grpo", ""), ("grpo", "num_iterations = 2\nminibatches = 2\n"), OWN, SHARED)
"""Advantage mode and further keys of a condition. The critic of its own trains alone in the first step."""
NAMES = ("once", "four", "own", "shared")


def critic_campaign(
    folder: Path, model: Path, *conditions: tuple[str, str], steps: int = 4, lanes: int = 4, dtype: str = "float32",
    training: dict[str, Any] | None = None, **sections: dict[str, Any],
) -> Path:  # fmt: skip
    head = campaign_head(seeds=[1], max_steps=steps, lanes=lanes)
    for advantage, keys in conditions:
        head += campaign_head((advantage, "none")).removeprefix("[campaign]\n") + keys
    path, training = folder / "critics.toml", {"max_tokens": 8, "save_every": 2} | (training or {})
    path.write_text(head + toy_toml(model, inference={"dtype": dtype}, training=training, **sections))
    return path


def runs_of(out: Path) -> list[Path]:
    """The run directories of a campaign in the order of its plan."""
    return [out / run["path"] for run in read_json(out / "manifest.json")["runs"]]


def by_name(out: Path) -> dict[str, Path]:
    """The run directories of a campaign of ``ALL``."""
    return dict(zip(NAMES, runs_of(out), strict=True))


def rows_of(run: Path) -> list[str]:
    rows = read_jsonl(run / "metrics.jsonl")
    clocks = [key for key in rows[0] if is_timing_key(key)] + ["queue_depth"]
    return [json.dumps({key: row[key] for key in row if key not in clocks}) for row in rows]


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"))


def made(run: Path) -> dict[str, object]:
    """All that a run has made and that may not depend on how often it was interrupted."""
    files = [*(run / "final").glob("*.safetensors"), *last_checkpoint(run).glob("*.safetensors")]
    contents = {str(path.relative_to(run)): path.read_bytes() for path in files}
    answers = (run / "emergence/generations.jsonl").read_bytes()
    return {"rows": rows_of(run), "answers": answers, **contents}


def critic_files(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for name in (WEIGHTS, MOMENTS) for path in run.rglob(name))


STREAM = ("run",)


class SilentTokenizer:
    """Tokens without text, so that none of them plans."""

    def offsets(self, token_ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        return "", [(0, 0)] * len(token_ids)


def batch_of(groups: Sequence[Group]) -> CreditedBatch:
    return CreditedBatch(tuple(CreditedGroup.of(group) for group in groups))


def advantages_of(group: CreditedGroup) -> np.ndarray:
    """Return the advantages, float64 [N], NaN where there is none."""
    return np.array([rollout.advantage for rollout in group.rollouts])


def algorithm_of(config: dict[str, Any], tokenizer: Any = None, modes: Modes | None = None) -> Algorithm:
    parsed = parse_dict(config)
    modes = modes or load_modes(parsed.algorithm)
    return build_algorithm(parsed, modes, RegexDetector(), tokenizer or SilentTokenizer(), STREAM)


def credit(
    groups: Sequence[Group], config: dict[str, Any] | None = None, tokenizer: Any = None, modes: Modes | None = None,
    scores: Scores | None = None,
) -> CreditedBatch:  # fmt: skip
    """Return the groups with the credit of step 0 of a configuration."""
    return algorithm_of(config or {}, tokenizer, modes).credit(batch_of(groups), scores or Scores(), 0)


def apply(batch: CreditedBatch, *steps: CreditStep, scores: Scores | None = None, step: int = 0) -> CreditedBatch:
    for credit_step in steps:
        batch = credit_step.apply(batch, StepContext(step, scores or Scores()))
    return batch


def compare(groups: Sequence[Group], mode: Any, turn_credit: Any = None, reward_name: str = "reward") -> CreditedBatch:
    """Return the groups with advantages, of whole rollouts or of turns, but without token credit."""
    advantage = GroupAdvantage(mode, advantage_of(mode), GROUP_ADVANTAGES.get(mode), turn_credit, reward_name)
    return apply(batch_of(groups), advantage)


class TwoTurns:
    """Asks for more, once by default; rewards the number of answers. An answer of "fail" is not foreseen."""

    exact = True

    def __init__(self, turns: int = 2):
        self.turns, self.ranges, self.graded, self.seeds = turns, {}, [], []

    def start(self, problem, seed):
        if problem.id == "unknown":
            raise LookupError("no such problem")
        self.seeds.append(seed)
        return TwoTurnsEpisode(problem, self.turns)

    def results(self, episodes):
        self.graded += [episode.problem.id for episode in episodes]
        return [RewardResult(float(len(episode.said))) for episode in episodes]


class TwoTurnsEpisode:
    def __init__(self, problem, turns):
        self.problem, self.turns, self.said = problem, turns, []

    def observe(self):
        return Observation(({"role": "user", "content": self.problem.prompt},))

    def step(self, action):
        if action.text == "fail":
            raise RuntimeError("an environment with a mistake")
        if action.text == "exit":
            sys.exit("enough")
        self.said.append(action.text)
        done = action.text == "last" or len(self.said) == self.turns
        return Step(() if done else ({"role": "user", "content": "more?"},), done)
