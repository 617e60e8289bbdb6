import re

import numpy as np
import pytest
from helpers.campaigns import continue_training, run_cli, train
from helpers.lanes import in_turns, local_policy, rollout, trained
from helpers.models import TINY_RUN, campaign_head
from helpers.servers import served_world

from retrain.algorithms.distillation import ModelTeacher
from retrain.config import parse_dict
from retrain.engines.server.dialects import DIALECTS, InvalidAnswer, PromptLogprobs
from retrain.engines.server.teacher import ServerTeacher, checked_prompt, server_teacher
from retrain.errors import RunFailed, ServerFailed, UsageError
from retrain.files import read_json, read_jsonl

model, base, lanes, standin, server = served_world()


def samples_of(base, lanes):
    drawn = rollout(base, lanes, trained(lanes, 3))
    return [*drawn, in_turns(drawn[0])]


@pytest.mark.parametrize("dialect", ["vllm", "openai", "sglang"])
def test_it_says_of_every_token_what_the_model_says(server, base, lanes, dialect):
    samples = samples_of(base, lanes)
    teacher = ServerTeacher("base", server.url, DIALECTS[dialect], max_in_flight=3)
    teacher.open()
    policy = local_policy(base, lanes)
    own = ModelTeacher(base, 4096, 1.0).score(policy, samples)
    for said_T, own_T in zip(teacher.score(policy, samples), own, strict=True):
        np.testing.assert_allclose(said_T, own_T, atol=2e-5)
    assert len(server.asked) == len(samples) + 1
    assert teacher.identity == "server's base"
    for payload in ({}, {"choices": [{"logprobs": None}]}, {"meta_info": {}}, [1], "no"):
        with pytest.raises(InvalidAnswer, match="no log-probabilities of the prompt"):
            DIALECTS[dialect].read_prompt(payload)


@pytest.mark.parametrize(("said", "why"), [
    (PromptLogprobs([None, -1.0]), "2 log-probabilities for 3 tokens"),
    (PromptLogprobs([None, -1.0, float("nan")]), "log-probability nan"),
    (PromptLogprobs([None, -1.0, 0.5]), "log-probability 0.5"),
    (PromptLogprobs([None, -1.0, -2.0], [4, 5, 7]), "other ids: they were not read as sent"),
])  # fmt: skip
def test_an_answer_about_something_else_is_none(said, why):
    with pytest.raises(InvalidAnswer, match=why):
        checked_prompt(said, [4, 5, 6])
    assert checked_prompt(PromptLogprobs([None, -1.0, 1e-7], [4, 5, 6]), [4, 5, 6]).tolist() == [0.0, -1.0, 0.0]


def test_faults_are_asked_again_and_end_the_run_when_they_stay(server, base, lanes):
    samples, policy = samples_of(base, lanes)[:2], local_policy(base, lanes)
    teacher = ServerTeacher("base", server.url, DIALECTS["vllm"])
    server.faults.extend([lambda status, payload: (500, {}), lambda status, payload: (200, {"choices": []})])
    assert len(teacher.score(policy, samples)) == 2
    server.always = lambda status, payload: (200, {"choices": []})
    with pytest.raises(RunFailed, match="answers wrongly time and again: no log-probabilities"):
        teacher.score(policy, samples)
    server.always = lambda status, payload: (400, {"error": {"message": "too long"}})
    with pytest.raises(RunFailed, match="will not score base: HTTP 400 too long") as refused:
        teacher.score(policy, samples)
    assert not isinstance(refused.value, ServerFailed)
    server.always = lambda status, payload: (503, {})
    teacher.patience_s = 0.4
    with pytest.raises(ServerFailed, match=r"does not answer, for 0.4 s now \(\[distillation\] patience_s\): HTTP 503"):
        teacher.score(policy, samples)


def test_it_has_to_answer_under_its_name_and_with_its_key(model, start, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    monkeypatch.setenv("TEACHERS_KEY", "a-key-of-ours")
    monkeypatch.setenv("ANOTHER_KEY", "another")
    locked = start(model, key="a-key-of-ours")

    def connect(url=locked.url, key="TEACHERS_KEY", teacher="base", **keys):
        section = {"teacher": teacher, "url": url, "api_key_env": key, **keys}
        return server_teacher(parse_dict({"distillation": section}))

    assert connect(f"{locked.url}/v1/").url == locked.url
    with pytest.raises(UsageError, match="HTTP 401"):
        connect(key="ANOTHER_KEY")
    with pytest.raises(UsageError, match=r"api_key_env: \$NO_SUCH_KEY is not set: export NO_SUCH_KEY="):
        connect(key="NO_SUCH_KEY")
    with pytest.raises(UsageError, match=r'url = "http://127.*", teacher = "another": .*will not score another'):
        connect(teacher="another")
    locked.stop()
    with pytest.raises(UsageError, match=r"\[distillation\] url = .*no connection|ConnectError|refused"):
        connect(patience_s=0.2)


def campaign(folder, model, keys: str, name: str, teacher: str = "base"):
    head = campaign_head(("grpo", "none"), seeds=[1, 2], max_steps=2)
    settings = "max_tokens = 8\nsave_every = 1\n[evaluation]\nproblems = 0\n[squeeze]\nenabled = false\n"
    run = TINY_RUN.format(model=model).replace("max_steps = 2\n", "")
    path = folder / f"{name}.toml"
    path.write_text(f'{head}[distillation]\nteacher = "{teacher}"\n{keys}\n{run}{settings}')
    return path


def rows_of(out):
    runs = [out / run["path"] for run in read_json(out / "manifest.json")["runs"]]
    return [[row["distillation/reverse_kl"] for row in read_jsonl(run / "metrics.jsonl")] for run in runs]


def test_when_it_is_gone_everything_before_the_step_is_saved_and_goes_on_later(server, model, tmp_path):
    keys = f'url = "{server.url}"\npatience_s = 0.3'
    whole = campaign(tmp_path, model, keys, "whole")
    train(whole, tmp_path / "whole")
    begun = []

    def gone_after_the_first_step(status, payload):
        begun.append(1)
        return (503, {}) if len(begun) > 2 + 16 else (status, payload)  # two runs that connect, and 16 samples

    server.always = gone_after_the_first_step
    path, out = campaign(tmp_path, model, keys, "cut"), tmp_path / "cut"
    path.write_text(path.read_text().replace("save_every = 1", "save_every = 0"))  # nothing is saved unless it fails
    result = run_cli("train", path, "--out", out, "--plain")
    assert result.exit_code != 0
    said = re.sub(r"\s+", " ", result.stdout + result.stderr)
    assert "the teacher's server" in said
    assert "does not answer, for 0.3 s now" in said
    assert "Traceback" not in said
    assert [run["state"] for run in read_json(out / "manifest.json")["runs"]] != ["failed", "failed"]
    for run in read_json(out / "manifest.json")["runs"]:
        assert [each.name for each in (out / run["path"] / "checkpoints").glob("step_*")] == ["step_000001"]
    server.always = None
    continue_training(out)
    for one, other in zip(rows_of(tmp_path / "whole"), rows_of(out), strict=True):
        assert one == pytest.approx(other, abs=1e-6)
