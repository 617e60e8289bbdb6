"""[data], [reward], [environment]: the problems, and what an answer is worth."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from retrain.config.base import (
    Count,
    Finding,
    Natural,
    OptionalCount,
    OptionalText,
    Positive,
    Role,
    Section,
    Text,
    UsedWhen,
    fault,
    is_plugin,
)
from retrain.config.describe import no_effect
from retrain.plugins import why_no_range

SOURCES = ("arithmetic", "gsm8k", "math")
FILE_ENDINGS = (".jsonl", ".csv", ".parquet")
Level = Literal["easy", "medium", "hard"]
DEFAULT_TURNS = 16
"""Most turns of an episode where the file says nothing."""


def _source(value: str | None) -> str | None:
    if value is None or value in SOURCES or value.endswith(FILE_ENDINGS) or is_plugin(value):
        return value
    file = re.fullmatch(r"(.+)\.(tsv|json|ndjson|txt|xlsx?|arrow)", value)
    if "/" in value and not file and ":" not in value:
        return value
    close = difflib.get_close_matches(value.rpartition("/")[2], [*SOURCES, "hendrycks_math"], n=1, cutoff=0.6)
    name = "math" if close == ["hendrycks_math"] else close[0] if close else "arithmetic"
    if file:
        name = f"{file[1]}.jsonl"
    raise fault(
        f'is "{value}", but must be one of "arithmetic", "gsm8k", "math", a file ending in .jsonl, .csv or .parquet, a '
        "directory (./name) or hub name (owner/name), or a module:function",
        f'source = "{name}"' + (', made with one {"prompt": "…", "answer": "…"} per line' if file else ""),
    )


def has_configurations(source: str | None) -> bool:
    """Whether this may be a data set of which `subset` chooses a configuration: a hub name or a directory."""
    return source is not None and "/" in source and not source.endswith(FILE_ENDINGS) and not is_plugin(source)


def _prompt_template(value: str) -> str:
    if "{prompt}" not in value:
        raise fault("does not contain {prompt}, so the problem would never be shown", 'prompt_template = "{prompt}"')
    return value


OptionalSource = Annotated[OptionalText, AfterValidator(_source)]
Template = Annotated[Text, AfterValidator(_prompt_template)]


def _without_secrets(value: str | None) -> str | None:
    if value is not None and "@" in value.partition("://")[2].partition("/")[0]:
        raise fault(
            "holds a user name or password, which would be written into every run directory",
            'judge_api_key_env = "JUDGE_KEY", with the key in that environment variable',
        )
    return value


class Data(Section):
    """The problems to train on and those held out."""

    role: ClassVar[Role] = Role.SAMPLES

    source: Annotated[Text, AfterValidator(_source)] = "arithmetic"
    """`arithmetic` (generated), `gsm8k`, `math`, a local `.jsonl`, `.csv` or `.parquet` file or directory of a data set
    (both looked for beside the TOML file first), the hub's name of a data set (`owner/name`), or `module:function`."""
    subset: OptionalText = None
    """Configuration of a data set that has several, such as `main` of `openai/gsm8k`."""
    split: Text = "train"
    """Split of a data set to train on."""
    eval_source: OptionalSource = None
    """Source of the held-out problems; unset is the evaluation split of `source`, or a part of it where there is no
    such split."""
    eval_split: Text = "test"
    """Split of a data set to hold out."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the different problems of a file, or of a data set without a split `test`, that is held out when there
    is no `eval_source`: exactly so many, rounded, and always the same ones."""
    prompt_column: OptionalText = None
    """Column that holds the problem: a string, or a list of chat messages. Unset is `prompt`, `question` or `problem`,
    the first that there is."""
    answer_column: OptionalText = None
    """Column that holds the reference answer, or a solution that ends in `#### answer` or has it in `\\boxed{}`. Unset
    is `answer` or `solution`, the first that there is."""
    tags_column: OptionalText = None
    """Column that holds a tag or a list of tags; metrics are also reported for each tag."""
    system_prompt: OptionalText = None
    """Put before every problem as the system message."""
    prompt_template: Template = "{prompt}"
    """Text of the user message; `{prompt}` is the problem."""
    chat_template_kwargs: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Arguments of the tokenizer's chat template, such as `{ enable_thinking = false }`."""
    max_prompt_tokens: OptionalCount = None
    """Most tokens of a prompt, chat markup included; unset, or more than that, is what the model's context leaves
    beside the largest `max_tokens`."""
    long_prompts: Literal["error", "skip"] = "error"
    """What happens when a prompt is longer: `error` names it before anything is trained, `skip` leaves such problems
    out, of training and evaluation, and says how many they are."""
    levels: Annotated[list[Level], Field(min_length=1)] | None = None
    """Difficulties of generated problems to draw from; unset is all of them."""
    size: Annotated[Count, UsedWhen("data.source", ("arithmetic",))] = 20_000
    """How many training problems to generate."""
    shuffle: bool = True
    """Shuffle the problems anew in every pass, by the run's seed."""


def _ranges(value: dict[str, dict[str, float | bool]]) -> dict[str, dict[str, float | bool]]:
    for name, limits in value.items():
        if wrong := why_no_range(limits):
            raise fault(f'has for "{name}" {wrong}', f'metrics_ranges = {{ "{name}" = {{ min = 0.0, max = 1.0 }} }}')
    return value


MARKED = ("match", "math")
"""Rewards that look for the answer in a completion."""


RUBRIC_WEIGHTS = {"essential": 1.0, "important": 0.7, "optional": 0.3, "pitfall": 0.9}
"""Weights that have a word, those of arXiv 2507.17746."""
JUDGED = ("judge", "rubric")
"""Rewards that ask a model behind an endpoint."""


class RubricCriterion(Section):
    """One criterion of a rubric."""

    name: Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    """Name in the metrics, `rubric/<name>`."""
    text: Text
    """What the judge looks for, such as `Gives the final answer in one sentence.`"""
    weight: Literal["essential", "important", "optional", "pitfall"] | float = "essential"
    """A number, or a word for 1, 0.7, 0.3 and 0.9. A pitfall is phrased as what a good answer does; a negative number
    makes the text a fault, which costs where it is found."""

    @property
    def weight_number(self) -> float:
        return RUBRIC_WEIGHTS[self.weight] if isinstance(self.weight, str) else self.weight


class Grader(Section):
    """Keys that a reward and a component of a weighted reward have in common."""

    name: OptionalText = None
    """Name in the metrics, `rewards/<name>/…`; unset is the function's name of a custom reward, else the type."""
    strict: bool = True
    """Whether `match` and `math` look only at an answer that is marked as one: the last `\\boxed{…}`, or, without a
    box, the last line `#### …` if the data set's own solutions have such a line. `false` also takes the last number
    where nothing is marked, or the last line if the reference is no number; any text that ends in a digit is then
    an answer."""
    judge_model: OptionalText = None
    """Model name sent to the judge."""
    judge_url: Annotated[OptionalText, AfterValidator(_without_secrets)] = None
    """Base address of an OpenAI-compatible endpoint, such as `http://localhost:8000/v1`; unset is OpenAI's own."""
    judge_api_key_env: OptionalText = None
    """Environment variable that holds the endpoint's key; unset sends none."""
    rubric: Literal["explicit", "implicit"] = "explicit"
    """How a `rubric` is graded: `explicit`, every criterion by itself, met or not, and the weighted share of those met;
    `implicit`, one score between 0 and 1 by a judge who sees all of them."""
    criteria: list[RubricCriterion] = Field(default_factory=list)
    """The criteria of a `rubric`, for all problems."""
    rubric_column: OptionalText = None
    """Column of the data with a problem's own criteria, in addition: a list of texts, or of tables with `text`
    (`criterion`, `description`), `weight` (`points`) and perhaps a `name`."""
    custom_module: OptionalText = None
    """Module or `.py` file of a reward of your own; looked for beside the TOML file first."""
    custom_function: Text | Annotated[list[Text], Field(min_length=1)] = "score"
    """Its function, or a class with `__call__`: gets the completion and the reference answer, returns a number or a
    `RewardResult`; or gets `prompts`, `completions` and columns of the data, and returns a list, as in TRL. Several
    functions, listed here or in the module, are added up."""
    reward_model: OptionalText = None
    """Directory (looked for beside the TOML file first) or hub name of a sequence-classification model with one label,
    in transformers format with its own tokenizer."""

    @property
    def shown_name(self) -> str:
        kind, function = getattr(self, "type", ""), self.custom_function
        return self.name or (function if kind == "custom" and isinstance(function, str) else kind)


class RewardComponent(Grader):
    """One part of a weighted reward: weight × (reward + offset)."""

    type: Literal["match", "math", "format", "judge", "rubric", "custom", "reward_model"]
    """As in [reward]."""
    weight: float = 1.0
    """Factor of this part in the total."""
    offset: float = 0.0
    """Added before weighting: -1 makes it a penalty that a perfect answer does not pay."""


def _grader_findings(grader: Grader, kind: str, path: str) -> Iterator[Finding]:
    """What one grader needs for its kind, and what it has without using it."""
    owners = {
        "judge_model": JUDGED,
        "judge_url": JUDGED,
        "judge_api_key_env": JUDGED,
        "rubric_column": ("rubric",),
        "custom_module": ("custom",),
        "reward_model": ("reward_model",),
    }
    needs = {
        "judge": ("judge_model", "gpt-4o-mini"),
        "rubric": ("judge_model", "gpt-4o-mini"),
        "custom": ("custom_module", "my_rewards"),
        "reward_model": ("reward_model", "./my_reward_model"),
    }
    for key, owner in owners.items():
        if kind not in owner and getattr(grader, key) is not None:
            fix = f'remove the line, or type = "{owner[0]}"'
            yield no_effect(f"{path}.{key}", f"{path}.type", kind, fix)
    if kind != "rubric" and (grader.criteria or grader.rubric != "explicit"):
        key = "criteria" if grader.criteria else "rubric"
        yield no_effect(f"{path}.{key}", f"{path}.type", kind, 'type = "rubric"')
    if kind == "rubric":
        yield from _rubric_findings(grader, path)
    if kind not in MARKED and not grader.strict:
        fix = "write it in a component" if kind == "weighted" else 'remove the line, or type = "match"'
        yield no_effect(f"{path}.strict", f"{path}.type", kind, fix)
    if kind == "weighted" and grader.name is not None:
        yield no_effect(f"{path}.name", f"{path}.type", kind, "write it in a component")
    if kind in needs:
        key, example = needs[kind]
        if getattr(grader, key) is None:
            message = f'is missing: type = "{kind}" needs it'
            yield Finding((f"{path}.{key}", f"{path}.type"), message, f'{key} = "{example}"')


def _rubric_findings(grader: Grader, path: str) -> Iterator[Finding]:
    """There is something to judge by, each criterion under a name of its own."""
    names = [each.name for each in grader.criteria]
    if not names and grader.rubric_column is None:
        example = 'criteria = [{ name = "correct", text = "The final answer is right." }]'
        yield Finding((f"{path}.criteria", f"{path}.type"), 'is missing: type = "rubric" needs some', example)
    if twice := next((name for name in names if names.count(name) > 1), None):
        words = f'has "{twice}" twice: their metrics would be one'
        yield Finding((f"{path}.criteria",), words, f'name = "{twice}_2"')
    if names and grader.rubric_column is None and not any(each.weight_number for each in grader.criteria):
        yield Finding((f"{path}.criteria",), "has no weight but 0: nothing would ever be paid", 'weight = "essential"')


class Reward(Grader):
    """What an answer is worth."""

    role: ClassVar[Role] = Role.LEARNS

    type: Literal["match", "math", "format", "judge", "rubric", "custom", "reward_model", "weighted"] = "match"
    """`match`: the marked answer (see `strict`), compared as text after normalising; `math`: mathematical equality;
    `format`: whether there is a marked answer; `judge`: a model behind an endpoint decides; `rubric`: it checks the
    answer against criteria with weights; `custom`: your function;
    `reward_model`: the score of a model that is run here; `weighted`: a sum of `[[reward.components]]`."""
    correct_above: float = 0.5
    """An answer counts as correct when its total reward is above this, unless the reward or the environment itself says
    what is correct."""
    timeout_s: Annotated[Positive, Role.SPEED] = 10.0
    """Longest time for grading one completion, in seconds; then its reward is null and the run goes on. `reward_model`
    has no such limit."""
    workers: Annotated[Count, Role.SPEED] = 2
    """Processes (`math`) or connections (`judge`, `rubric`) that grade side by side."""
    reward_batch: Annotated[
        Count,
        UsedWhen(
            "reward.type", ("reward_model",), unless="reward_models", unless_words="that of a component or of [audit]"
        ),
        Role.SPEED,
    ] = 8
    """Most answers to one problem that a `reward_model` reads at once."""
    overlong_tokens: Natural = 0
    """Soft punishment of long answers in training (DAPO): over the last so many of `max_tokens` the reward falls in
    proportion, by 1 at `max_tokens`; whether an answer is correct stays. 0 switches it off."""
    components: list[RewardComponent] = Field(default_factory=list)
    """The parts of a weighted reward, each logged by its name."""
    metrics_ranges: Annotated[dict[str, dict[str, float | bool]], AfterValidator(_ranges), Role.RECORDS] = Field(
        default_factory=dict
    )
    """Ranges of components and sample metrics, for scaling charts only: `{ steps = { min = 0, max = 20 } }`, with
    `invert = true` where less is better. A custom reward or data source may declare them itself."""
    reward_min: Annotated[float | None, Role.RECORDS] = None
    """Lower end of the reward, for scaling charts only."""
    reward_max: Annotated[float | None, Role.RECORDS] = None
    """Upper end of the reward, for scaling charts only."""

    @property
    def strict_answers(self) -> bool:
        """Whether only marked answers count as answers; false for rewards that look for none themselves."""
        graders = [part for part in (self, *self.components) if part.type in MARKED]
        return bool(graders) and graders[0].strict

    @property
    def grading(self) -> str:
        """Everything that decides grades, as text."""
        return self.model_dump_json(exclude={key for key, role in self.roles().items() if role == Role.RECORDS})

    def findings(self) -> Iterator[Finding]:
        """Each kind of reward has what it needs, and nothing that it would ignore."""
        yield from _grader_findings(self, self.type, "reward")
        if self.type == "weighted":
            if not self.components:
                yield Finding(
                    ("reward.components", "reward.type"),
                    'is missing: type = "weighted" needs its parts',
                    'components = [{ type = "math" }, { type = "format", weight = 0.1, offset = -1.0 }]',
                )
        elif self.components:
            yield no_effect("reward.components", "reward.type", self.type, 'type = "weighted"')
        names: set[str] = set()
        for index, part in enumerate(self.components):
            path = f"reward.components.{index}"
            yield from _grader_findings(part, part.type, path)
            name = part.shown_name
            if name in names:
                yield Finding(
                    (f"{path}.name", path),
                    f'is "{name}", like a part before it: their metrics would be one',
                    f'name = "{name}_{index + 1}"',
                )
            names.add(name)
        low, high = self.reward_min, self.reward_max
        if low is not None and high is not None and low >= high:
            yield Finding(
                ("reward.reward_max", "reward.reward_min"),
                f"is {high:g}, which is not above reward_min = {low:g}",
                f"reward_max = {low + 1:g}",
            )


AUDIT = "audit"  # Name of the audit's score among a rollout's metrics, and prefix of its other metrics


class Audit(Grader):
    """A second grader, which looks at what [reward] pays for and never trains: where the reward rises and this falls,
    the reward is hacked. Its score is recorded as `rewards/audit/mean`, in held-out evaluations as
    `eval/<name>/audit`, and with each rollout."""

    role: ClassVar[Role] = Role.EVALUATES

    type: Literal["off", "match", "math", "format", "judge", "rubric", "custom", "reward_model"] = "off"
    """`off`: none; else as in [reward], whose `timeout_s` and `workers` hold here too."""

    @property
    def wanted(self) -> bool:
        return self.type != "off"

    def findings(self) -> Iterator[Finding]:
        """It has what it needs, and nothing that it would ignore."""
        yield from _grader_findings(self, self.type, "audit")
        if self.name is not None:
            yield Finding(("audit.name",), "has no effect: its score is called audit", "remove the line")


PROVIDERS = ("reasoning_gym", "verifiers", "openenv")
"""Libraries whose environments run unchanged."""


def _provider(value: str | None) -> str | None:
    if value is None or value in PROVIDERS or is_plugin(value):
        return value
    if value == "textarena":
        raise fault('is "textarena", which is no longer built in', 'provider = "module:Class" of your own')
    close = difflib.get_close_matches(value, PROVIDERS, n=1, cutoff=0.5)
    raise fault(
        f'is "{value}", but must be one of {", ".join(PROVIDERS)}, or module:Class of your own',
        f'provider = "{close[0] if close else "my_environment:Game"}"',
    )


def _one_as_list(value: object) -> object:
    return [value] if isinstance(value, str | dict) else value


class Environment(Section):
    """What the model acts in, in one turn or in several. Without `provider` and `tools` it answers the problems of
    [data] in one turn."""

    role: ClassVar[Role] = Role.SAMPLES

    provider: Annotated[OptionalText, AfterValidator(_provider)] = None
    """Whose environment: `reasoning_gym`, `verifiers`, `openenv`, or `module:Class` of your own, which has
    `problems(split)` and `start(problem, seed)`. It brings its own problems and rewards."""
    id: OptionalText | list[str | dict[str, Any]] | dict[str, Any] = None
    """Which of the provider's environments: a name; for `reasoning_gym` also a list, whose entries are names or tables
    with `name`, `weight` and `config`."""
    args: Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value == "" else value)] = Field(
        default_factory=dict
    )
    """Arguments of the environment."""
    tools: Annotated[
        list[Text | dict[str, Any]],
        BeforeValidator(_one_as_list, json_schema_input_type=str | dict[str, Any] | list[str | dict[str, Any]]),
    ] = Field(default_factory=list)
    """Tools that the model may call while it works on a problem of [data]: `calculator`, `python`, `search`,
    `module:function` or `module:Class` of your own, or a table `{ tool = "search", corpus = "notes.jsonl" }` with the
    tool's settings. The first answer without a call ends the episode, and [reward] grades it."""
    tools_prompt: str | None = None
    """What the system message says of the tools where the model's chat template cannot show them; unset is a list of
    them with the way to call one, an empty text is nothing."""
    correct_metric: Annotated[OptionalText, Role.LEARNS] = None
    """Metric or component of the provider's environment that says what is correct: a value above 0.5 is. Unset is one
    named `correct`. An episode without it is judged by `[reward] correct_above`."""
    max_turns: Annotated[
        OptionalCount, BeforeValidator(lambda value: None if value == -1 else value, json_schema_input_type=int | None)
    ] = None
    """Most turns of an episode; unset or -1 is 1 for problems of one turn, else 16."""
    max_episode_tokens: OptionalCount = None
    """Most tokens of an episode, read and sampled together; unset is what the model's context holds."""
    timeout_s: Annotated[Positive, Role.SPEED] = 30.0
    """Seconds after which a step of the environment, or a call of a tool, is given up and its episode ends."""
    workers: Annotated[Count, Role.SPEED] = 2
    """Processes in which environments and tools run, side by side."""
    memory_gb: Annotated[Positive, Role.SPEED] = 4.0
    """Memory that one of these processes may take."""
    python: Annotated[OptionalText, Role.NAMES] = None
    """The Python that runs them, where the environment's packages do not go together with these: the path of `python`
    in a virtual environment of their own."""
    auto_install: bool = False
    """Only false: nothing is installed unasked."""

    @property
    def measured(self) -> str:
        """Everything that decides what happens in it, as text."""
        decisive = (Role.SAMPLES, Role.LEARNS)
        return self.model_dump_json(exclude={key for key, role in self.roles().items() if role not in decisive})

    @property
    def hosted(self) -> bool:
        """Whether there is anything but problems of one turn from [data]."""
        return self.provider is not None or bool(self.tools)

    @property
    def turns(self) -> int:
        return self.max_turns or (DEFAULT_TURNS if self.hosted else 1)

    def findings(self) -> Iterator[Finding]:
        """An environment or tools, and nothing beside them that would have no effect."""
        if self.provider is not None and self.tools:
            yield Finding(
                ("environment.tools", "environment.provider"),
                f"has no effect: {self.provider} brings its own tools",
                "remove one of the two",
            )
        if self.provider is None:
            for key, given in (("id", self.id), ("args", self.args), ("correct_metric", self.correct_metric)):
                if given:
                    fix = 'provider = "reasoning_gym"'
                    keys = (f"environment.{key}", "environment.provider")
                    yield Finding(keys, "has no effect without a provider", fix)
        if self.auto_install:
            fix = "auto_install = false, after installing the environment yourself"
            yield Finding(("environment.auto_install",), "is true, but nothing is installed unasked", fix)
        if not self.hosted and self.turns > 1:
            yield Finding(
                ("environment.max_turns",),
                f"is {self.max_turns}, but problems of [data] have one turn: it takes tools or a provider",
                'tools = ["calculator"]',
            )
