"""``explain``: print what a file would train, what its comparison can detect, and its costs; torch is not imported."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from retrain.campaign.planning.engine import with_engine
from retrain.campaign.planning.plan import Plan, cut, seeds_before_interim
from retrain.campaign.planning.references import data_problems
from retrain.cli import formulas
from retrain.cli.arguments import EXECUTOR, FILE, OUT, SETS, WORKERS, executor_sets, option, read
from retrain.cli.output import print_table
from retrain.cli.pace import recorded_pace
from retrain.cli.problems import Problems, problems_of, reason_of
from retrain.config import Config
from retrain.config.campaign import condition_name
from retrain.config.evaluation import HeldOut, whole_evaluations
from retrain.config.runs import RunSpec, differences
from retrain.data.examples import read_dialogues
from retrain.device import cpu_build, nvidia_gpus
from retrain.errors import UsageError, listed, plural
from retrain.models.layers import Architecture, architecture_of
from retrain.records.schema.layout import CAMPAIGN_FILES, ONLY_OF_CAMPAIGNS, RUN_FILES, WARMUP_FILES
from retrain.training import estimate
from retrain.training.estimate import Device, RunSize
from retrain.util.text import approximate_duration, count, one_line, size
from retrain.verdicts.design import verdict_lines, warnings_of

CONDITION_COLUMNS = (
    "condition", "credit for a completion with reward r", "credit for its tokens", "differs from the first in",
)  # fmt: skip
FILE_COLUMNS = ("file", "what it holds")
TEXTS = {
    "token credit": formulas.credit_formula, "critic": formulas.critic_text, "distillation": formulas.distillation_text,
    "loss": formulas.loss_text, "reward": formulas.reward_text,
}  # fmt: skip
"""Functions that describe a condition's algorithm, by the name of the printed line."""


def explain(
    file: Path = FILE,
    sets: list[str] | None = SETS,
    out: Path | None = OUT,
    pilot: Path | None = option(
        "--pilot DIR",
        "Take the pair spread from the runs in this directory; by default from an earlier campaign of the file.",
    ),
    detect: float | None = option(
        "--detect POINTS",
        "Print the probability of finding a difference of this size, and the seeds needed; needs a pair spread.",
        min=1e-9,
    ),
    executor: str | None = EXECUTOR,
    workers: int | None = WORKERS,
    files: bool = option("--files", "List every file that training would write, instead.", False),
) -> None:
    """Show a file's conditions, detectable effects and costs; train nothing."""
    plan = Plan.of(read(file, [*(sets or ()), *executor_sets(executor, workers)]), out)
    if files:
        print_files(plan)
    else:
        print_explanation(plan, pilot, detect)


def print_explanation(plan: Plan, pilot: Path | None = None, detect: float | None = None) -> None:
    source = plan.source
    assert source is not None
    try:
        plan = with_engine(plan)
    except UsageError as error:  # the file asks for vLLM, and may train elsewhere
        plan = replace(plan, notes=(str(error),))
    specs, config = plan.specs, plan.specs[0].config
    seeds = list(dict.fromkeys(spec.seed for spec in specs))
    conditions = conditions_of(specs)
    counts = [plural(len(each), word) for each, word in ((conditions, "condition"), (seeds, "seed"), (specs, "run"))]
    print(f"{source.path}: {counts[0]} × {counts[1]} = {counts[2]}\n")
    rows = [condition_row(spec, conditions[0]) for spec in conditions]
    print_table(CONDITION_COLUMNS, rows, left_aligned=CONDITION_COLUMNS)
    print()
    for name, text_of in TEXTS.items():
        print_by_text(name, text_of, conditions)
    if config.environment.hosted:
        print_line("environment", formulas.environment_text(config))
    problems = problems_of([spec.config for spec in specs], plan.folder)
    for name, text in problems.lines:
        print_line(name, text)
    for problem in () if problems.is_read else data_problems(plan, source):
        print(f"note: {problem}", file=sys.stderr)
    print_lines("warm-up", warmup_texts(conditions, plan.folder))
    print_line("seeds", " ".join(map(str, seeds)))
    held_out = estimate.held_out_sets(config, problems.sizes) if config.evaluation.sets else ()
    print_lines("held out", map(partial(held_out_text, config), held_out))
    print_lines("verdict", verdict_lines(specs, pilot, detect, plan.directory))
    for line in warnings_of(specs):
        print_line("careful", line)
    works = [estimate.run_size(spec.config, problems.prompt_tokens, problems.sizes) for spec in specs]
    print_work(specs, works, problems)
    print_costs(plan, works, problems.prompt_tokens)
    print_line("writes", f"{plan.directory}/ (--files lists what)")


def print_line(name: str, text: str) -> None:
    print(f"{name:<14}{text}")


def print_lines(name: str, texts: Iterable[str]) -> None:
    for i, text in enumerate(texts):
        print_line("" if i else name, text)


def print_by_text(name: str, text_of: Callable[[Config], str], conditions: list[RunSpec]) -> None:
    """Print each distinct, non-empty text of ``text_of`` once, followed by the conditions to which it applies."""
    for text in filter(None, dict.fromkeys(text_of(spec.config) for spec in conditions)):
        having = [condition_name(spec.label) for spec in conditions if text_of(spec.config) == text]
        print_line(name, text + ("" if len(having) == len(conditions) else f"  ({', '.join(having)})"))


def conditions_of(specs: Sequence[RunSpec]) -> list[RunSpec]:
    return [spec for spec in specs if spec.seed == specs[0].seed]


def condition_row(spec: RunSpec, first: RunSpec) -> tuple[str, str, str, str]:
    changed = [
        f"{key.removeprefix('algorithm.')} = {value}"
        for key, (_, value) in differences(first.config.model_dump(), spec.config.model_dump()).items()
    ]
    credit = formulas.advantage_text(spec.config), formulas.credit_text(spec.config)
    return (condition_name(spec.label), *credit, ", ".join(changed) or "-")


def warmup_texts(conditions: Sequence[RunSpec], folder: Path) -> Iterator[str]:
    """Yield what each ``[warmup]`` trains on, and which runs share it. Rows are counted, not tokenised."""
    configs = {repr(spec.config.warmup): spec.config for spec in conditions if spec.config.warmup.active}
    for config in configs.values():
        warmup, source = config.warmup, config.warmup.source or ""
        length = plural(warmup.steps, "step") if warmup.steps else plural(warmup.epochs or 1, "epoch")
        try:
            rows = len(read_dialogues(config, source, warmup.split, folder))
            examples = plural(rows, "example")
            length += "" if warmup.steps else f" = at most {plural(warmup.step_count(rows), 'step')}"
        except Exception as error:  # RetrainError, or any exception of a user's data function
            examples = f"not read: {reason_of(error)}"
        batch = f"{warmup.batch_size} examples of at most {warmup.max_tokens:,} tokens"
        yield f"{one_line(source)}: {examples}; {length} of {batch}, lr {warmup.lr:g}"
    if configs:
        keys = "equal model, LoRA and optimizer keys"
        yield f"trained once, before the first step, for all conditions and seeds with {keys}"


def held_out_text(config: Config, held_out: HeldOut) -> str:
    sampling, source = held_out.sampling, held_out.data.eval_source or held_out.data.source
    cuts = (("top_p", sampling.top_p, 1), ("top_k", sampling.top_k, 0), ("min_p", sampling.min_p, 0))
    cut = "".join(f" {key} {value:g}," for key, value, off in cuts if value != off and sampling.temperature)
    decides = "; the primary metric's" if held_out.name == getattr(config.decisive, "name", None) else ""
    return (
        f"{held_out.name}: {held_out.problems} problems × {held_out.samples} of {source}, at temperature "
        f"{sampling.temperature:g},{cut} at most {sampling.max_tokens} tokens{decides}"
    )


def print_work(specs: list[RunSpec], works: list[RunSize], problems: Problems) -> None:
    print_by_text("each run", training_text, conditions_of(specs))
    print_by_text("evaluated", partial(evaluation_text, problems), conditions_of(specs))
    if len(specs) > 1:
        tokens = sum(work.draws * work.completions * work.tokens for work in works)
        line = f"at most {count(tokens)} sampled training tokens"
        if evaluated := estimate.sampled_evaluations([spec.config for spec in specs], works):
            once = " (the untrained model once for all runs that grade alike)" if works[0].at_start else ""
            line += f", and {evaluated:,} completions for evaluation{once}"
        print_line("altogether", line)
    if specs[0].config.squeeze.enabled:
        print_line("squeeze", squeeze_text(specs[0].config, problems))


def training_text(config: Config) -> str:
    training, workload = config.training, estimate.run_size(config)
    text = (
        f"{training.max_steps} steps × {training.batch_size} prompts × {training.group_size} completions"
        f" = {workload.completions:,} completions, at most {count(workload.completions * workload.tokens)} tokens;"
        f" {plural(workload.updates, 'update')}"
    )
    if again := training.dynamic_sampling:
        text += f"; up to {again} times as many more in place of prompts that teach nothing (dynamic_sampling)"
    return text


def evaluation_text(problems: Problems, config: Config) -> str:
    training, evaluation = config.training, config.evaluation
    workload, sets = estimate.run_size(config, sizes=problems.sizes), estimate.held_out_sets(config, problems.sizes)
    if not sets:
        return "never ([evaluation] problems = 0)"
    schedule = (evaluation.schedule, training.max_steps, training.eval_every)
    regular, last = whole_evaluations(*schedule)
    whole = [*([0] if evaluation.at_start else []), *regular[:6], *last]
    steps = ", ".join(map(str, whole)) if len(whole) <= 6 else f"{', '.join(map(str, whole[:3]))}, …, {whole[-1]}"
    text = f"{plural(workload.evaluations + workload.at_start, 'time')} (after {steps} steps) "
    text += " + ".join(f"{each.problems:,} problems × {each.samples}" for each in sets)
    if workload.parts:
        few = sum(each.part.problems for each in sets)
        text += f", and {plural(workload.parts, 'time')} between {few:,} of them × 1"
    completions = plural(workload.evaluation_completions, "completion")
    return f"{text} = {completions}, at most {count(workload.evaluation_tokens)} tokens"


def squeeze_text(config: Config, problems: Problems) -> str:
    held_out = config.decisive
    by_condition = config.squeeze.runs == "one per condition" and config.is_campaign
    after = "after the first run of each condition" if by_condition else "after the first run"
    text = f"{after}: which rank up to {config.model.lora_rank} keeps enough energy"
    if held_out is not None and (evaluated := estimate.verified_ranks(config)):
        asked = problems.sizes.get(held_out.name, held_out.problems)
        answers = (len(config.campaign.conditions) if by_condition else 1) * evaluated * asked * held_out.samples
        text += f", and held-out accuracy at up to {evaluated} ranks ({answers:,} completions; [squeeze] verify)"
    return text


def print_costs(plan: Plan, works: list[RunSize], prompt_tokens: int | None) -> None:
    specs, config = plan.specs, plan.specs[0].config
    device, gpus = device_of(config)
    workers = workers_of(config, gpus)
    groups = cut(specs, device.kind == "gpu", workers, first=seeds_before_interim(specs))
    architecture = architecture_of(config.model.model, config.model.revision)
    if architecture is None:
        missing = "its config.json is not on this machine: no memory estimate; retrain try fetches the model"
        print_line("model", f"{config.model.model}: {missing}")
    else:
        print_by_text("model", partial(model_text, architecture), conditions_of(specs))
        print_line("memory", memory_text(groups, architecture, device, prompt_tokens))
    if config.is_campaign:
        sizes = list(map(len, groups))
        together = plural(sizes[0], "run") if len(set(sizes)) == 1 else f"{' + '.join(map(str, sizes))} runs"
        cohorts = f"{plural(len(groups), 'cohort')} of {together} that step together"
        print_line("cohorts", f"{cohorts}, for {plural(workers, 'worker')}")
    for text in idle_text(specs, len(groups), workers, gpus):
        print_line("idle", text)
    print_lines("engine", plan.notes)
    print_line("time", time_text(plan, works, device, len(groups), workers if gpus else 1))


def device_of(config: Config) -> tuple[Device, int]:
    """Return the device of one process, and how many GPUs of this machine it could use."""
    gpus = [] if config.backend.devices == "cpu" or cpu_build() else nvidia_gpus()
    if gpus:
        amount = gpus[0].memory.split()[0]  # "81559 MiB"
        memory = int(amount) * 2**20 if amount.isdigit() else 0
        return Device("gpu", memory // config.campaign.workers_per_gpu), len(config.backend.named_gpus) or len(gpus)
    if config.backend.named_gpus:
        return Device("gpu"), 0
    workers = config.campaign.workers if isinstance(config.campaign.workers, int) else 1
    return Device("cpu", int(psutil.virtual_memory().total) // workers), 0


def workers_of(config: Config, gpus: int) -> int:
    campaign = config.campaign
    if not config.is_campaign or campaign.executor == "inprocess":
        return 1
    if campaign.workers != "auto":
        return campaign.workers
    return max(1, gpus // config.gpus_per_worker * campaign.workers_per_gpu)


def idle_text(specs: Sequence[RunSpec], cohorts: int, workers: int, gpus: int) -> Iterator[str]:
    """Yield a line for idle workers and one for idle GPUs, each with the setting that uses them."""
    config, share, runs = specs[0].config, specs[0].config.campaign.workers_per_gpu, plural(len(specs), "run")
    is_sharded, in_process = config.backend.shard != "none", config.campaign.executor == "inprocess"
    if cohorts < workers:
        idle = f"{workers - cohorts} of {plural(workers, 'worker')}"
        if len(specs) > cohorts:
            lanes = max(1, len(specs) // workers)
            yield f"{idle}: {runs} are {plural(cohorts, 'cohort')}; set [campaign] lanes = {lanes}"
        else:
            seeds = plural(-(-workers // len(conditions_of(specs))), "seed")
            ways = [f"workers = {cohorts}", f"{seeds} with lanes = 1"]
            if gpus // cohorts > 1 and not is_sharded:
                ways.append(f'shard = "dp" in [backend] with gpus_per_cohort = {gpus // cohorts}')
            yield f"{idle}: there are no more than {runs}; set {', or '.join(ways)}"
    used = -(-workers // share) * config.gpus_per_worker
    if gpus > used and not (is_sharded and in_process):  # one process uses all GPUs over which it is sharded
        way = f"--workers {gpus // config.gpus_per_worker * share}"
        if not config.is_campaign:
            way = "--set backend.shard=dp --set backend.devices=all, to train the run on all"
        elif in_process:
            way = "--executor processes, which trains a cohort on each"
        yield f"{gpus - used} of {gpus} GPUs: type {way}"


def model_text(architecture: Architecture, config: Config) -> str:
    adapter, critic = estimate.trained_parameters(config, architecture)
    trained = f"{count(adapter)} trained in the adapter (rank {config.model.lora_rank})"
    if critic:
        trained += f", {count(critic)} in the critic"
    return f"{config.model.model}: {count(architecture.parameters())} parameters, frozen; {trained}"


def memory_text(
    groups: Sequence[Sequence[RunSpec]], architecture: Architecture, device: Device, prompt_tokens: int | None
) -> str:
    lanes = {  # by label, because all runs of a condition need the same memory; the first cohort's size counts
        spec.label: estimate.run_memory(spec.config, architecture, device, prompt_tokens, len(group))
        for group in reversed(groups)
        for spec in group
    }
    memories = [(estimate.cohort_memory([lanes[spec.label] for spec in group]), len(group)) for group in groups]
    memory, runs = max(memories, key=lambda each: each[0].peak)
    least, most = memory.least, memory.peak
    amount = f"about {size(least)}" if least == most else f"{size(least)} to {size(most)}"
    kind = {"cpu": "CPU", "gpu": "GPU"}[device.kind]
    numbers = {2: "bfloat16", 4: "float32", 8: "float64"}[estimate.number_bytes(groups[0][0].config, device)]
    parts = {
        "Python and torch": memory.process,
        f"model in {numbers}": memory.base,
        "a copy of its output layer": memory.head_copy,
        "its weights in bfloat16 for updates": memory.update_copy,
        f"trained adapters of {plural(runs, 'run')}" if runs > 1 else "trained adapter": memory.adapter,
    }
    staying = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part)
    turns = f"{size(memory.training)} to train on {memory.micro_batch_tokens:,} tokens"
    if memory.sampling:  # 0 if servers sample
        turns += f" or {size(memory.block_copy + memory.sampling)} to decode all sequences at once"
    of = f" of {size(device.memory)}" if device.kind == "gpu" and device.memory else ""
    text = f"{amount}{of} on a {kind}, by calculation: {staying}; and {turns}"
    if device.kind == "cpu" and least > device.memory:
        text += f"; here are {size(device.memory)}. --set backend.devices=gpu:0 tells what it takes on a GPU"
    return text


def time_text(plan: Plan, works: Sequence[RunSize], device: Device, cohorts: int, workers: int) -> str:
    """Return the duration of all runs, estimated from earlier runs of this model on this machine, or why it is
    unknown."""
    config = plan.specs[0].config
    places = dict.fromkeys([plan.directory.parent, Path("logs")])
    pace = recorded_pace(config, device.kind, places)
    if pace is None:
        where = " or ".join(f"{place}/" for place in places)
        return (
            f"not known: no finished run of {config.model.model} with max_tokens = {config.training.max_tokens} on this"
            f" machine under {where}"
        )
    completions = sum(work.completions for work in works)
    completions += estimate.sampled_evaluations([spec.config for spec in plan.specs], works)
    busy = pace.seconds / pace.completions * completions
    rounds = -(-cohorts // workers) / cohorts
    differing = f"; differs in {listed(pace.differing, 3)}" if pace.differing else ""
    return (
        f"about {approximate_duration(busy * rounds)} at the speed of {pace.directory} ({plural(pace.runs, 'run')},"
        f" {pace.completions:,} completions in {approximate_duration(pace.seconds)}{differing})"
    )


def print_files(plan: Plan) -> None:
    config, runs = plan.specs[0].config, plan.specs
    top = (*CAMPAIGN_FILES, *(WARMUP_FILES if any(spec.config.warmup.active for spec in runs) else ()))
    rows = [(f"  {file.name}", file.content) for file in top]
    if not runs[0].is_campaign:
        both = {file.name: file.content for file in (*top, *RUN_FILES)}
        rows = [(f"  {name}", text) for name, text in both.items() if name not in ONLY_OF_CAMPAIGNS]
    else:
        if config.campaign.executor != "inprocess":
            rows.append(("  workers/worker_<n>.log", "what worker processes printed"))
        if config.campaign.executor == "slurm":
            rows.append(("  workers/slurm_<k>/", "what was asked of Slurm, what its jobs printed, and their commands"))
        rows.append(
            ("  runs/<run>/", f"one directory for each of the {len(runs)} runs, such as runs/{runs[0].run_id}/")
        )
        rows += [(f"    {file.name}", file.content) for file in RUN_FILES]
    print(f"\nwrites        {plan.directory}/")
    print_table(FILE_COLUMNS, rows, left_aligned=FILE_COLUMNS)
