"""The golden campaigns: small, quick, and together a use of everything that retrain does.

Each function writes its files, runs commands as a user does, and leaves what they wrote; nothing is asserted here.
"""

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver import Session

MODEL = """
[model]
model = "{world}/model"
lora_rank = 4
"""
REWARD = """
[reward]
type = "custom"
custom_module = "{world}/rewards.py"
custom_function = "even"
workers = 1
"""
TRAINING = """
[training]
max_steps = 2
batch_size = 3
group_size = 4
max_tokens = 10
lr = 0.01
save_every = 2
"""
EVALUATION = """
[evaluation]
problems = 5
"""
QUIET = "\n[squeeze]\nenabled = false\n"
BASE = MODEL + REWARD + TRAINING + EVALUATION

SCENARIOS: dict[str, Callable[[Session], None]] = {}
Condition = tuple[str, str, dict[str, Any]]
"""Advantage mode, transform mode, and overrides by dotted key."""


def scenario(function: Callable[[Session], None]) -> Callable[[Session], None]:
    SCENARIOS[function.__name__] = function
    return function


def toml(value: Any) -> str:
    return json.dumps(value)


def conditions(*pairs: Condition, seeds: tuple[int, ...] = (1,), **keys: Any) -> str:
    lines = ["[campaign]", f"seeds = {toml(seeds)}", *(f"{key} = {toml(value)}" for key, value in keys.items())]
    for advantage, transform, overrides in pairs:
        lines += ["[[campaign.conditions]]", f'advantage_mode = "{advantage}"', f'transform_mode = "{transform}"']
        lines += [f'"{key}" = {toml(value)}' for key, value in overrides.items()]
    return "\n".join(lines) + "\n"


def sets(values: dict[str, Any]) -> list[str]:
    """``--set`` arguments for these values."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={toml(value)}")]


def train(session: Session, text: str, *arguments: str, file: str = "c.toml", out: str = "out") -> None:
    session.write(file, text)
    session.run("train", file, "--out", out, *arguments)


# -- algorithms ------------------------------------------------------------------------------------


def variants(*overrides: dict[str, Any]) -> list[Condition]:
    return [("grpo", "none", each) for each in overrides]


CONDITIONS: dict[str, list[Condition]] = {
    "advantages": [(mode, "none", {}) for mode in ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp")],
    "token_credit": [
        ("grpo", mode, {}) for mode in ("gtpo", "gtpo_hicra", "gtpo_hicra_placebo", "gtpo_paper", "entropy_mask")],
    "uncertainties": [("maxrl", "gtpo", {"algorithm.uncertainty_kind": kind})
                      for kind in ("surprisal", "predictive_variance", "shannon_entropy")],
    "sepa_schedules": [("grpo", "gtpo_sepa", {"sepa.steps": 3} | keys) for keys in (
        {"sepa.correct_rate_gate": 0.0}, {"sepa.delay_steps": 1, "sepa.correct_rate_gate": 0.05},
        {"sepa.schedule": "auto", "sepa.warmup_steps": 2})],
    "losses": variants(*({"algorithm.loss": name, "training.num_iterations": 2}
                         for name in ("ppo", "reinforce", "gspo", "cispo", "dppo", "sapo", "vespo", "m2po"))),
    "normalizers": variants(*({"algorithm.loss_normalizer": name} for name in ("tokens", "sequences", "constant")),
                            {"algorithm.dual_clip": 2.0, "training.num_iterations": 2},
                            {"training.clip_eps_high": 0.3, "training.num_iterations": 2}),
    "corrections": variants(*({"algorithm.correction": name}
                              for name in ("none", "tis", "mis", "icepop", "decoupled", "seq_tis", "seq_mis"))),
    "rejections": variants(*({"algorithm.rejection": name} for name in ("none", "geometric", "k3", "veto"))),
    "kl_and_optimizer": variants({"optimizer.schedule": "linear", "optimizer.warmup_steps": 1},
                                 {"optimizer.schedule": "cosine", "training.weight_decay": 0.1},
                                 {"optimizer.grad_clip_norm": 0.001}, {"lora.dropout": 0.1}),
    "critic": [("gae", "none", keys) for keys in (
        {"critic.share_adapter": False}, {"critic.share_adapter": True, "critic.lam_length": 0.05},
        {"critic.warmup_steps": 1, "training.num_iterations": 2, "training.minibatches": 2})],
    "several_updates": variants({"training.num_iterations": 2, "training.minibatches": 3},
                                {"training.minibatches": 2, "training.minibatch_by": "sequence"},
                                {"training.num_iterations": 3, "training.target_kl": 1e-4},
                                {"training.micro_batch_tokens": 40}),
}  # fmt: skip
"""The conditions of campaigns that train once and do nothing else."""
MAX_STEPS = {"sepa_schedules": 4, "corrections": 3, "rejections": 3, "kl_and_optimizer": 3}
"""[campaign] max_steps of those that set it."""
SETTINGS: dict[str, dict[str, Any]] = {
    "corrections": {"training.max_off_policy_steps": 1, "algorithm.loss": "reinforce"},
    "rejections": {"training.max_off_policy_steps": 1, "algorithm.correction": "none"},
    "kl_and_optimizer": {"logging.log_kl": True},
    "rollouts_ahead": {"training.max_off_policy_steps": 2, "training.max_steps": 4, "algorithm.correction": "tis"},
    "planning": {"logging.strategic_grams": ["let me", "check", "wait"], "algorithm.transform_mode": "gtpo_hicra"},
    "half_precision": {"inference.dtype": "bfloat16"},
    "double_precision": {"inference.dtype": "float64", "training.deterministic": True},
    "quantised": {"model.quantize": "int8"},
    "annealed": {"lora.anneal": [[1, 2]], "training.max_steps": 3},
    "trackers": {"logging.report_to": ["tensorboard", "wandb"], "logging.wandb_project": "p",
                 "logging.wandb_mode": "offline"},
}  # fmt: skip
"""Settings of campaigns above, and of single runs that do nothing else."""


def train_once(session: Session) -> None:
    """Train what the tables have under the scenario's name."""
    name = session.name
    keys = {"max_steps": MAX_STEPS[name]} if name in MAX_STEPS else {}
    head = conditions(*CONDITIONS[name], **keys) if name in CONDITIONS else ""
    train(session, head + BASE + QUIET, *sets(SETTINGS.get(name, {})))


SCENARIOS |= dict.fromkeys([*CONDITIONS, *SETTINGS], train_once)


@scenario
def distillation(session: Session) -> None:
    train(session, BASE + QUIET, file="teacher.toml", out="teacher")
    runs: list[Condition] = [
        ("grpo", "none", {"distillation.teacher": "teacher/final"}),
        ("grpo", "none", {"distillation.teacher": "base", "distillation.reward_weight": 1.0, "distillation.clamp": 2}),
        ("grpo", "none", {"distillation.teacher": "teacher/final", "distillation.estimate": "vocabulary"}),
        ("grpo", "none", {"distillation.teacher": "policy", "distillation.context": "answer",
                           "distillation.estimate": "vocabulary", "distillation.top_tokens": 5}),
        ("grpo", "none", {"distillation.teacher": "policy", "distillation.context": "sibling"}),
    ]  # fmt: skip
    train(session, conditions(*runs) + BASE + QUIET)


@scenario
def dynamic_sampling(session: Session) -> None:
    text = BASE.replace('"even"', '"zero_or_one"') + QUIET
    train(session, text, *sets({"training.dynamic_sampling": 3, "training.group_size": 2, "training.max_steps": 3}))


@scenario
def own_functions(session: Session) -> None:
    """An advantage of the user's own, and problems of a function."""
    session.write("plugins.py", (session.world / "plugins.py").read_text())
    own = {"algorithm.advantage_mode": "plugins:centred", "data.source": "plugins:problems"}
    train(session, BASE + QUIET, *sets(own))


# -- sampling and data -----------------------------------------------------------------------------


@scenario
def truncated_sampling(session: Session) -> None:
    values: dict[str, Any] = {"training.temperature": 0.8}
    for number, more in enumerate(({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02})):
        own = values | {f"training.{key}": value for key, value in more.items()}
        train(session, BASE + QUIET, *sets(own), file="c.toml", out=f"out{number}")


@scenario
def data_file(session: Session) -> None:
    """Problems of a file, tags, a prompt that is too long and skipped, and several held-out sets."""
    text = BASE.replace("problems = 5\n", "problems = 4\ntemperature = 0.0\n") + QUIET
    text += """
[data]
source = "{world}/long.jsonl"
tags_column = "kind"
long_prompts = "skip"
eval_fraction = 0.25
system_prompt = "Be brief."
prompt_template = "Solve {prompt}"
[[evaluation.sets]]
name = "own"
[[evaluation.sets]]
name = "harder"
source = "{world}/harder.jsonl"
samples = 2
temperature = 1.0
"""
    train(session, text.replace("lr = 0.01", "lr = 0.01\neval_every = 1"))


@scenario
def rewards(session: Session) -> None:
    """A weighted reward with a metric of its own, an audit, and soft punishment of long answers."""
    weighted = """
[reward]
type = "weighted"
overlong_tokens = 4
workers = 1
[[reward.components]]
type = "custom"
name = "even"
custom_module = "{world}/rewards.py"
custom_function = "even"
weight = 0.5
[[reward.components]]
type = "custom"
custom_module = "{world}/rewards.py"
custom_function = "graded"
[[reward.components]]
type = "format"
weight = 0.1
offset = -1.0
[audit]
type = "match"
"""
    train(session, MODEL + weighted + TRAINING + EVALUATION + QUIET)


@scenario
def tools(session: Session) -> None:
    """Several turns with a tool, credited by episode, turn and state."""
    world = """
[model]
model = "tiny-tool-user"
lora_rank = 4
[environment]
tools = ["calculator"]
tools_prompt = ""
max_turns = 3
workers = 1
[data]
levels = ["easy"]
[reward]
type = "match"
"""
    runs = [("grpo", "none", {"algorithm.turn_credit": credit}) for credit in ("episode", "turn", "state")]
    training = TRAINING.replace("max_tokens = 10", "max_tokens = 24").replace("batch_size = 3", "batch_size = 2")
    train(session, conditions(*runs) + world + training + EVALUATION + QUIET)


@scenario
def reasoning_tasks(session: Session) -> None:
    world = '\n[environment]\nprovider = "reasoning_gym"\nid = "basic_arithmetic"\nworkers = 1\n'
    train(session, MODEL + world + TRAINING.replace("max_tokens = 10", "max_tokens = 8") + EVALUATION + QUIET)


# -- the loop and campaigns ------------------------------------------------------------------------


@scenario
def campaign(session: Session) -> None:
    """Lanes of several runs with a verdict, a report and squeeze; then everything that reads such a directory."""
    runs: list[Condition] = [("grpo", "none", {}), ("maxrl", "gtpo_sepa", {"sepa.steps": 2})]
    text = conditions(*runs, seeds=(1, 2, 3), max_steps=3) + BASE
    train(session, text, *sets({"training.eval_every": 1}))
    session.run("status", "out", "--json")
    session.run("compare", "out", "--json")
    session.run("compare", "out")
    session.run("report", "out", "--out", "report.html")
    session.run("train", "c.toml", "--out", "out", *sets({"training.eval_every": 1}))  # nothing is left to do
    session.run("resume", "out", "--set", "training.max_steps=4")
    session.run("compare", "out", "--json")
    place = "/api/{}?at=out"
    run = "/api/{}?at=out/runs/grpo%2Bnone_s1"
    views = ["campaign", "metrics", "notes", "problems"]
    of_run = ["log", "iterations", "rollouts", "lora"]
    asked = [place.format(view) for view in views] + [run.format(view) for view in of_run]
    asked += [place.format("curves") + "&key=mean_reward", place.format("columns") + "&key=loss&key=entropy"]
    session.serve("ui", "out", requests=[("/api/places", None), *((path, None) for path in asked)], ready="/api/places")


@scenario
def interim_analysis(session: Session) -> None:
    head = conditions(*variants({}, {"lr": 0.5}), seeds=tuple(range(1, 9)), max_steps=1, equivalence_margin=0.2)
    train(session, head + BASE + QUIET)
    session.run("compare", "out", "--json")


@scenario
def a_failing_run(session: Session) -> None:
    runs = [*variants({}, {"reward.custom_function": "hopeless"}), ("rloo", "none", {})]
    train(session, conditions(*runs, max_steps=4) + BASE + QUIET)
    session.run("status", "out")
    session.run("resume", "out", "--retry-failed")


@scenario
def killed(session: Session) -> None:
    """A campaign that is killed at a random step and resumed, twice."""
    runs: list[Condition] = [("grpo", "none", {}), ("rloo", "gtpo", {})]
    session.write("c.toml", conditions(*runs, seeds=(1, 2), max_steps=8) + BASE + QUIET)
    out = session.folder / "out"
    for rows in sorted(random.Random(0).sample(range(2, 24), 2)):
        session.kill("train", "c.toml", "--out", "out", when=lambda rows=rows: count_rows(out) >= rows)
    session.run("resume", "out")
    session.record.clear()  # how far the last checkpoint was is a matter of milliseconds, and the logs say it
    for log in out.glob("runs/*/run.log"):
        log.unlink()
    session.run("status", "out")


@scenario
def interrupted_single_run(session: Session) -> None:
    train(session, BASE + QUIET, *sets({"training.max_steps": 2, "training.save_every": 1}))
    session.run("resume", "out", "--set", "training.max_steps=4")
    session.run("resume", "out")
    session.run("train", "c.toml", "--out", "continued", "--set", "resume.from=out", "--set", "training.max_steps=6")


@scenario
def workers(session: Session) -> None:
    runs: list[Condition] = [("grpo", "none", {}), ("rloo", "none", {})]
    session.write("c.toml", conditions(*runs, seeds=(1, 2)) + BASE + QUIET)
    how = ("--executor", "processes", "--workers", "2", *sets({"backend.devices": "cpu"}))
    session.run("train", "c.toml", "--out", "out", *how, sort=True)


@scenario
def two_ranks(session: Session) -> None:
    for shard in ("dp", "fsdp2"):
        own = {"backend.shard": shard, "backend.ranks": 2, "backend.devices": "cpu"}
        train(session, BASE + QUIET, *sets(own), out=shard)


@scenario
def back_pressure(session: Session) -> None:
    """The controller's decisions from recorded throughputs; what this machine measures is replaced."""
    session.write("c.toml", BASE + QUIET)
    own = {"backpressure.enabled": True, "backpressure.warmup_steps": 2, "training.max_steps": 5}
    session.run("train", "c.toml", "--out", "out", *sets(own), before=replay_throughput)


# -- adapters --------------------------------------------------------------------------------------


@scenario
def adapters(session: Session) -> None:
    """Squeeze with compression and continuation, export, samples, and answers of ``serve``."""
    train(session, BASE, *sets({"squeeze.compress_to": 2, "squeeze.min_variance_retention": 0.5}))
    session.run("squeeze", "out")
    session.run("squeeze", "out", "--json")
    session.run("squeeze", "out", "--to", "1", "--out", "compressed")
    session.run("squeeze", "out", "--to", "3", "--pattern", "--out", "patterned")
    session.run("squeeze", "out", "--to", "2", "--continue", "2")
    session.run("export", "out", "--merge", "--out", "merged")
    session.run("export", "out", "--rank-pad", "8", "--out", "padded")
    prompt = {"prompt": "1+2=?", "max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": 1}
    chat = {"messages": [{"role": "user", "content": "1+2=?"}], "max_tokens": 6, "temperature": 0}
    requests: list[tuple[str, dict[str, Any] | None]] = [
        ("/v1/models", None),
        ("/v1/completions", prompt | {"model": "out"}),
        ("/v1/chat/completions", chat | {"model": "out"}),
        ("/v1/completions", prompt | {"model": "nothing"}),
        ("/tokenize", {"model": "out", "prompt": "1+2=?"}),
    ]
    session.serve("serve", "out", requests=requests, ready="/health")


# -- configuration ---------------------------------------------------------------------------------

FAULTS = (
    "[training]\nlr = 0", "[training]\nlr = \"0.1\"", "[training]\nmax_stps = 3", "[trainng]\nlr = 0.1",
    "[training]\nbatch_size = 0", "[training]\ntemperature = 0", "[training]\ntop_p = 1.5", "[training\nlr = 1",
    "[model]\nlora_rank = 0", "[model]\nmodel = \"./nothing\"", "[model]\nmodel = \"tiny-reasonr\"",
    "[algorithm]\nadvantage_mode = \"grop\"", "[algorithm]\nloss = \"m2po\"\ntis_cap = 2.0",
    "[algorithm]\ncispo_cap = 3.0", "[algorithm]\nloss = \"dppo\"\ndppo_threshold = -1",
    "[algorithm]\ntransform_mode = \"gtpo\"\n[hicra]\nalpha = 0.3", "[gtpo]\nbeta = 0.5", "[sepa]\nsteps = 5",
    "[critic]\nlr = 0.1", "[data]\nsource = \"nothing.jsonl\"", "[data]\nlevels = [\"hardest\"]",
    "[data]\neval_fraction = 1.0", "[reward]\ntype = \"custom\"", "[reward]\ntype = \"weighted\"",
    "[reward]\ntype = \"custom\"\ncustom_module = \"nothing\"", "[evaluation]\nproblems = -1",
    "[evaluation]\nproblems = 5\n[[evaluation.sets]]\nname = \"a\"\n[[evaluation.sets]]\nname = \"a\"",
    "[campaign]\nseeds = []", "[campaign]\nseeds = [1, 1]", "[campaign]\nseeds = [1]\n[training]\nseed = 3",
    "[campaign]\nseeds = [1]\n[[campaign.conditions]]\nadvantage_mode = \"grpo\"",
    "[campaign]\nsequential = \"linear\"", "[campaign]\ntest = \"t\"", "[backend]\ndevices = \"gpu:99\"",
    "[backend]\nshard = \"dp\"\nranks = 1", "[inference]\nengine = \"vllm\"", "[inference]\nurl = \"localhost\"",
    "[squeeze]\ntarget_ranks = [99]", "[logging]\nreport_to = [\"nothing\"]", "[logging]\naliases = [\"nothing\"]",
    "[environment]\nprovider = \"nothing\"", "[environment]\nmax_turns = 3\n[reward]\ntype = \"match\"",
    "[backpressure]\nmin_batch_size = 9\nmax_batch_size = 3", "\x00", "[training]\nlr = nan",
)  # fmt: skip


@scenario
def faulty_files(session: Session) -> None:
    """What ``check`` says of each; they are many, so one process checks them all."""
    for number, text in enumerate(FAULTS):
        session.write(f"fault{number:02}.toml", text + "\n")
        session.run("check", f"fault{number:02}.toml")


@scenario
def right_files(session: Session) -> None:
    session.write("c.toml", conditions(("grpo", "none", {}), ("maxrl", "gtpo", {})) + BASE)
    session.run("check", "c.toml")
    session.run("init", "--template", "quickstart")
    session.run("check", "quickstart.toml")
    session.run("schema")
    session.run("--version")
    session.run("nothing")


def count_rows(out: Path) -> int:
    """Metrics rows of all runs of a campaign so far."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob("runs/*/metrics.jsonl"))


def replay_throughput() -> None:
    """Replace the seconds of each decoded batch by recorded ones, wherever this version has its controller."""
    recorded = iter((1.0, 1.2, 2.0, 0.9, 1.1, 1.0, 1.0, 1.0))
    for name in ("retrain.pressure", "retrain.rollouts.pressure"):
        try:
            controller = importlib.import_module(name).Pressure
        except ImportError:
            continue
        measured = controller.observe

        def observe(self: Any, tokens: int, seconds: float, *rest: Any, measured: Any = measured) -> None:
            measured(self, tokens, next(recorded), *rest)

        controller.observe = observe
        return
    raise RuntimeError("no back-pressure controller: name its module in replay_throughput")
