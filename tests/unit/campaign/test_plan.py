import re
import tomllib
from dataclasses import replace

import pytest
from pydantic import Field, create_model

from retrain.campaign.planning.manifest import fingerprint
from retrain.campaign.planning.plan import plan
from retrain.config import Config, load, parse_dict
from retrain.config.runs import differences
from retrain.errors import ConfigError

STANDARD = ["grpo+none", "maxrl+none", "maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa"]


def planned(text: str):
    return plan(parse_dict(tomllib.loads(text)))


def conditions(*overrides: str, modes: str = 'advantage_mode = "maxrl"\ntransform_mode = "gtpo_sepa"') -> str:
    return "\n".join(f"[[campaign.conditions]]\n{modes}\n{lines}" for lines in overrides)


def test_five_standard_conditions_and_eight_seeds_paired():
    specs = planned("[campaign]")
    assert [(spec.seed, spec.label) for spec in specs] == [(s, label) for s in range(1, 9) for label in STANDARD]
    assert [spec.condition_index for spec in specs[:6]] == [0, 1, 2, 3, 4, 0]
    assert [spec.run_id for spec in specs[5:7]] == ["grpo+none_s2", "maxrl+none_s2"]
    assert all(spec.is_campaign and spec.config.training.seed == spec.seed for spec in specs)
    algorithms = [spec.config.algorithm for spec in specs[:5]]
    assert [f"{each.advantage_mode}+{each.transform_mode}" for each in algorithms] == STANDARD


def test_single_run():
    (spec,) = planned('[algorithm]\nadvantage_mode = "rloo"\n[training]\nseed = 7\n[logging]\nwandb_project = "p"')
    assert (spec.run_id, spec.label, spec.seed, spec.is_campaign) == ("rloo+none_s7", "rloo+none", 7, False)
    assert spec.overrides == {}
    assert spec.config.logging.wandb_run_name == "rloo+none"


@pytest.mark.parametrize("written", [
    '"sepa.steps" = 50\n"training.lr" = 1e-4', "sepa.steps = 50\nlr = 1e-4",
    "sepa = { steps = 50 }\ntraining = { lr = 1e-4 }", "lr = 1e-4\n[campaign.conditions.sepa]\nsteps = 50",
    "sepa_steps = 50\ntraining_lr = 0.0001",
])  # fmt: skip
def test_every_way_to_write_an_override_is_the_same_run(written):
    (spec,) = planned("[campaign]\nseeds = [3]\n" + conditions(written))
    assert spec.config.sepa.steps == 50
    assert spec.config.training.lr == 1e-4
    assert spec.overrides == {"sepa.steps": 50, "training.lr": 1e-4}
    assert spec.run_id == "maxrl+gtpo_sepa~lr=0.0001~sepa.steps=50_s3"


def test_overrides_stay_in_their_condition():
    specs = planned("[campaign]\nseeds = [1]\n[training]\nlr = 1e-3\n" + conditions("", "lr = 1e-4", "group_size = 4"))
    assert [spec.config.training.lr for spec in specs] == [1e-3, 1e-4, 1e-3]
    assert [spec.config.training.group_size for spec in specs] == [8, 8, 4]
    specs = planned("[campaign]\nseeds = [1]\nmax_steps = 20\n" + conditions("", "max_steps = 30\nsepa.steps = 20"))
    assert [spec.config.training.max_steps for spec in specs] == [20, 30]
    specs = planned("[campaign]\nseeds = [1]\n[lora]\nalpha = 0\n" + conditions("", "lora_rank = 8"))
    assert [spec.config.lora.alpha for spec in specs] == [64, 16]  # twice the rank of each
    specs = planned("[campaign]\nseeds = [1]\n[hicra]\nalpha = 0.4\n[gtpo]\nbeta = 0.3")
    assert [spec.config.hicra.alpha for spec in specs] == [0.2, 0.2, 0.2, 0.4, 0.2]  # defaults where it has no effect
    assert [spec.config.gtpo.beta for spec in specs] == [0.1, 0.1, 0.3, 0.3, 0.3]


def test_evaluation_is_that_of_the_base_even_where_sampling_differs():
    specs = planned("[campaign]\nseeds = [1]\n" + conditions("", "temperature = 0.7\nmax_tokens = 64"))
    assert {(each.config.evaluation.temperature, each.config.evaluation.max_tokens) for each in specs} == {(1.0, 256)}


def test_planning_again_with_overrides():
    text = '[campaign]\nseeds = [1, 2]\nmax_steps = 40\n[logging]\nwandb_tags = ["a"]\n[sepa]\nsteps = 30\n'
    text += conditions("", "lr = 1e-4\nlora_rank = 8\ntarget_modules = ['q_proj', 'v_proj']\ntemperature = 0.9")
    config = parse_dict(tomllib.loads(text))
    assert plan(parse_dict(config.to_dict())) == plan(config)
    for spec in plan(config):
        (again,) = plan(parse_dict(spec.config.to_dict()))
        assert (again.run_id, again.label, again.seed) == (spec.run_id, spec.label, spec.seed)
        assert (again.config, again.overrides) == (spec.config, spec.overrides)


@pytest.mark.parametrize(("override", "label"), [
    ("lr = 1e-5", "lr=1e-05"),
    ("lora.target_modules = ['q_proj', 'v_proj']", "lora.target_modules=q_proj-v_proj"),
    ("reward.type = 'custom'\nreward.custom_module = 'my/re ward.py'",
     "reward.custom_module=my-re-ward.py~reward.type=custom"),
    ("deterministic = true", "deterministic=true"),
    ("uncertainty_kind = 'mine:own'", "uncertainty_kind=mine-own"),
])  # fmt: skip
def test_labels(override, label):
    (spec,) = planned("[campaign]\nseeds = [1]\n" + conditions(override))
    assert spec.label == f"maxrl+gtpo_sepa~{label}"


def test_long_labels_are_cut_and_stay_distinct():
    long = [f"reward.type = 'custom'\ncustom_module = '{'m' * 200}{end}'" for end in "ab"]
    specs = planned("[campaign]\nseeds = [1]\n" + conditions(*long))
    assert len({spec.label for spec in specs}) == 2
    assert all(len(spec.run_id) < 150 and re.fullmatch(r"[A-Za-z0-9._+~=-]+", spec.run_id) for spec in specs)


MISTAKES = [
    (conditions("", ""), "has the label of condition 1"),
    (conditions("sepa.steps = 0"), "λ would be 0 for the whole run"),
    (conditions("group_size = 1"), "with one of them all are 0"),
    (conditions("model = 'Qwen/Qwen3-8B'"), "share one frozen base"),
    (conditions("data.source = 'gsm8k'"), "graded in the same way"),
    (conditions("seed = 3"), "the seed is the replicate"),
    (conditions("alpha = 0.3"), 'is a key of 3 sections: "lora.alpha" or "hicra.alpha" or "distillation.alpha"'),
    (conditions("lr = 1e-4\ntraining.lr = 1e-3"), "overrides training.lr a second time"),
    (conditions("learning_rate = 1e-4"), '"training.lr"'),
    (conditions("transform_params = { tau = 2.0 }"), "plug-in parameters are not available: remove the table"),
    (conditions("algorithm.transform_mode = 'gtpo'"), "the condition's own mode"),
    ("[campaign]\n[hicra]\nalpha = 0.3\n" + conditions(""), "has no effect in any condition"),
    ('[campaign]\n[backpressure]\ntarget = "batch_size"', "batch sizes would differ between the conditions"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes_in_campaigns(text, message):
    with pytest.raises(ConfigError) as caught:
        planned(text)
    assert message in str(caught.value)


def test_mistakes_in_conditions_have_their_lines(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        "[campaign]\nseeds = [1]\n"  # 1, 2
        + conditions("sepa.steps = 1.5", '"hicra.alpha" = 0.3', "[campaign.conditions.sepa]\n\nstepps = 3", "", "")
    )
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert [problem.where for problem in caught.value.problems] == ["c.toml:6", "c.toml:10", "c.toml:16", "c.toml:21"]


def test_warnings(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        '[campaign]\nseeds = [1, 2]\nmax_steps = 50\n[algorithm]\nadvantage_mode = "grpo"\n'
        "[training]\nmax_steps = 60\ngroup_size = 2\nlr = 1e-3\n" + conditions("", "lr = 1e-3")
    )
    expected = [
        "c.toml:2  campaign.seeds  has 2: too few for a verdict, which takes 6 at least",
        "c.toml:3  sepa.steps  is 100: in 50 steps λ gets to 0.48 at most",
        "c.toml:5  algorithm.advantage_mode  has no effect in a campaign",
        "c.toml:7  training.max_steps  is 60, which [campaign] max_steps = 50 replaces",
        "c.toml:8  training.group_size  is 2: with two completions maxrl equals rloo",
        "c.toml:14  campaign.conditions[2]  is the same experiment as condition 1 under another label",
    ]
    for line, start in zip(load(file).warnings, expected, strict=True):
        assert line.startswith(start)


def test_keys_that_a_later_release_adds_do_not_change_what_a_run_is():
    (spec,) = plan(parse_dict({"training": {"lr": 0.5}}))
    training = create_model("LaterTraining", __base__=type(spec.config.training), further=(int, 3))
    fields = {name: (training, Field(default_factory=training)) for name in ("training", "added")}
    later = create_model("LaterConfig", __base__=Config, **fields)
    same = later.model_validate(spec.config.model_dump(mode="json", by_alias=True), strict=False)
    assert fingerprint(replace(spec, config=same)) == fingerprint(spec)
    assert fingerprint(replace(spec, config=parse_dict({"training": {"lr": 0.4}}))) != fingerprint(spec)


def test_a_record_from_before_a_key_existed_has_its_default():
    old, new = Config().to_dict(), Config().to_dict()
    del old["evaluation"]["schedule"]
    assert differences(old, new) == differences(new, old) == {}
    new["evaluation"]["schedule"] = "verdict"
    assert differences(old, new) == {"evaluation.schedule": ("every", "verdict")}
