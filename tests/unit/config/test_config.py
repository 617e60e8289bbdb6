"""The loader: what it accepts, what it says about everything else, and that it never says anything but that."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
from fuzz_config import one_change
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from retrain.campaign.planning.plan import plan
from retrain.config import Config, configuration_markdown, json_schema, load, parse_dict
from retrain.config.conditions import FIXED
from retrain.config.describe import toml
from retrain.config.legacy import REPLACED
from retrain.config.problems import SYNONYMS
from retrain.config.root import keys, sections, value_at
from retrain.config.rules import sepa_rules
from retrain.errors import ConfigError, UsageError
from retrain.maths.schedules import SepaSchedule, sepa_lambda, sepa_observe, sepa_start

ROOT = Path(__file__).parents[3]
CAMPAIGNS = sorted((ROOT / "campaigns").glob("*.toml"))

LISTED_IN_THE_ISSUE = """
campaign: seeds max_steps conditions
model: model revision local_files_only lora_rank
lora: alpha dropout target_modules
optimizer: beta1 beta2 eps grad_clip_norm
training: seed max_steps batch_size group_size max_tokens temperature top_p lr weight_decay max_examples save_every
training: clip_eps clip_eps_high
algorithm: advantage_mode transform_mode uncertainty_kind
gtpo: beta
hicra: alpha
sepa: steps schedule delay_steps correct_rate_gate
planning: detector
backend: backend devices adapter_path
inference: engine url dtype launch launch_gpus api_key_env adapter_dir timeout_s max_in_flight mismatch_limit
data: source
reward: type judge_model custom_module custom_function
environment: provider id args max_turns auto_install
backpressure: enabled warmup_steps throttle_margin increase_margin min_batch_size max_batch_size peak_gflops
backpressure: peak_bw_gb_s
squeeze: min_variance_retention target_ranks compress_to output_path device
resume: from
logging: log_dir wandb_project wandb_run_name wandb_entity wandb_group wandb_tags strategic_grams
"""

FIVE_MISTAKES = """\
# five mistakes, one of each kind
[traning]
lr = 1e-4

[training]
batchsize = 8
lr = "1e-4"
temperature = -1.0

[algorithm]
transform_mode = "gtpo_sepa"

[sepa]
steps = 0
"""


def lines(text: str, tmp_path: Path, *sets: str) -> list[str]:
    """What the loader says about a file of this text."""
    file = tmp_path / "f.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file, sets)
    return str(caught.value).split("\n")


def good(text: str) -> Config:
    return parse_dict(tomllib.loads(text))


# -- what is accepted -------------------------------------------------------------------------------------------


def test_every_key_of_the_issue_exists():
    for line in LISTED_IN_THE_ISSUE.strip().splitlines():
        section, _, names = line.partition(": ")
        for name in names.split():
            assert f"{section}.{name}" in keys()


def test_every_key_is_described():
    missing = [key for key, field in keys().items() if not field.description]
    assert missing == []


def test_the_defaults_hold_and_are_those_of_the_issue():
    config = parse_dict({})
    assert config == Config()
    assert (config.training.temperature, config.training.top_p, config.training.lr) == (1.0, 1.0, 1e-4)
    assert (config.lora.alpha, config.lora.target_modules, config.lora.dropout) == (32, "all-linear", 0)
    assert config.data.shuffle
    assert not config.is_campaign
    assert len(config.campaign.seeds) == 8


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.name)
def test_shipped_campaigns_load_and_plan(path):
    loaded = load(path)
    specs = plan(loaded)
    campaign = loaded.config.campaign
    assert len(specs) == (len(campaign.seeds) * len(campaign.conditions) if loaded.config.is_campaign else 1)
    assert loaded.config.logging.log_dir == f"logs/{path.stem}"
    assert loaded.text.startswith("#:schema ./schema.json\n")
    assert parse_dict(loaded.config.to_dict()) == loaded.config
    jsonschema.validate(tomllib.loads(loaded.text), json_schema())


def test_the_gsm8k_recipe():
    config = load(ROOT / "campaigns" / "gsm8k.toml").config
    training = config.training
    assert (training.batch_size, training.group_size, training.max_tokens, training.lr) == (128, 16, 256, 4e-5)
    assert (config.model.model, config.model.lora_rank) == ("Qwen/Qwen3-8B", 32)
    correct, form = config.reward.components
    totals = {
        (c, f): correct.weight * (c + correct.offset) + form.weight * (f + form.offset) for c in (0, 1) for f in (0, 1)
    }
    assert totals == {(c, f): pytest.approx(c + 0.1 * (f - 1)) for c, f in totals}


def test_round_trip_through_json_of_everything_set():
    text = """
    [lora]\nalpha = 16\ntarget_modules = ["q_proj"]
    [training]\nseed = 3\nclip_eps_high = 0.28\nmicro_batch_tokens = 512\nmax_examples = 10
    [algorithm]\nadvantage_mode = "maxrl"\ntransform_mode = "gtpo_sepa"\nuncertainty_kind = "shannon_entropy"
    [sepa]\nschedule = "auto"\nthreshold = 0.5\n[resume]\nfrom = "logs/x"
    [reward]\ntype = "custom"\ncustom_module = "m"\nreward_min = 0\n[data]\nlevels = ["easy"]
    [environment]\nmax_turns = -1\n[logging]\nwandb_tags = "a, b"\naliases = ["trl"]
    """
    config = good(text)
    assert config.resume.from_ == "logs/x"
    assert config.to_dict()["resume"] == {"from": "logs/x"}
    assert parse_dict(json.loads(json.dumps(config.model_dump(mode="json"), allow_nan=False))) == config
    assert parse_dict(config.model_dump()) == config


def test_integers_are_numbers_and_files_are_unicode(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text('\ufeff[training]\r\ntemperature = 1\r\n[data]\r\nsystem_prompt = "naïve ☃"\r\n', encoding="utf-8")
    config = load(file).config
    assert config.training.temperature == 1.0
    assert isinstance(config.training.temperature, float)
    assert config.data.system_prompt == "naïve ☃"


def test_forms_of_other_files():
    config = good(
        '[training]\nclip_eps = 0.0\nclip_eps_high = 0.0\nmax_examples = 0\n[inference]\nengine = "pytorch"\nurl = ""\n'
        '[squeeze]\ncompress_to = 0\ntarget_ranks = []\noutput_path = ""\n[environment]\nprovider = ""\n'
        "max_turns = -1\n"
        "[logging]\nwandb_project = ''\nwandb_tags = 'a,b'\nstrategic_grams = '[\"let me see\", \"so\"]'\n"
        '[reward]\njudge_model = ""\n[backpressure]\nenabled = false\nwarmup_steps = 10\n'
    )
    assert config.training.clip_range == (1.0, math.inf)
    assert config.training.clip_eps_high is None
    assert config.training.max_examples is None
    assert config.inference.engine == "local"
    assert config.squeeze.target_ranks is None
    assert config.logging.wandb_project is None
    assert config.logging.wandb_tags == ["a", "b"]
    assert config.logging.strategic_grams == ["let me see", "so"]
    assert good("[logging]\nstrategic_grams = 'let me see, so'").logging.strategic_grams == ["let me see", "so"]
    assert good("[logging]\nstrategic_grams = ''").logging.strategic_grams is None
    assert good("[backpressure]\nenabled = true").backpressure.target == "concurrency"


def test_clipping():
    assert good("").training.clip_range == (0.2, 0.2)
    assert good("[training]\nclip_eps_high = 0.28").training.clip_range == (0.2, 0.28)


LEGACY = """
[campaign]
seeds = [42, 101, 202, 303]
max_steps = 200

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"

[[campaign.conditions]]
advantage_mode = "maxrl"
transform_mode = "gtpo_sepa"
sepa_steps = 150
gtpo_beta = 0.2
lr = 1e-5

[model]
model = "Qwen/Qwen3-4B-Instruct-2507"
lora_rank = 32

[lora]
alpha = 0
dropout = 0.0

[optimizer]
beta1 = 0.9
beta2 = 0.95
eps = 1e-8

[training]
seed = -1
batch_size = 8
group_size = 16
max_tokens = 10240
temperature = 0.7
lr = 4e-5
save_every = 20

[sepa]
steps = 150
schedule = "linear"
delay_steps = 50
correct_rate_gate = 0.1

[planning]
detector = "regex"

[inference]
engine = "pytorch"

[backend]
backend = "local"
devices = "gpu:0"
adapter_path = "adapters/campaign"

[reward]
type = "match"
custom_function = "score"

[squeeze]
min_variance_retention = 0.95

[logging]
log_dir = "logs/campaign"
wandb_project = "sepa-pilot"
wandb_tags = "a,b"
strategic_grams = ""
"""


def test_a_campaign_file_of_the_kind_people_have(tmp_path):
    file = tmp_path / "legacy.toml"
    file.write_text(LEGACY)
    specs = plan(load(file))
    assert [spec.run_id for spec in specs[:2]] == [
        "grpo+none_s42",
        "maxrl+gtpo_sepa~gtpo.beta=0.2~lr=1e-05~sepa.steps=150_s42",
    ]
    assert specs[1].config.lora.alpha == 64
    assert specs[1].config.training.max_steps == 200


def test_files_are_found_beside_the_toml(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "p.jsonl").write_text("")
    (folder / "mine.py").write_text("")
    file = folder / "f.toml"
    file.write_text('[data]\nsource = "p.jsonl"\n[reward]\ntype = "custom"\ncustom_module = "mine"\n')
    monkeypatch.chdir(tmp_path)
    loaded = load(file)
    assert loaded.config.data.source == str(folder / "p.jsonl")
    assert loaded.config.reward.custom_module == str(folder / "mine.py")
    assert loaded.warnings == []
    (folder / "set").mkdir()
    (folder / "gsm8k").mkdir()
    for source, meant in (("set", str(folder / "set")), ("./set", str(folder / "set")), ("gsm8k", "gsm8k")):
        file.write_text(f'[data]\nsource = "{source}"\n')
        assert load(file).config.data.source == meant
    file.write_text('[data]\nsource = "openai/gsm8k"\nsubset = "main"\n')
    assert load(file).config.data.source == "openai/gsm8k"


# -- what is not ------------------------------------------------------------------------------------------------


def test_five_mistakes_are_five_lines(tmp_path):
    assert lines(FIVE_MISTAKES, tmp_path) == [
        "f.toml:2  traning  is not a section: did you mean [training]",
        "f.toml:6  training.batchsize  is not a key of [training]: did you mean batch_size = 8",
        'f.toml:7  training.lr  is "1e-4", a string, but must be a number > 0 and ≤ 1: lr = 0.0001',
        "f.toml:8  training.temperature  is -1.0, but must be a number > 0: temperature = 1.0",
        "f.toml:14  sepa.steps  is 0: without a ramp λ would be 0 for the whole run, which makes gtpo_sepa plain gtpo: "
        "steps = 98",
    ]


SINGLE = [
    ('[reward]\ntimeout_s = "10"', "timeout_s = 10"),
    ('[squeeze]\nenabled = "false"', "enabled = false"),
    ('[squeeze]\nenabled = "False"', "enabled = false"),
    ("[squeeze]\nenabled = 1", "is 1, a number, but must be true or false: enabled = true"),
    ("[training]\nmax_steps = true", "is true, a boolean, but must be an integer ≥ 1: max_steps = 100"),
    ("[training]\nmax_steps = 8.0", "must be an integer ≥ 1: max_steps = 8"),
    ("[training]\nmax_steps = 99999999999999999999", "must be an integer ≥ 1"),
    ("[training]\nlr = true", "is true, a boolean, but must be a number"),
    ("[training]\nlr = nan", "is nan, but must be a number"),
    ("[training]\nlr = inf", "is inf, but must be a number"),
    ("[training]\nlr = 1979-05-27", "is 1979-05-27, a date or time, but"),
    ("[gtpo]\nbeta = -1", "must be a number ≥ 0: beta = 0.1"),
    ("[gtpo]\nbeta = [0.5]", "is [0.5], but must be a number ≥ 0: beta = 0.5"),
    ("[hicra]\nalpha = 1.0\n[algorithm]\ntransform_mode = 'gtpo_hicra'", "must be a number ≥ 0 and < 1"),
    ("[training]\ntop_p = 0", "must be a number > 0 and ≤ 1: top_p = 1.0"),
    ("[training]\ntop_p = 95", "must be a number > 0 and ≤ 1: top_p = 1.0"),
    ("[training]\ntop_k = 5000", "must be an integer ≥ 0 and ≤ 1024"),
    ("[training]\ntop_k = -2", "must be an integer ≥ 0 and ≤ 1024"),
    ("[training]\ntop_k = 1", "a group of equals teaches nothing: top_k = 20"),
    ("[training]\nmin_p = 1.0", "must be a number ≥ 0 and < 1"),
    ("[evaluation]\ntemperature = 0\ntop_p = 0.9", "has no effect at temperature 0, which is greedy: remove the line"),
    ("[training]\ntemperature = 0", "must be a number > 0"),
    ('[training]\nupdate_dtype = "float16"', 'but must be one of "model", "bfloat16"'),
    ('[training]\nupdate_dtype = "bfloat16"\n[inference]\ndtype = "bfloat16"', "has no effect over a base in bfloat16"),
    ('[training]\nupdate_dtype = "bfloat16"\n[inference]\ndtype = "float64"', "there for its digits"),
    ('[training]\nupdate_dtype = "bfloat16"\n[backend]\nbackend = "own:Own"', "decides itself what it computes in"),
    ("[training]\ngroup_size = 1", "group_size = 8"),
    ("[training]\nclip_eps = 0\nclip_eps_high = 0.3", "clip_eps = 0 switches clipping off"),
    ("[optimizer]\nlr = 1e-4", "lr belongs to [training]"),
    ("[training]\nbeta1 = 0.9", "beta1 belongs to [optimizer]"),
    ("[training]\nlearning_rate = 0.1", "lr = 0.1"),
    ("[training]\nlora_rnk = 8", "did you mean [model] lora_rank"),
    ("[training]\nzzz = 8", "its keys are seed, max_steps"),
    ("[zzz]", "the sections are [campaign], [ray]"),
    ("lr = 1e-4", "stands outside a section: put it under [training]"),
    ("learning_rate = 1e-4", "[training] lr = 0.0001"),
    ("training = 3", "must be a table: [training]"),
    ('model = "Qwen/Qwen3-8B"', '[model] and below it model = "Qwen/Qwen3-8B"'),
    ("[[training]]\nlr = 1e-4", "there is one [training]"),
    ('[algorithm]\nadvantage_mode = "maxlr"', 'did you mean advantage_mode = "maxrl"'),
    ('[algorithm]\nadvantage_mode = "gae"\ntransform_mode = "gtpo_paper"', 'transform_mode = "none"'),
    ('[algorithm]\nadvantage_mode = "gae"\nkl_in_reward = "k1"', "with kl_coef = 0"),
    ('[algorithm]\nadvantage_mode = "gae"\nturn_credit = "turn"\n[environment]\ntools = ["calculator"]',
     'turn_credit = "episode"'),
    ('[algorithm]\nadvantage_mode = "gae"\n[backend]\nbackend = "my:own"', 'advantage_mode = "grpo"'),
    ('[algorithm]\nadvantage_mode = "gae"\n[critic]\nwarmup_steps = 100', "the policy would never train"),
    ('[algorithm]\nadvantage_mode = "gae"\ndiscard_group_zero_advantage = false', "every completion with a reward"),
    ('[algorithm]\nadvantage_mode = "gae"\n[critic]\ncliprange_value = 0.1', "num_iterations = 4"),
    ('[training]\nminibatches = 2\nminibatch_by = "sequence"\ngroup_size = 1\n[algorithm]\nadvantage_mode = "gae"',
     "has no effect with groups of one"),
    ('[algorithm]\nadvantage_mode = "gae"\n[critic]\nlam = 0.9\nlam_policy = 0.9\nlam_value = 1.0', "has no effect"),
    ('[algorithm]\nadvantage_mode = "gae"\n[critic]\nshare_adapter = true\nlora_rank = 4', "has no effect"),
    ("[critic]\nlam = 0.9", 'has no effect with advantage_mode = "grpo"'),
    ('[algorithm]\nkl_coef = 0.1\nkl_in_reward = "k1"', 'has no effect with advantage_mode = "grpo"'),
    ("[training]\nminibatches = 9", "more than the batch_size = 8 that would be split"),
    ("[training]\nminibatches = 65\nminibatch_by = 'sequence'", "64 completions of a step"),
    ("[training]\nminibatch_by = 'sequence'", "has no effect with one minibatch"),
    ("[training]\ntarget_kl = 0.1", "has no effect with one pass over a batch"),
    ('[training]\nnum_iterations = 2\n[backend]\nbackend = "my:own"', "updates as often as it likes"),
    ('[training]\nclip_eps = 0.1\n[algorithm]\nloss = "my_module:loss"', 'has no effect with loss = "my_module:loss"'),
    ('[algorithm]\nloss_normalizer = "my_module:own"', "code of your own cannot be named here"),
    ('[algorithm]\ntransform_mode = "my_module.transform"', 'transform_mode = "my_module:transform"'),
    ('[algorithm]\nadvantage_mode = "code/mine.py:own"', 'must be a "module:function" of your own, or one of "grpo"'),
    ('[algorithm]\nuncertainty_kind = "entropie"', 'did you mean uncertainty_kind = "shannon_entropy"'),
    ("[gtpo]\nbeta = 0.2\n[algorithm]\ntransform_mode = 'my:own'", 'no effect with transform_mode = "my:own"'),
    ('[algorithm]\ntransform_mode = "gtpo_sepa_amp"', 'transform_mode = "gtpo_sepa"'),
    ('[algorithm]\ntransform_mode = "gtpo"\n[hicra]\nalpha = 0.2', 'no effect with transform_mode = "gtpo"'),
    ('[data]\nsource = "my.tsv"', 'source = "my.jsonl", made with one {"prompt": "…", "answer": "…"} per line'),
    ("[sepa]\nsteps = 10", 'no effect with transform_mode = "none"'),
    ("[sepa]\nema_decay = 0.9\n[algorithm]\ntransform_mode = 'gtpo_sepa'", 'no effect with schedule = "linear"'),
    ("[algorithm]\ncispo_cap = 4", 'no effect with loss = "ppo"'),
    ("[algorithm]\ndual_clip = 0.9", "must be a number > 1"),
    ("[algorithm]\ntis_cap = 0.5", "must be a number ≥ 1"),
    ("[algorithm]\ndual_clip = 3.0\nloss = 'cispo'", 'no effect with loss = "cispo": remove the line, or loss = "ppo"'),
    ("[algorithm]\ndual_clip = 3.0\ntis_cap = 2.0", "no effect with tis_cap = 2.0: remove one of the two"),
    ("[training]\nclip_eps = 0.3\n[algorithm]\nicepop_band = [0.5, 5]", "no effect with icepop_band = [0.5, 5.0]"),
    ("[algorithm]\ntis_cap = 2.0\nicepop_band = [0.5, 5.0]", "both weigh by the same ratio: keep one of the two"),
    ('[algorithm]\ncorrection = "tis"\nicepop_band = [0.5, 5.0]', 'no effect with correction = "tis"'),
    ('[algorithm]\ncorrection = "icepop"\ntis_cap = 2.0', 'no effect with correction = "icepop"'),
    ('[algorithm]\ncorrection = "decoupled"\ndual_clip = 3.0', 'no effect with correction = "decoupled"'),
    ('[algorithm]\ncorrection = "tis"\nloss = "dppo"', 'beside loss = "dppo": both weigh by the same ratio'),
    ('[algorithm]\ncorrection = "ice"', 'did you mean correction = "icepop"'),
    ("[algorithm]\ndppo_cap = 4", 'no effect with loss = "ppo"'),
    ("[algorithm]\nloss = 'dppo'\ndppo_threshold = -0.1", "must be"),
    ("[training]\nmax_off_policy_steps = 1", 'loss = "dppo", "vespo" or "m2po", or correction = "none"'),
    ('[algorithm]\nloss = "vespo"\ncorrection = "tis"', 'beside loss = "vespo": both weigh by the same ratio'),
    ('[algorithm]\nloss = "sapo"\nvespo_positive = [1, 1]', 'no effect with loss = "sapo"'),
    ('[algorithm]\nloss = "vespo"\nvespo_positive = [1, -1]', "must be [power, decay], both 0 or more"),
    ('[algorithm]\nloss = "sapo"\nsapo_tau_positive = 2.0\ntis_cap = 2.0', "no effect with tis_cap = 2.0"),
    ("[algorithm]\nm2po_threshold = 0.1", 'no effect with loss = "ppo"'),
    ('[algorithm]\ncorrection = "icepop"\nrejection_limit = 0.1', 'no effect with rejection = "none"'),
    ('[algorithm]\nrejection = "k3"\nrejection_band = [0.5, 2.0]', 'no effect with rejection = "k3"'),
    ('[algorithm]\nrejection_denominator = "kept"', 'is "kept", and nothing is ever rejected: remove the line'),
    ('[algorithm]\ncorrection = "tis"\nrejection_denominator = "kept"', "nothing is ever rejected"),
    (
        "[training]\nmax_off_policy_steps = 1\n[algorithm]\ncorrection = 'tis'\n[inference]\nengine = 'vllm'\n"
        "url = 'http://a:1'\nswap = 'in_flight'",
        "every episode has one turn: swap = \"between\"",
    ),
    ("[inference]\nengine = 'vllm'\nurl = 'http://a:1'\nswap = 'in_flight'", "no rollout is behind"),
    ("[training]\nmax_off_policy_steps = -1", "must be an integer ≥ 0"),
    (
        '[training]\nmax_off_policy_steps = 1\n[algorithm]\ncorrection = "none"\n[backend]\nbackend = "my:own"',
        "the one version of its weights: max_off_policy_steps = 0",
    ),
    ("[algorithm]\nicepop_band = [2.0, 0.5]", "with 0 ≤ alpha ≤ 1 ≤ beta: [0.5, 5.0] or the like"),
    ("[algorithm]\nicepop_band = [0.5]", "must be [alpha, beta]"),
    ("[algorithm]\nkl_coef = -0.1", "must be a number ≥ 0"),
    ("[training]\nclip_ratio_c = 3.0", "[algorithm] dual_clip = 3.0"),
    ("[sepa]\nsteps = 0\n[algorithm]\ntransform_mode = 'gtpo_sepa'", "without a ramp"),
    ('[inference]\nengine = "mlx"', 'engine = "vllm"'),
    ('[inference]\nengine = "vllm"', 'url = "http://127.0.0.1:8000", or launch = "vllm serve {model} --enable-lora"'),
    ('[inference]\nengine = "vllm"\nurl = "http://a"\nlaunch = "b"', "remove one of the two"),
    ('[inference]\nengine = "vllm"\nurl = "gpu1:8000"', 'url = "http://gpu1:8000"'),
    ('[inference]\nengine = "vllm"\nurl = []', "must be"),
    ('[inference]\nengine = "vllm"\nurl = "http://a"\nlaunch_gpus = "1"', "has no effect without launch"),
    ('[inference]\nengine = "sglang"\nurl = "http://a"\nsleep = true', 'has no effect with engine = "sglang"'),
    ("[inference]\nmax_in_flight = 8", 'has no effect with engine = "local"'),
    ('[inference]\nengine = "vllm"\nurl = "http://a"\n[training]\ntop_p = 0.9', "which tokens were left"),
    ('[inference]\nengine = "vllm"\nurl = "http://a"\n[backpressure]\nenabled = true', "max_in_flight = 64"),
    (
        '[inference]\nengine = "vllm"\nurl = "http://a"\n[algorithm]\ntransform_mode = "gtpo"\n'
        'uncertainty_kind = "shannon_entropy"',
        "needs full-vocabulary entropies, and servers do not give them",
    ),
    (
        '[inference]\nengine = "vllm"\nurl = "http://a"\n[backend]\nbackend = "mine:Backend"',
        'backend = "mine:Backend" samples itself',
    ),
    ('[inference]\nurl = "http://x"', 'has no effect with engine = "local"'),
    ('[backend]\nbackend = "tinker"', 'backend = "local"'),
    ('[backend]\ndevices = "cuda:0"', 'a GPU such as "gpu:0" or a range of them such as "gpu:0-7"'),
    ('[backend]\ndevices = "gpu:0,gpu:1"', 'devices = "auto"'),
    ('[planning]\ndetector = "semantic"', "planning tokens are no longer found by sentence embeddings: "),
    ('[planning]\ndetector = "regx"', 'did you mean detector = "regex"'),
    ('[environment]\nprovider = "textarena"', 'which is no longer built in: provider = "module:Class" of your own'),
    ('[data]\nsource = "gsm8"', 'source = "gsm8k"'),
    ('[data]\nsource = "hendrycks_math"', 'source = "math"'),
    ('[data]\nsource = "problems/my.tsv"', 'source = "problems/my.jsonl", made with'),
    ('[data]\nsource = "math"\nsubset = "algebra"', 'data.subset  has no effect with source = "math"'),
    ('[data]\nprompt_template = "Solve:"', 'prompt_template = "{prompt}"'),
    ('[data]\nsource = "math"\nlevels = ["easy"]', 'has no effect with source = "math"'),
    ('[data]\nlevels = ["esy"]', 'is ["esy"], but must be a list of one of "easy"'),
    ('[reward]\ntype = "judge"', "judge_model  is missing"),
    ('[reward]\ntype = "custom"', "custom_module  is missing"),
    ('[reward]\ntype = "weighted"', "components  is missing"),
    ('[reward]\njudge_model = "m"', 'has no effect with type = "match"'),
    ('[[reward.components]]\ntype = "math"', 'type = "weighted"'),
    ('[reward]\ntype = "weighted"\ncomponents = [{ type = "math" }, { type = "math" }]', 'name = "math_2"'),
    ('[reward]\ntype = "weighted"\ncomponents = [{ type = "math", wieght = 2 }]',
     "[[reward.components]]: did you mean weight = 2"),
    ('[reward]\ntype = "weighted"\ncomponents = [{ type = "rubric", criteria = [{ name = "a", text = "b", wt = 2 }] }]',
     "reward.components[1].criteria[1].wt  is not a key of [[reward.components.criteria]]: its keys are name, text"),
    ('[reward]\ntype = "weighted"\n[[reward.components]]\ntype = "rubric"\ncriteria = [{ name = 1, text = "b" }]',
     "reward.components[1].criteria[1].name  is 1"),
    ('[reward]\ntype = "weighted"\n[[reward.components]]\ntype = "rubric"\ncriteria = [3]',
     "reward.components[1].criteria[1]  is 3, a number, but must be a table: [[reward.components.criteria]]"),
    ('[audit]\ntype = "rubric"\ncriteria = [{ name = "a", text = "b", wieght = 2 }]',
     "audit.criteria[1].wieght  is not a key of [[audit.criteria]]: did you mean weight = 2"),
    ('[reward]\ntype = "weighted"\ncomponents = [{ type = "math", weight = 2 }]\n[algorithm]\nadvantage_mode = "maxrl"',
     "outside [0, 1]"),
    ('[environment]\nprovider = "verifier"\nid = "x"', 'provider = "verifiers"'),
    ('[environment]\nid = "x"', "has no effect without a provider"),
    ("[environment]\nargs = { size = 3 }", 'provider = "reasoning_gym"'),
    ("[environment]\nmax_turns = 4", 'tools = ["calculator"]'),
    ("[environment]\nauto_install = true", "nothing is installed unasked"),
    ('[environment]\nprovider = "openenv"\ntools = ["calculator"]', "brings its own tools"),
    ('[environment]\nprovider = "openenv"\n[reward]\ntype = "math"', "brings its own rewards"),
    ('[environment]\nprovider = "openenv"\n[data]\nsource = "gsm8k"', "brings its own problems"),
    ('[algorithm]\nturn_credit = "turn"', 'turn_credit = "episode"'),
    ('[environment]\ntools = ["calculator"]\n[algorithm]\nturn_discount = 0.5', 'turn_credit = "turn"'),
    ('[environment]\ntools = ["calculator"]\n[algorithm]\nturn_credit = "turn"\ntransform_mode = "gtpo_paper"',
     "makes its own"),
    ('[backpressure]\ntarget = "batch_size"', 'target = "concurrency"'),
    ("[backpressure]\nmin_batch_size = 9\nmax_batch_size = 8", "above max_batch_size = 8"),
    ("[training]\ndynamic_sampling = 9\ngroup_size = 1\n[algorithm]\nadvantage_mode = 'mine:own'",
     "training.dynamic_sampling  has only groups of one answer to choose from"),
    ("[training]\ndynamic_sampling = 9\n[algorithm]\nadvantage_mode = 'gae'",
     "drops groups from which a critic learns"),
    ("[training]\ndynamic_sampling = 9\n[environment]\ntools = ['calculator']\n[algorithm]\nturn_credit = 'turn'",
     'judges whole episodes, and turn_credit = "turn" compares their turns: turn_credit = "episode"'),
    ("[squeeze]\ncompress_to = 64", "above lora_rank = 32"),
    ("[squeeze]\ntarget_ranks = [4, 64]", "target_ranks = [4]"),
    ("[optimizer]\nwarmup_steps = 100", "the warm-up never ends"),
    ("[evaluation]\nsamples = 4\ntemperature = 0", "all samples of a problem are the same"),
    ('[logging]\nreport_to = "wanbd"', "wandb"),
    ('[logging]\nreport_to = ["none", "wandb"]', 'has "none" beside others'),
    ('[logging]\nreport_to = "wandb"\nlogging_dir = "tb"', 'report_to = ["wandb", "tensorboard"]'),
    ('[logging]\nreport_to = ["wanbd"]', "wandb"),
    ("[reward]\nmetrics_ranges = { steps = { min = 2, max = 1 } }", "a min that is not below its max"),
    ("[reward]\nmetrics_ranges = { steps = { low = 2 } }", "the key low, which is none of min, max and invert"),
    ("[logging]\nstrategic_grams = '[1, 2'", "no JSON list"),
    ("[plugins]\nstrict = true", "custom_module"),
    ('[reward]\ntype = "judge"\njudge_model = "m"\nstrict = false', 'has no effect with type = "judge": remove'),
    ('[reward]\ntype = "weighted"\nstrict = false\n[[reward.components]]\ntype = "math"', "reward.strict  has no"),
    ('[model]\nmodel = ""', "a string that is not empty"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), SINGLE)
def test_one_mistake_is_one_line(text, message, tmp_path):
    (line,) = lines(text, tmp_path)
    assert message in line


@pytest.mark.parametrize("dotted", REPLACED)
def test_keys_of_retrain_03_are_told_what_to_use(dotted, tmp_path):
    section, _, key = dotted.partition(".")
    (line,) = lines(f"[{section}]\n\n{key} = 1", tmp_path)
    assert line.startswith(f"f.toml:3  {dotted}  is not a key: ")
    assert line.endswith(REPLACED[dotted][1])
    assert dotted not in keys()


def test_tables_of_names_name_real_keys():
    assert set(SYNONYMS.values()) <= set(keys())
    assert not set(SYNONYMS) & {dotted.partition(".")[2] for dotted in keys()}
    assert all(name in sections() or name in keys() for name in FIXED)


SYNTAX = [
    ("[training]\nlr 3", "f.toml:2", "key = value"),
    ("[data]\nsource = gsm8k", "f.toml:2", 'source = "gsm8k"'),
    ("[squeeze]\nenabled = False", "f.toml:2", "enabled = false"),
    ("[a.b]\nc = 1\n[a]\nb.d = 2\n", "f.toml:4", "cannot redefine namespace a.b at"),
    ("w = {a = 1}\n[w.'k']", "f.toml:2", "cannot declare w.k twice at"),
    ('[data]\n\nsource = "gsm8k', "f.toml:3", "strings are in quotes"),
    ("a = [1,\n2", "f.toml:2", "end of the file"),
    ("x = " + "9" * 5000, "f.toml:1", "is not TOML"),
    ("x = " + "[" * 5000, "f.toml:1", "nested too deeply"),
]


REPEATS = [
    ("[training]\nlr = 1\nlr = 2", "f.toml:3  training.lr  is written twice, first in line 2: keep one of them"),
    ("[training]\nlr = 1\nlr = \"\"\"\n2\"\"\"\n", "f.toml:3  training.lr  is written twice, first in line 2: keep"),
    ("[training]\n[model]\n[ training ] # again", "f.toml:3  training  is declared twice, first in line 1: put the "
     "keys of both under one [training]"),
    ("[training.x]\n[training]\n[training]", "f.toml:3  training  is declared twice, first in line 2"),
    ("training.lr = 1\n[training]", "f.toml:2  training  is declared twice, first in line 1"),
    ("[[reward.components]]\n[[reward.components]]\n[reward.components.x]\n[reward.components.x]\n",
     "f.toml:4  reward.components[2].x  is declared twice, first in line 3: put the keys of both under one [reward"),
    ("x = [\n  {a = 1, a = 2},\n]", "f.toml:2  x[1].a  is written twice, first in line 2"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "start"), REPEATS)
def test_what_is_written_twice_is_told_with_both_lines(text, start, tmp_path):
    (line,) = lines(text, tmp_path)
    assert line.startswith(start)


@pytest.mark.parametrize(("text", "where", "message"), SYNTAX)
def test_syntax_errors_are_one_line(text, where, message, tmp_path):
    (line,) = lines(text, tmp_path)
    assert line.startswith(f"{where}  syntax  is")
    assert message in line


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
        "training.group_size",
        "training.batch_size",
        "training.top_k",
        "training.max_steps",
    ]


def highest_lambda(steps: int, sepa: dict) -> float:
    """The largest λ of a run whose first batch opens the gate and whose execution variance falls to nearly nothing."""
    schedule = SepaSchedule(**{"var_threshold": 0.2, **sepa})
    state, seen = sepa_start(schedule), []
    for step in range(steps):
        seen.append(sepa_lambda(schedule, state, step))
        state = sepa_observe(schedule, state, step, 1.0, 1.0 if step < schedule.warmup_steps else 1e-9)
    return max(seen)


@pytest.mark.parametrize("gate", [0.0, 0.1])
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 9])
def test_sepa_without_lambda_is_told_before_it_runs(steps, delay, gate):
    """That λ stays 0 in every run of this length is told, and else how far it gets; neither stops a first try."""
    sepa = {"steps": 4, "delay_steps": delay, "correct_rate_gate": gate}
    run = Config(training={"max_steps": 100}, algorithm={"transform_mode": "gtpo_sepa"}, sepa=sepa)  # type: ignore[arg-type]
    run = run.model_copy(update={"training": run.training.model_copy(update={"max_steps": steps})})
    found, peak = list(sepa_rules(run)), highest_lambda(steps, sepa)
    assert [finding.warning for finding in found] == ([] if peak == 1 else [True])
    told = "λ is 0 for the whole run" if peak == 0 else f"λ gets to {peak:.2f} at most"
    assert peak == 1 or told in found[0].message
    auto = sepa | {"schedule": "auto", "warmup_steps": 2, "ema_decay": 0.3}
    run = run.model_copy(update={"sepa": run.sepa.model_copy(update=auto)})
    flat = any("λ is 0" in finding.message for finding in sepa_rules(run))
    assert flat == (highest_lambda(steps, auto) == 0 or steps <= delay)


def test_direct_construction_is_held_to_the_same_rules():
    with pytest.raises(ValidationError, match=r"training\.top_k is 1"):
        Config(training={"top_k": 1})  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="frozen"):
        Config().training.lr = 1.0


# -- --set ------------------------------------------------------------------------------------------------------


def test_set_replaces_values_of_every_type(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text("[training]\nlr = 'wrong'\n")
    sets = ["training.lr=3e-4", "data.source=gsm8k", "squeeze.enabled=false", 'model.revision="a=b"',
            "logging.wandb_tags=a,b", 'lora.target_modules=["q_proj"]', "training.clip_eps_high = 0.3"]  # fmt: skip
    config = load(file, sets).config
    assert config.training.lr == 3e-4
    assert config.data.source == "gsm8k"
    assert not config.squeeze.enabled
    assert config.model.revision == "a=b"
    assert config.logging.wandb_tags == ["a", "b"]
    assert config.lora.target_modules == ["q_proj"]
    assert config.training.clip_eps_high == 0.3


def test_set_wins_over_campaign_steps(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text("[campaign]\nmax_steps = 50\n")
    assert plan(load(file, ["training.max_steps=7"]))[0].config.training.max_steps == 7
    assert plan(load(file, ["campaign.max_steps=9"]))[0].config.training.max_steps == 9
    conditions = '[{ advantage_mode = "rloo", transform_mode = "none" }]'
    assert plan(load(file, [f"campaign.conditions={conditions}", "campaign.seeds=[5]"]))[0].run_id == "rloo+none_s5"


SETS = [
    ("training.lr=high", '--set  training.lr  is "high", a string, but must be a number > 0 and ≤ 1: lr = 0.0001'),
    ("training.lrr=1", "--set  training.lrr  is not a key of [training]: did you mean lr = 1"),
    ("lr=1e-3", "--set  lr  needs its section: --set training.lr=1e-3"),
    ("training.lr", "--set  training.lr  is not of the form section.key=value: --set training.lr=1e-4"),
    ("=3", "--set  =3  is not of the form section.key=value"),
    ("training..lr=3", "is not of the form"),
    ("training=3", "--set  training  is 3, a number, but must be a table"),
    ("training.top_k=1", "--set  training.top_k  is 1: all completions of a prompt"),
    ("training.lr=1\nx = 2", "a string, but must be a number"),
]


@pytest.mark.parametrize(("setting", "message"), SETS)
def test_set_is_validated_like_the_file(setting, message, tmp_path):
    (line,) = lines("[training]\nlr = 1e-3\n", tmp_path, setting)
    assert message in line


def test_set_problems_come_after_those_of_the_file(tmp_path):
    found = lines("[training]\nmax_steps = 0\n", tmp_path, "training.lr=0", "training.seed=-2")
    assert [line.split("  ")[0] for line in found] == ["f.toml:2", "--set", "--set"]


# -- what is made from the models -------------------------------------------------------------------------------


def test_the_reference_page_is_that_of_the_models():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration_markdown(), "type: python -m retrain.config docs/configuration.md"
    assert all(f"| `{dotted.partition('.')[2]}` |" in page for dotted in keys())


def test_examples_of_the_reference_page_load():
    _, block = configuration_markdown().split("```toml\n")
    specs = plan(good(block.split("```")[0]))
    assert specs[1].run_id == "maxrl+gtpo_sepa~lr=0.0002~sepa.steps=50_s1"


def test_the_schema_file_is_that_of_the_models():
    stored = json.loads((ROOT / "campaigns" / "schema.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(json_schema())), "type: python -m retrain.config campaigns/schema.json"


def test_the_schema_accepts_and_refuses():
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(validator.schema)
    condition = 'advantage_mode = "grpo"\ntransform_mode = "none"\nlr = 1e-4\n"sepa.steps" = 5\nsepa = { steps = 5 }'
    validator.validate(tomllib.loads(f"[campaign]\n[[campaign.conditions]]\n{condition}"))
    for text in ["[training]\nlrr = 1", "[traning]", "[training]\nlr = 'x'", "[algorithm]\nloss = 'dpo'"]:
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(tomllib.loads(text))


def test_levels_are_those_of_the_generator():
    from retrain.config.tasks import Level
    from retrain.data.arithmetic import LEVELS

    assert Level.__args__ == LEVELS


def test_loading_is_light():
    code = (
        "import sys, retrain.config, retrain.campaign.planning.plan as p\n"
        f"p.plan(retrain.config.load({str(CAMPAIGNS[0])!r}))\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"torch", "transformers", "numpy", "scipy", "peft", "pandas"} & set(done.stdout.split())


# -- whatever else people may write -----------------------------------------------------------------------------

names = st.sampled_from([*sections(), *(key.partition(".")[2] for key in keys()), "zzz", "", "a.b", "conditions"])
scalars = st.one_of(
    st.booleans(),
    st.integers(-3, 70),
    st.integers(-(10**25), 10**25),
    st.floats(),
    st.dates(),
    st.text(max_size=5),
    st.sampled_from(["grpo", "maxrl", "none", "gtpo_sepa", "auto", "math", "weighted", "linear", "x.jsonl", "a:b"]),
)
tables = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)
plausible = st.fixed_dictionaries(
    {},
    optional={
        name: st.fixed_dictionaries(
            {}, optional={field.alias or key: tables for key, field in section.model_fields.items()}
        )
        for name, section in sections().items()
    },
)
conditions = st.lists(
    st.dictionaries(st.sampled_from(["advantage_mode", "transform_mode", "lr", "sepa.steps", "sepa"]), tables),
    max_size=3,
)


def outcome(function, *arguments):
    """What the function returns, or the ConfigError that it raises; nothing else may come out."""
    try:
        return function(*arguments)
    except ConfigError as error:
        return error


@settings(max_examples=150, deadline=None)
@given(st.one_of(plausible, st.dictionaries(names, tables, max_size=4)), conditions)
@example({"campaign": {}}, [{"advantage_mode": "grpo", "transform_mode": "none", "sepa": 3}])
@example({"reward": {"type": "weighted", "components": [3, {"type": "math"}]}}, [])
def test_any_data_gives_a_configuration_or_its_mistakes(data, rows):
    if rows and isinstance(data.get("campaign", {}), dict):
        data = {**data, "campaign": {**data.get("campaign", {}), "conditions": rows}}
    config = outcome(parse_dict, data)
    if isinstance(config, ConfigError):
        assert config.problems
        assert all(problem.message and "\n" not in str(problem) for problem in config.problems)
    else:
        assert parse_dict(config.to_dict()) == config
        plan(config)


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.text(max_size=40), st.binary(max_size=40)), st.lists(st.text(max_size=12), max_size=2))
def test_any_file_gives_a_configuration_or_its_mistakes(tmp_path_factory, content, sets):
    file = tmp_path_factory.mktemp("any") / "f.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
    loaded = outcome(load, file, sets)
    if isinstance(loaded, ConfigError):
        assert all(problem.where == "--set" or problem.where.startswith("f.toml:") for problem in loaded.problems)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(keys())), scalars)
@example("data.source", "")  # which is no directory beside the file
def test_any_value_is_kept_or_refused_in_the_file_as_in_data(tmp_path_factory, dotted, value):
    """One key at a time through a real file: the two ways agree, and mistakes name its line."""
    section, _, key = dotted.partition(".")
    text = f"[{section}]\n\n{key} = {toml(value)}\n"
    parsed = tomllib.loads(text)
    file = tmp_path_factory.mktemp("one") / "f.toml"
    file.write_text(text, encoding="utf-8")
    loaded = outcome(load, file)
    if isinstance(loaded, ConfigError):
        assert [problem.where for problem in loaded.problems] == ["f.toml:3"] * len(loaded.problems)
    elif dotted != "logging.log_dir":
        assert value_at(loaded.config, dotted) == value_at(parse_dict(parsed), dotted)


def test_shipped_files_with_changes_are_refused_or_kept_as_the_schema_says(tmp_path):
    """The first runs of ``python -m tests.fuzz_config``."""
    outcomes = {one_change(random.Random(f"0 {number}"), tmp_path / "f.toml") for number in range(200)}
    assert outcomes == {"accepted", "refused"}


def test_a_run_without_pages_is_the_same_when_its_settings_are_read_again():
    config = parse_dict({"logging": {"rollouts_every": 0}})
    assert parse_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="num_groups_to_log  has no effect with rollouts_every = 0"):
        parse_dict({"logging": {"rollouts_every": 0, "num_groups_to_log": 2}})


def test_a_condition_with_an_empty_table_is_refused():
    row = {"advantage_mode": "grpo", "transform_mode": "none", "backend": {}}
    with pytest.raises(ConfigError, match=r"conditions\[1\]\.backend  has no effect: the table is empty"):
        parse_dict({"campaign": {"conditions": [row]}})


def test_a_section_that_only_set_names_is_reported_there(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nmax_steps = 3\n")
    with pytest.raises(ConfigError) as caught:
        load(path, ["trainin.lr=1"])
    assert str(caught.value) == "--set  trainin  is not a section: did you mean [training]"


def test_a_judge_url_with_a_password_is_refused():
    from retrain.config import parse_dict

    reward = {"type": "judge", "judge_model": "m", "judge_url": "http://user:secret@host:1/v1"}
    with pytest.raises(ConfigError, match="password") as error:
        parse_dict({"reward": reward})
    assert "secret" not in str(error.value)
    parse_dict({"reward": reward | {"judge_url": "http://host:1/v1/a@b"}})


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("[campaign]\nseeds = []", "is an empty list, but must be a list of integers ≥ 0, at least one: seeds = [1, 2"),
        (
            "[campaign]\nseeds = [1, 9223372036854775808]",
            "is [1, 9223372036854775808], but must be a list of integers ≥ 0 and ≤ 9223372036854775807: seeds",
        ),
        ("[training]\nseed = 9223372036854775808", "must be an integer ≥ 0 and ≤ 9223372036854775807: seed = 0"),
        ("[training]\nbatch_size = 3000000000", "must be an integer ≥ 1 and ≤ 2147483647: batch_size = "),
        (
            '[backend]\nbackend = "my:Own"\noptions = { a = 1, layers = [1, 2] }',
            "has layers = [1, 2], a list, but its values must be true or false, or a number, or a string: "
            'layers = "1, 2"',
        ),
        (
            '[reward]\nmetrics_ranges = { steps = { min = "a" } }',
            'has steps.min = "a", a string, but its values must be true or false, or a number: metrics_ranges = {}',
        ),
    ],
)
def test_a_value_that_looks_right_is_told_what_is_wrong_with_it(tmp_path, toml, told):
    file = tmp_path / "f.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load(file)
    (problem,) = caught.value.problems
    assert told in str(problem)
