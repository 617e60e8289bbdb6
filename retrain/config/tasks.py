"""[data], [reward], [environment]: problems and graders."""

from __future__ import annotations

import datetime
import difflib
import math
import re
from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from retrain.config.base import (
    ActiveIf,
    ConfigIssue,
    Count,
    Natural,
    OptionalCount,
    OptionalText,
    Positive,
    Role,
    Seconds,
    Section,
    Text,
    fault,
    is_plugin,
)
from retrain.config.describe import no_effect
from retrain.plugins import why_no_range

SOURCES = ("arithmetic", "gsm8k", "math", "human_eval")
FILE_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".parquet")
Level = Literal["easy", "medium", "hard", "long"]
DEFAULT_TURNS = 16
"""Most turns of an episode if `max_turns` is unset."""


OTHER_FILE = re.compile(r"(.+)\.(tsv|json|ndjson|txt|xlsx?|arrow)")


def names_data(value: str) -> bool:
    """Return whether a text has the form of a data file, a directory, a hub name or a `module:function`."""
    if value.endswith(FILE_ENDINGS) or is_plugin(value):
        return True
    return "/" in value and ":" not in value and OTHER_FILE.fullmatch(value) is None


def _source(value: str | None) -> str | None:
    if value is None or value in SOURCES or names_data(value):
        return value
    file = OTHER_FILE.fullmatch(value)
    close = difflib.get_close_matches(value.rpartition("/")[2], [*SOURCES, "hendrycks_math"], n=1, cutoff=0.6)
    name = "math" if close == ["hendrycks_math"] else close[0] if close else "arithmetic"
    if file:
        name = f"{file[1]}.jsonl"
    raise fault(
        f'is "{value}", but must be one of "arithmetic", "gsm8k", "math", "human_eval", a file ending in .jsonl, .csv '
        "or .parquet, a directory (./name) or hub name (owner/name), or a module:function",
        f'source = "{name}"' + (', made with one {"prompt": "…", "answer": "…"} per line' if file else ""),
    )


def has_configurations(source: str | None) -> bool:
    """Return whether the source may have configurations that `subset` selects: a hub name or a directory."""
    return source is not None and "/" in source and not source.endswith(FILE_ENDINGS) and not is_plugin(source)


def _prompt_template(value: str) -> str:
    if "{prompt}" not in value:
        raise fault("does not contain {prompt}, so the problem would never be shown", 'prompt_template = "{prompt}"')
    return value


Free = TypeVar("Free")
OptionalSource = Annotated[OptionalText, AfterValidator(_source)]
Template = Annotated[Text, AfterValidator(_prompt_template)]


def _json(value: Free) -> Free:
    """Refuse dates, times, NaN and infinity in free tables, because plans and manifests are JSON."""
    values: list[object] = [value]
    while values:
        item = values.pop()
        if isinstance(item, dict | list):
            values.extend(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, datetime.date | datetime.time) or (isinstance(item, float) and not math.isfinite(item)):
            kinds = "strings, finite numbers, booleans, lists and tables"
            raise fault(f"contains {item}, but can hold only {kinds}", f'"{item}"')
    return value


def _endpoint(value: str | None) -> str | None:
    if value is not None and "@" in value.partition("://")[2].partition("/")[0]:
        raise fault(
            "holds a user name or password, which would be written into every run directory",
            'judge_api_key_env = "JUDGE_KEY", with the key in that environment variable',
        )
    if value is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
        address = re.sub(r"^.*://|\s", "", value).lstrip("/") or "localhost:8000/v1"
        raise fault(f'is "{value}", which is no address', f'judge_url = "http://{address}"')
    return value


class Data(Section, role=Role.SAMPLES):
    """Training and held-out problems."""

    source: Annotated[Text, AfterValidator(_source)] = "arithmetic"
    """`arithmetic` (generated), `gsm8k`, `math`, `human_eval` (of the package `human-eval`), a local `.jsonl`, `.csv`
    or `.parquet` file or data set directory (paths are relative to the TOML file first), a data set's hub name
    (`owner/name`), or `module:function`."""
    subset: OptionalText = None
    """Configuration of a data set that has several, such as `main` of `openai/gsm8k`."""
    split: Text = "train"
    """Split of a data set to train on."""
    eval_source: OptionalSource = None
    """Source of the held-out problems; unset is the evaluation split of `source`, or a part of `source`."""
    eval_split: Text = "test"
    """Split of a data set to hold out."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the distinct problems that is held out where a file or data set has no `test` split and there is no
    `eval_source`: rounded to whole problems, and always the same ones."""
    prompt_column: OptionalText = None
    """Column of the problem: a string, or a list of chat messages. Unset is the first of `prompt`, `question` and
    `problem` that exists."""
    answer_column: OptionalText = None
    """Column of the reference answer, or of a solution that ends in `#### answer` or contains `\\boxed{}`. Unset is the
    first of `answer` and `solution` that exists. Problems with tests need none."""
    tags_column: OptionalText = None
    """Column of a tag or a list of tags; metrics are also reported for each tag."""
    system_prompt: OptionalText = None
    """System message before every problem."""
    prompt_template: Template = "{prompt}"
    """Text of the user message; `{prompt}` is the problem."""
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Arguments of the tokenizer's chat template, such as `{ enable_thinking = false }`."""
    max_prompt_tokens: OptionalCount = None
    """Most tokens of a prompt, chat markup included. The default and largest value is what the model's context leaves
    beside the largest `max_tokens`."""
    long_prompts: Literal["error", "skip"] = "error"
    """Treatment of longer prompts: `error` reports them before training; `skip` removes such problems from training and
    evaluation and reports their number. Also for over-long examples of [warmup]."""
    levels: Annotated[list[Level], Field(min_length=1)] | None = None
    """Difficulties of generated problems; unset is all but `long`."""
    size: Annotated[Count, ActiveIf("data.source", ("arithmetic",))] = 20_000
    """Number of training problems to generate."""
    shuffle: bool = True
    """Shuffle the problems in every pass, by the run's seed."""


def _ranges(value: dict[str, dict[str, float | bool]]) -> dict[str, dict[str, float | bool]]:
    for name, limits in value.items():
        if wrong := why_no_range(limits):
            raise fault(f'has for "{name}" {wrong}', f'metrics_ranges = {{ "{name}" = {{ min = 0.0, max = 1.0 }} }}')
    return value


MARKED = ("match", "math")
"""Reward types that extract the answer from a completion."""
TEST_COLUMNS = ("tests", "test_list", "test")
"""Columns of a program's tests; the first that a problem has is used."""
TESTED = (*TEST_COLUMNS, "entry_point", "test_setup_code", "test_imports", "inputs", "outputs")
"""All columns that the reward `unit_tests` reads."""
RUBRIC_WEIGHTS = {"essential": 1.0, "important": 0.7, "optional": 0.3, "pitfall": 0.9}
"""Weights that have a name, from arXiv 2507.17746."""
JUDGED = ("judge", "rubric")
"""Reward types that query a model behind an endpoint."""
NEEDED = {"judge_model": "gpt-4o-mini", "custom_module": "my_rewards", "reward_model": "./my_reward_model"}
"""Keys that a grader's type requires, each with an example value."""


class RubricCriterion(Section):
    """One criterion of a rubric."""

    name: Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    """Name in the metrics, `rubric/<name>`."""
    text: Text
    """Criterion that the judge checks, such as `Gives the final answer in one sentence.`"""
    weight: Literal["essential", "important", "optional", "pitfall"] | float = "essential"
    """A number, or a name for 1, 0.7, 0.3 and 0.9. The text of a pitfall is phrased as what a good answer does. With a
    negative number the text describes a fault, and an answer that has this fault gets less reward."""

    @property
    def weight_number(self) -> float:
        return RUBRIC_WEIGHTS[self.weight] if isinstance(self.weight, str) else self.weight


class GraderKeys(Section):
    """Keys that a reward and a component of a weighted reward share."""

    name: OptionalText = None
    """Name in the metrics, `rewards/<name>/…`; unset is the function's name of a custom reward, else the type."""
    strict: bool = True
    """Accept only marked answers in `match` and `math`: the last `\\boxed{…}`, or, without a box, the last line `####
    …` if the data set's own solutions have such a line. `false` also accepts the last number where nothing is marked,
    or the last line if the reference is not a number; any text that ends in a digit is then an answer."""
    judge_model: OptionalText = None
    """Model name sent to the judge."""
    judge_url: Annotated[OptionalText, AfterValidator(_endpoint)] = None
    """Base address of an OpenAI-compatible endpoint, such as `http://localhost:8000/v1`; unset is OpenAI's own."""
    judge_api_key_env: OptionalText = None
    """Environment variable that holds the endpoint's key; unset sends none."""
    rubric: Literal["explicit", "implicit"] = "explicit"
    """Grading of a `rubric`: `explicit` judges every criterion separately and returns the weighted share of those met;
    `implicit` asks for one score between 0 and 1 given all criteria."""
    criteria: list[RubricCriterion] = Field(default_factory=list)
    """The criteria of a `rubric`, for all problems."""
    rubric_column: OptionalText = None
    """Column of a problem's additional criteria: a list of texts, or of tables with `text` (`criterion`,
    `description`), `weight` (`points`) and optionally `name`."""
    custom_module: OptionalText = None
    """Module or `.py` file of your own reward; paths are relative to the TOML file first."""
    custom_function: Text | Annotated[list[Text], Field(min_length=1)] = "score"
    """Function of `custom_module`, or a class with `__call__`. It takes the completion and the reference answer and
    returns a number or a `RewardResult`; or it takes `prompts`, `completions` and columns of the data and returns a
    list, as in TRL. Several functions, listed here or in the module, are summed."""
    reward_model: OptionalText = None
    """Directory (relative to the TOML file first) or hub name of a sequence-classification model with one label, in
    transformers format with its own tokenizer."""

    @property
    def shown_name(self) -> str:
        kind, function = getattr(self, "type", ""), self.custom_function
        return self.name or (function if kind == "custom" and isinstance(function, str) else kind)


class RewardComponent(GraderKeys):
    """One part of a weighted reward: weight × (reward + offset)."""

    type: Literal["match", "math", "format", "judge", "rubric", "custom", "reward_model", "unit_tests"]
    """Same values as in [reward]."""
    weight: float = 1.0
    """Factor of this part in the total."""
    offset: float = 0.0
    """Added before weighting: -1 makes a penalty that a perfect answer does not pay."""


def _grader_issues(grader: GraderKeys, kind: str, path: str) -> Iterator[ConfigIssue]:
    owners = dict.fromkeys(("judge_model", "judge_url", "judge_api_key_env"), JUDGED) | {
        "rubric_column": ("rubric",), "custom_module": ("custom",), "reward_model": ("reward_model",),
    }  # fmt: skip
    for key, owner in owners.items():
        if kind not in owner and getattr(grader, key) is not None:
            fix = f'remove the line, or type = "{owner[0]}"'
            yield no_effect(f"{path}.{key}", f"{path}.type", kind, fix)
    if kind != "rubric" and (grader.criteria or grader.rubric != "explicit"):
        key = "criteria" if grader.criteria else "rubric"
        yield no_effect(f"{path}.{key}", f"{path}.type", kind, 'type = "rubric"')
    if kind == "rubric":
        yield from _rubric_issues(grader, path)
    if kind not in MARKED and not grader.strict:
        fix = "write it in a component" if kind == "weighted" else 'remove the line, or type = "match"'
        yield no_effect(f"{path}.strict", f"{path}.type", kind, fix)
    if kind == "weighted" and grader.name is not None:
        yield no_effect(f"{path}.name", f"{path}.type", kind, "write it in a component")
    for key, example in NEEDED.items():
        if kind in owners[key] and getattr(grader, key) is None:
            message = f'is missing: type = "{kind}" needs it'
            yield ConfigIssue((f"{path}.{key}", f"{path}.type"), message, f'{key} = "{example}"')


def _rubric_issues(grader: GraderKeys, path: str) -> Iterator[ConfigIssue]:
    names = [each.name for each in grader.criteria]
    if not names and grader.rubric_column is None:
        example = 'criteria = [{ name = "correct", text = "The final answer is right." }]'
        yield ConfigIssue((f"{path}.criteria", f"{path}.type"), 'is missing: type = "rubric" needs some', example)
    if twice := next((name for name in names if names.count(name) > 1), None):
        message = f'has "{twice}" twice: their metrics would be one'
        yield ConfigIssue((f"{path}.criteria",), message, f'name = "{twice}_2"')
    if names and grader.rubric_column is None and not any(each.weight_number for each in grader.criteria):
        message = "has no weight but 0: nothing would ever be paid"
        yield ConfigIssue((f"{path}.criteria",), message, 'weight = "essential"')


WHERE_TESTED = ActiveIf(
    "reward.type", ("unit_tests",), unless="tested", unless_text="that of a component or of [audit]"
)


class RewardSection(GraderKeys, role=Role.LEARNS):
    """Reward of an answer."""

    type: Literal["match", "math", "format", "judge", "rubric", "custom", "reward_model", "unit_tests", "weighted"] = (
        "match"
    )
    """`match`: the marked answer (see `strict`), compared as text after normalising; `math`: mathematical equality;
    `format`: 1 if there is a marked answer; `judge`: a model behind an endpoint decides; `rubric`: such a model checks
    the answer against weighted criteria; `custom`: your function; `reward_model`: the score of a model that runs here;
    `unit_tests`: the answer is a program, run in a sandbox against the problem's tests; `weighted`: a sum of
    `[[reward.components]]`."""
    correct_above: float = 0.5
    """Total reward above which an answer is correct, unless the reward or environment itself decides."""
    timeout_s: Annotated[Seconds, Role.SPEED] = 10.0
    """Longest time for grading one completion, in seconds; after that its reward is null and the run continues.
    `reward_model` has no such limit. With `unit_tests` it is the longest time of a program, for all calls of its tests
    or for one input; the remaining tests then fail."""
    workers: Annotated[Count, Role.SPEED] = 2
    """Processes (`math`) or connections (`judge`, `rubric`) that grade in parallel. `unit_tests` runs as many programs
    as there are processor cores."""
    reward_batch: Annotated[
        Count,
        ActiveIf(
            "reward.type", ("reward_model",), unless="reward_models", unless_text="that of a component or of [audit]"
        ),
        Role.SPEED,
    ] = 8
    """Batch size of a `reward_model`: answers to one problem that it scores at once."""
    tests_credit: Annotated[Literal["share", "all"], WHERE_TESTED] = "share"
    """Reward of `unit_tests`: the share of passed tests, or 1 only if all pass."""
    tests_memory_mb: Annotated[int, Field(ge=64), WHERE_TESTED] = 512
    """Memory limit of a program under `unit_tests`, in MiB."""
    overlong_tokens: Natural = 0
    """Soft penalty of long answers in training (DAPO): over the last `overlong_tokens` of `max_tokens` the reward falls
    linearly, by 1 at `max_tokens`; correctness does not change. 0 switches it off."""
    components: list[RewardComponent] = Field(default_factory=list)
    """The parts of a weighted reward, each logged by its name."""
    metrics_ranges: Annotated[dict[str, dict[str, float | bool]], AfterValidator(_ranges), Role.RECORDS] = Field(
        default_factory=dict
    )
    """Ranges of components and sample metrics, for scaling charts only: `{ steps = { min = 0, max = 20 } }`, with
    `invert = true` where less is better. A custom reward or data source may declare its own."""
    reward_min: Annotated[float | None, Role.RECORDS] = None
    """Lower end of the reward, for scaling charts only."""
    reward_max: Annotated[float | None, Role.RECORDS] = None
    """Upper end of the reward, for scaling charts only."""

    @property
    def strict_answers(self) -> bool:
        """True if only marked answers count as answers; false for rewards that do not extract answers."""
        graders = [part for part in (self, *self.components) if part.type in MARKED]
        return bool(graders) and graders[0].strict

    @property
    def grading(self) -> str:
        """All settings that affect grades, as text. File names contain its hash, so keys that were added later are
        left out at their defaults."""
        excluded = {key for key, role in self.roles().items() if role == Role.RECORDS}
        later = ("tests_credit", "tests_memory_mb")
        excluded |= {key for key in later if getattr(self, key) == type(self).model_fields[key].default}
        return self.model_dump_json(exclude=excluded)

    def issues(self) -> Iterator[ConfigIssue]:
        yield from _grader_issues(self, self.type, "reward")
        if self.type == "weighted" and not self.components:
            fix = 'components = [{ type = "math" }, { type = "format", weight = 0.1, offset = -1.0 }]'
            message = 'is missing: type = "weighted" needs its parts'
            yield ConfigIssue(("reward.components", "reward.type"), message, fix)
        elif self.type != "weighted" and self.components:
            yield no_effect("reward.components", "reward.type", self.type, 'type = "weighted"')
        names: set[str] = set()
        for index, part in enumerate(self.components):
            path = f"reward.components.{index}"
            yield from _grader_issues(part, part.type, path)
            name = part.shown_name
            if name in names:
                message = f'is "{name}", like a part before it: their metrics would be one'
                yield ConfigIssue((f"{path}.name", path), message, f'name = "{name}_{index + 1}"')
            names.add(name)
        low, high = self.reward_min, self.reward_max
        if low is not None and high is not None and low >= high:
            message = f"is {high:g}, which is not above reward_min = {low:g}"
            yield ConfigIssue(("reward.reward_max", "reward.reward_min"), message, f"reward_max = {low + 1:g}")


AUDIT = "audit"  # Name of the audit's score among a rollout's metrics, and prefix of its other metrics


class Audit(GraderKeys, role=Role.EVALUATES):
    """A second grader, never trained on: if the reward rises while the audit falls, the policy is exploiting the
    reward. Its score is recorded as `rewards/audit/mean`, in held-out evaluations as `eval/<name>/audit`, and with each
    rollout."""

    type: Literal["off", "match", "math", "format", "judge", "rubric", "custom", "reward_model", "unit_tests"] = "off"
    """`off`, or a type as in [reward], whose `timeout_s` and `workers` apply too."""

    @property
    def is_enabled(self) -> bool:
        return self.type != "off"

    def issues(self) -> Iterator[ConfigIssue]:
        yield from _grader_issues(self, self.type, "audit")
        if self.name is not None:
            yield ConfigIssue(("audit.name",), "has no effect: its score is called audit")


PROVIDERS = ("reasoning_gym", "verifiers", "openenv")
"""Libraries whose environments run unchanged."""


def _provider(value: str | None) -> str | None:
    if value is None or value in PROVIDERS or is_plugin(value):
        return value
    if value == "textarena":
        raise fault('is "textarena", which is no longer built in', 'provider = "module:Class" of your own')
    close = difflib.get_close_matches(value, PROVIDERS, n=1, cutoff=0.5) or ["my_environment:Game"]
    message = f'is "{value}", but must be one of {", ".join(PROVIDERS)}, or module:Class of your own'
    raise fault(message, f'provider = "{close[0]}"')


class EnvironmentSection(Section, role=Role.SAMPLES):
    """Environment of the episodes, with one turn or several. Without `provider` and `tools` the policy answers the
    problems of [data] in one turn."""

    provider: Annotated[OptionalText, AfterValidator(_provider)] = None
    """Provider of the environment: `reasoning_gym`, `verifiers`, `openenv`, or `module:Class` of your own, which has
    `problems(split)` and `start(problem, seed)`. It brings its own problems and rewards."""
    id: Annotated[OptionalText | list[str | dict[str, object]] | dict[str, object], AfterValidator(_json)] = None
    """Name of the provider's environment; for `reasoning_gym` also a list of names or of tables with `name`, `weight`
    and `config`."""
    args: Annotated[
        dict[str, object], BeforeValidator(lambda value: {} if value == "" else value), AfterValidator(_json)
    ] = Field(default_factory=dict)
    """Arguments of the environment."""
    tools: Annotated[
        list[Text | dict[str, object]],
        BeforeValidator(
            lambda value: [value] if isinstance(value, str | dict) else value,
            json_schema_input_type=str | dict[str, object] | list[str | dict[str, object]],
        ),
        AfterValidator(_json),
    ] = Field(default_factory=list)
    """Tools that the model may call while it solves a problem of [data]: `calculator`, `python`, `search`,
    `module:function` or `module:Class` of your own, or a table `{ tool = "search", corpus = "notes.jsonl" }` with the
    tool's settings. The first answer without a call ends the episode, and [reward] grades it."""
    tools_prompt: str | None = None
    """Description of the tools in the system message, used if the model's chat template cannot show them. Unset is a
    list of the tools with the call format; an empty text adds no description."""
    correct_metric: Annotated[OptionalText, Role.LEARNS] = None
    """Metric or component of the provider's environment that decides correctness: above 0.5 is correct. Unset is the
    metric `correct`. An episode without this metric is judged by `[reward] correct_above`."""
    max_turns: Annotated[
        OptionalCount, BeforeValidator(lambda value: None if value == -1 else value, json_schema_input_type=int | None)
    ] = None
    """Most turns of an episode; unset or -1 is 1 for problems of one turn, else 16."""
    max_episode_tokens: OptionalCount = None
    """Most tokens of an episode, read and sampled; unset is the model's context."""
    timeout_s: Annotated[Seconds, Role.SPEED] = 30.0
    """Seconds after which a step of the environment or a tool call is cancelled and its episode ends."""
    workers: Annotated[Count, Role.SPEED] = 2
    """Processes that run environments and tools in parallel."""
    memory_gb: Annotated[Positive, Role.SPEED] = 4.0
    """Memory limit of each of these processes."""
    python: Annotated[OptionalText, Role.NAMES] = None
    """Python interpreter of these processes, if the environment's packages conflict with retrain's: the path of
    `python` in their own virtual environment."""
    auto_install: bool = False
    """Only false: retrain does not install packages by itself."""

    @property
    def measured(self) -> str:
        """All settings that affect episodes, as text."""
        decisive = (Role.SAMPLES, Role.LEARNS)
        return self.model_dump_json(exclude={key for key, role in self.roles().items() if role not in decisive})

    @property
    def hosted(self) -> bool:
        """True if an environment or tools run in worker processes."""
        return self.provider is not None or bool(self.tools)

    @property
    def turns(self) -> int:
        return self.max_turns or (DEFAULT_TURNS if self.hosted else 1)

    def issues(self) -> Iterator[ConfigIssue]:
        if self.provider is not None and self.tools:
            message = f"has no effect: {self.provider} brings its own tools"
            yield ConfigIssue(("environment.tools", "environment.provider"), message, "remove one of the two")
        for key in ("id", "args", "correct_metric") if self.provider is None else ():
            if getattr(self, key):
                message, fix = "has no effect without a provider", 'provider = "reasoning_gym"'
                yield ConfigIssue((f"environment.{key}", "environment.provider"), message, fix)
        if self.auto_install:
            fix = "auto_install = false, after installing the environment yourself"
            yield ConfigIssue(("environment.auto_install",), "is true, but nothing is installed unasked", fix)
        if not self.hosted and self.turns > 1:
            message = f"is {self.max_turns}, but problems of [data] have one turn: it takes tools or a provider"
            yield ConfigIssue(("environment.max_turns",), message, 'tools = ["calculator"]')
