import json
import math
import tomllib
from copy import deepcopy
from datetime import date
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from list_keys import configuration_markdown

from retrain.campaign.planning.plan import plan
from retrain.config import Config, json_schema, load, parse_dict
from retrain.config.describe import document
from retrain.config.learning_rules import sepa_rules
from retrain.config.legacy import REPLACED
from retrain.config.root import keys, sections, value_at
from retrain.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[3]


def lines(text: str, tmp_path: Path, *sets: str) -> list[str]:
    file = tmp_path / "f.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file, sets)
    return str(caught.value).split("\n")


def good(text: str) -> Config:
    return parse_dict(tomllib.loads(text))


def test_defaults():
    assert parse_dict({}) == Config()
    assert Config().training.clip_range == (0.2, 0.2)
    assert good("[training]\nclip_eps_high = 0.28").training.clip_range == (0.2, 0.28)
    assert not Config().is_campaign


def test_forms_of_other_files(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text('\ufeff[training]\r\ntemperature = 1\r\n[data]\r\nsystem_prompt = "naïve ☃"\r\n', encoding="utf-8")
    assert isinstance(load(file).config.training.temperature, float)
    assert load(file).config.data.system_prompt == "naïve ☃"
    config = good(
        '[training]\nclip_eps = 0.0\nclip_eps_high = 0.0\nmax_examples = 0\n[inference]\nengine = "pytorch"\nurl = ""\n'
        '[squeeze]\ntarget_ranks = []\n[environment]\nprovider = ""\nmax_turns = -1\n'
        "[logging]\nwandb_project = ''\nwandb_tags = 'a,b'\nstrategic_grams = '[\"let me see\", \"so\"]'\n"
    )
    assert config.training.clip_range == (1.0, math.inf)
    assert config.training.clip_eps_high is config.training.max_examples is config.squeeze.target_ranks is None
    assert config.inference.engine == "local"
    assert config.logging.wandb_project is None
    assert config.logging.wandb_tags == ["a", "b"]
    assert config.logging.strategic_grams == ["let me see", "so"]
    assert good("[logging]\nstrategic_grams = 'let me see, so'").logging.strategic_grams == ["let me see", "so"]


def test_files_are_found_beside_the_toml(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    for name in ("set", "gsm8k"):
        (folder / name).mkdir(parents=True)
    for name in ("p.jsonl", "mine.py"):
        (folder / name).write_text("")
    file = folder / "f.toml"
    file.write_text('[reward]\ntype = "custom"\ncustom_module = "mine"\n')
    monkeypatch.chdir(tmp_path)
    loaded = load(file)
    assert loaded.config.reward.custom_module == str(folder / "mine.py")
    assert loaded.warnings == []
    for source, name in (("p.jsonl", "p.jsonl"), ("set", "set"), ("./set", "set")):
        assert load(file, [f"data.source={source}"]).config.data.source == str(folder / name)
    for source in ("gsm8k", "openai/gsm8k"):
        assert load(file, [f"data.source={source}"]).config.data.source == source


SINGLE = [
    ('[reward]\ntimeout_s = "10"', "timeout_s = 10"),
    ("[training]\ntop_k = 1", "a group of equals teaches nothing: top_k = 20"),
    ("[evaluation]\ntemperature = 0\ntop_p = 0.9", "has no effect at temperature 0, which is greedy: remove the line"),
    ("[training]\nreplay_truncation = false", "has no effect with top_p = 1.0: remove the line, or top_p = 0.9"),
    ("lr = 1e-4", "stands outside a section: put it under [training]"),
    ("training = 3", "must be a table: [training]"),
    ('model = "Qwen/Qwen3-8B"', '[model] and below it model = "Qwen/Qwen3-8B"'),
    ('[algorithm]\nadvantage_mode = "gae"\nkl_in_reward = "k1"', "with kl_coef = 0"),
    ('[algorithm]\nadvantage_mode = "gae"\nturn_credit = "turn"\n[environment]\ntools = ["calculator"]',
     'turn_credit = "episode"'),
    ("[training]\nminibatches = 9", "more than the batch_size = 8 that would be split"),
    ('[training]\nclip_eps = 0.1\n[algorithm]\nloss = "my_module:loss"', 'has no effect with loss = "my_module:loss"'),
    ('[algorithm]\ntransform_mode = "my_module.transform"', 'transform_mode = "my_module:transform"'),
    ('[data]\nsource = "my.tsv"', 'source = "my.jsonl", made with one {"prompt": "…", "answer": "…"} per line'),
    ("[algorithm]\ndual_clip = 3.0\nloss = 'cispo'", 'no effect with loss = "cispo": remove the line, or loss = "ppo"'),
    ('[algorithm]\ncorrection = "tis"\nloss = "dppo"', 'beside loss = "dppo": both weigh by the same ratio'),
    ("[training]\nmax_off_policy_steps = 1", 'loss = "dppo", "vespo" or "m2po", or correction = "none"'),
    ('[algorithm]\nrejection_denominator = "kept"', 'is "kept", and nothing is ever rejected: remove the line'),
    ('[training]\nmax_off_policy_steps = 1\n[algorithm]\ncorrection = "none"\n[backend]\nbackend = "my:own"',
     "the one version of its weights: max_off_policy_steps = 0"),
    ("[sepa]\nsteps = 0\n[algorithm]\ntransform_mode = 'gtpo_sepa'", "without a ramp"),
    ('[inference]\nengine = "mlx"', 'engine = "vllm"'),
    ('[inference]\nengine = "sglang"', 'url = "http://127.0.0.1:8000", or launch = "vllm serve {model} --enable-lora"'),
    ('[inference]\nengine = "vllm"\nurl = "gpu1:8000"', 'url = "http://gpu1:8000"'),
    ('[inference]\nengine = "vllm"\nurl = "http://a"\n[training]\ntop_p = 0.9', "which tokens were left"),
    ('[inference]\nengine = "vllm"\nurl = "http://a"\n[backpressure]\nenabled = true', "max_in_flight = 64"),
    ('[inference]\nengine = "vllm"\nurl = "http://a"\n[backend]\nbackend = "mine:Backend"', "samples itself"),
    ('[backend]\nbackend = "tinker"', 'backend = "local"'),
    ('[backend]\ndevices = "cuda:0"', 'a GPU such as "gpu:0" or a range of them such as "gpu:0-7"'),
    ('[planning]\ndetector = "semantic"', "planning tokens are no longer found by sentence embeddings: "),
    ('[environment]\nprovider = "textarena"', 'which is no longer built in: provider = "module:Class" of your own'),
    ('[data]\nprompt_template = "Solve:"', 'prompt_template = "{prompt}"'),
    ('[[reward.components]]\ntype = "math"', 'type = "weighted"'),
    ('[reward]\ntype = "weighted"\ncomponents = [{ type = "math" }, { type = "math" }]', 'name = "math_2"'),
    ('[reward]\ntype = "weighted"\ncomponents = [{ type = "math", wieght = 2 }]',
     "[[reward.components]]: did you mean weight = 2"),
    ('[reward]\ntype = "weighted"\ncomponents = [{ type = "rubric", criteria = [{ name = "a", text = "b", wt = 2 }] }]',
     "reward.components[1].criteria[1].wt  is not a key of [[reward.components.criteria]]: its keys are name, text"),
    ('[reward]\ntype = "weighted"\ncomponents = [{ type = "math", weight = 2 }]\n[algorithm]\nadvantage_mode = "maxrl"',
     "outside [0, 1]"),
    ("[environment]\nmax_turns = 4", 'tools = ["calculator"]'),
    ('[algorithm]\nturn_credit = "turn"', 'turn_credit = "episode"'),
    ('[environment]\ntools = ["calculator"]\n[algorithm]\nturn_credit = "turn"\ntransform_mode = "gtpo_paper"',
     "makes its own"),
    ('[backpressure]\ntarget = "batch_size"', 'target = "concurrency"'),
    ("[training]\ndynamic_sampling = 9\n[algorithm]\nadvantage_mode = 'gae'",
     "drops groups with equal rewards, on which a critic trains too"),
    ("[optimizer]\nwarmup_steps = 100", "the warm-up never ends"),
    ('[logging]\nreport_to = "wanbd"', "wandb"),
    ('[logging]\nreport_to = ["none", "wandb"]', 'has "none" beside others'),
    ('[logging]\nreport_to = "wandb"\nlogging_dir = "tb"', 'report_to = ["wandb", "tensorboard"]'),
    ("[plugins]\nstrict = true", "custom_module"),
    ('[backend]\nbackend = "my:Own"\noptions = { a = 1, layers = [1, 2] }', "has layers = [1, 2], a list, but its "),
    ('[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\nbackend = {}',
     "conditions[1].backend  has no effect: the table is empty"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), SINGLE)
def test_one_mistake_is_one_line(text, message, tmp_path):
    (line,) = lines(text, tmp_path)
    assert message in line


def test_keys_of_retrain_03_are_told_what_to_use(tmp_path):
    for dotted, (_, instead) in REPLACED.items():
        section, _, key = dotted.partition(".")
        (line,) = lines(f"[{section}]\n\n{key} = 1", tmp_path)
        assert line.startswith(f"f.toml:3  {dotted}  is not a key: ")
        assert line.endswith(instead)
        assert dotted not in keys()


SYNTAX = [
    ("[training]\nlr 3", "f.toml:2", "key = value"), ("[data]\nsource = gsm8k", "f.toml:2", 'source = "gsm8k"'),
    ("[squeeze]\nenabled = False", "f.toml:2", "enabled = false"),
    ("[a.b]\nc = 1\n[a]\nb.d = 2\n", "f.toml:4", "cannot redefine namespace a.b at"),
    ('[data]\n\nsource = "gsm8k', "f.toml:3", "strings are in quotes"), ("a = [1,\n2", "f.toml:2", "end of the file"),
    ("x = [1}", "f.toml:1", "is not TOML"),
    ("x = " + "9" * 5000, "f.toml:1", "is not TOML"), ("x = " + "[" * 5000, "f.toml:1", "nested too deeply"),
]  # fmt: skip

REPEATS = [
    ("[training]\nlr = 1\nlr = 2", "f.toml:3  training.lr  is written twice, first in line 2: keep one of them"),
    ("[training]\n[model]\n[ training ] # again", "f.toml:3  training  is declared twice, first in line 1: put the "
     "keys of both under one [training]"),
    ("training.lr = 1\n[training]", "f.toml:2  training  is declared twice, first in line 1"),
    ("[[reward.components]]\n[[reward.components]]\n[reward.components.x]\n[reward.components.x]\n",
     "f.toml:4  reward.components[2].x  is declared twice, first in line 3: put the keys of both under one [reward"),
    ("x = [\n  {a = 1, a = 2},\n]", "f.toml:2  x[1].a  is written twice, first in line 2"),
]  # fmt: skip


def test_syntax_errors_and_repeated_keys_are_one_line(tmp_path):
    for text, where, message in SYNTAX:
        (line,) = lines(text, tmp_path)
        assert line.startswith(f"{where}  syntax  is")
        assert message in line
    for text, start in REPEATS:
        (line,) = lines(text, tmp_path)
        assert line.startswith(start)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.toml: no such file"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(UsageError, match="is a directory"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[data]\nsource = '\xe9'\n")
    with pytest.raises(ConfigError, match=r"latin\.toml:2  encoding  is not UTF-8"):
        load(tmp_path / "latin.toml")


def test_wrong_keys_do_not_hide_wrong_relations_nor_invent_them(tmp_path):
    text = "[training]\ngroup_size = 0\nbatch_size = 0\ntop_k = 1\nmax_steps = 'ten'\n[optimizer]\nwarmup_steps = 500"
    assert [line.split("  ")[1] for line in lines(text, tmp_path)] == [
        "training.group_size", "training.batch_size", "training.top_k", "training.max_steps",
    ]  # fmt: skip


@pytest.mark.parametrize(("steps", "sepa", "told"), [
    (1, {}, "λ is 0 for the whole run"),
    (3, {}, "λ gets to 0.50 at most"),
    (5, {}, ""),
    (2, {"schedule": "auto", "warmup_steps": 2, "delay_steps": 3}, "λ is 0 for the whole run"),
])  # fmt: skip
def test_sepa_without_lambda_is_told_before_it_runs(steps, sepa, told):
    sections = {"training": {"max_steps": steps}, "algorithm": {"transform_mode": "gtpo_sepa"}}
    config = parse_dict(sections | {"sepa": {"steps": 4, "correct_rate_gate": 0.0} | sepa})
    issues = list(sepa_rules(config))
    assert [issue.warning for issue in issues] == [True] * bool(told)
    assert all(told in issue.message for issue in issues)


def test_set_replaces_values_of_every_type(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text("[training]\nlr = 'wrong'\n")
    sets = ["training.lr=3e-4", "data.source=gsm8k", "squeeze.enabled=false", 'model.revision="a=b"',
            "logging.wandb_tags=a,b", 'lora.target_modules=["q_proj"]']  # fmt: skip
    config = load(file, sets).config
    assert (config.training.lr, config.data.source, config.squeeze.enabled) == (3e-4, "gsm8k", False)
    assert config.model.revision == "a=b"
    assert config.logging.wandb_tags == ["a", "b"]
    assert config.lora.target_modules == ["q_proj"]


SETS = [
    ("training.lr=high", '--set  training.lr  is "high", a string, but must be a number > 0 and ≤ 1: lr = 0.0001'),
    ("trainin.lr=1", "--set  trainin  is not a section: did you mean [training]"),
    ("training.lrr=1", "--set  training.lrr  is not a key of [training]: did you mean lr = 1"),
    ("lr=1e-3", "--set  lr  needs its section: --set training.lr=1e-3"),
    ("training.lr", "--set  training.lr  is not of the form section.key=value: --set training.lr=1e-4"),
    ("training=3", "--set  training  is 3, a number, but must be a table"),
    ("training.top_k=1", "--set  training.top_k  is 1: all completions of a prompt"),
]


def test_set_is_validated_like_the_file_and_its_mistakes_come_after(tmp_path):
    for setting, message in SETS:
        (line,) = lines("[training]\nlr = 1e-3\n", tmp_path, setting)
        assert message in line
    all_lines = lines("[training]\nmax_steps = 0\n", tmp_path, "training.lr=0", "training.seed=-2")
    assert [line.split("  ")[0] for line in all_lines] == ["f.toml:2", "--set", "--set"]


def test_an_invalid_criterion_does_not_hide_other_mistakes(tmp_path):
    text = '[reward]\ntype = "rubric"\ncriteria = [3, { name = "a", text = "t" }]\n[sepa]\nsteps = 5\n'
    criterion, judge, sepa = sorted(lines(text, tmp_path), key=lambda line: line.split("  ")[1])
    assert "reward.criteria[1]  is 3, a number, but must be a table" in criterion
    assert "reward.judge_model  is missing" in judge
    assert "sepa.steps  has no effect" in sepa


def test_the_reference_page_is_that_of_the_models():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration_markdown(), "type: make docs"
    assert all(f"| `{dotted.partition('.')[2]}` |" in page for dotted in keys())


def test_the_schema_file_is_that_of_the_models():
    stored = json.loads((ROOT / "campaigns" / "schema.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(json_schema())), "type: make docs"


SHIPPED = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "campaigns").rglob("*.toml"))]
VALUES = [0, 1, 2, 3, 7, 0.5, 1e-300, True, "", "auto", "none", "math", "x.jsonl", "a:b", [], [1, 2], ["wandb"], {}]
names = st.sampled_from([*sections(), *(key.partition(".")[2] for key in keys()), "zzz", "", "a.b", "conditions"])
scalars = st.one_of(
    st.sampled_from(VALUES), st.integers(-(10**25), 10**25), st.floats(), st.dates(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)  # fmt: skip
tables = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)
conditions = st.lists(
    st.dictionaries(st.sampled_from(["advantage_mode", "transform_mode", "lr", "sepa.steps", "sepa"]), tables),
    max_size=3,
)
UNKNOWN = ("training.zzz", "zzz.lr")


def outcome(function, *arguments):
    """Return what the function returns, or the mistakes that it raises; no other error may come out."""
    try:
        return function(*arguments)
    except UsageError as error:
        return error


@settings(max_examples=200)
@given(
    st.sampled_from([{}, *SHIPPED]),
    st.dictionaries(st.sampled_from([*keys(), *UNKNOWN]), st.sampled_from(VALUES) | tables, min_size=1, max_size=3),
    st.just([]) | conditions,
)
@example({"campaign": {}}, {}, [{"advantage_mode": "grpo", "transform_mode": "none", "sepa": 3}])
@example({"reward": {"type": "weighted", "components": [3, {"type": "math"}]}}, {}, [])
@example({"environment": {"tools": [{"tool": "search", "corpus": date(1979, 5, 27)}]}}, {}, [])
@example({"environment": {"provider": "verifiers", "args": {"rate": float("nan")}}}, {}, [])
def test_shipped_files_with_changes_are_refused_or_kept(tmp_path_factory, shipped, changes, rows):
    data = deepcopy(shipped)
    if rows:
        data["campaign"] = {**data.get("campaign", {}), "conditions": rows}
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        data.setdefault(section, {})[key] = value
    file = tmp_path_factory.mktemp("changed") / "f.toml"
    file.write_text(document(data), encoding="utf-8")
    loaded = outcome(load, file)
    if isinstance(loaded, UsageError):
        assert not any("\n" in str(problem) for problem in getattr(loaded, "problems", ()))
        return
    assert not {*UNKNOWN} & changes.keys()
    for dotted, value in changes.items():
        if type(value) in (int, float) and value > 0:
            assert value_at(loaded.config, dotted) == value
    assert parse_dict(loaded.config.to_dict()) == loaded.config
    plan(loaded.config)


@settings(max_examples=50)
@given(st.one_of(st.text(max_size=40), st.binary(max_size=40)), st.lists(st.text(max_size=12), max_size=2))
def test_any_file_gives_a_configuration_or_its_mistakes(tmp_path_factory, content, sets):
    file = tmp_path_factory.mktemp("any") / "f.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
    loaded = outcome(load, file, sets)
    if isinstance(loaded, ConfigError):
        assert all(problem.where == "--set" or problem.where.startswith("f.toml:") for problem in loaded.problems)


def test_a_judge_url_with_a_password_is_refused():
    reward = {"type": "judge", "judge_model": "m", "judge_url": "http://user:secret@host:1/v1"}
    with pytest.raises(ConfigError, match="password") as error:
        parse_dict({"reward": reward})
    assert "secret" not in str(error.value)
    parse_dict({"reward": reward | {"judge_url": "http://host:1/v1/a@b"}})


@pytest.mark.parametrize("url", ["host:1/v1", "ftp://host:1/v1", "http://", "http:// host:1/v1"])
def test_a_judge_url_that_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match=r'is no address: judge_url = "http://(host:1|localhost:8000)/v1"'):
        parse_dict({"reward": {"type": "judge", "judge_model": "m", "judge_url": url}})


@pytest.mark.parametrize("section", ["reward", "environment"])
def test_a_timeout_beyond_the_clock_is_refused(section):
    with pytest.raises(ConfigError, match="must be a number > 0 and ≤ 1000000"):
        parse_dict({section: {"timeout_s": 1e300}})
