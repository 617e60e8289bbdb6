"""What servers have to do for us, asked of ``retrain serve`` and, where RETRAIN_VLLM names one, of a real vLLM.

RETRAIN_VLLM is the Python of an environment with vLLM (``make test-servers`` makes one).
"""

import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from helpers.campaigns import Heard, StopAfter, continue_training, eventually, run_cli, train
from helpers.lanes import in_turns, local_policy, rollout, tokens, trained
from helpers.models import campaign_head
from helpers.servers import StandIn, apart, engine_of, publish, requests, weights

from retrain.algorithms.distillation import AdapterTeacher, ModelTeacher
from retrain.campaign.planning.engine import with_engine
from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.config.describe import document
from retrain.engines.server.automatic import GIB, Machine
from retrain.engines.server.canary import Canary, CanarySettings
from retrain.engines.server.dialects import DIALECTS
from retrain.engines.server.launch import ServerProcess, server_environment
from retrain.engines.server.teacher import ServerTeacher
from retrain.errors import ServerFailed
from retrain.files import read_json, read_jsonl
from retrain.models.directory import bundled_model_path
from retrain.policy.base import load_base
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.types import PolicyRef
from tests.system.clusters import SERVE, cluster_of, rows_of

VLLM = os.environ.get("RETRAIN_VLLM", "")
ADAPTERS = "--enable-lora --max-loras 4 --max-lora-rank 16"
COMMAND = (
    f"env TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 {VLLM} -m "
    "vllm.entrypoints.openai.api_server --model {model} --served-model-name base --host 127.0.0.1 --port {port} "
    # Seeded prompts that are read in pieces end this vLLM on a CPU: a batch holds all of them whole.
    f"--dtype float32 --max-model-len 1024 --max-num-seqs 64 --max-num-batched-tokens 65536 {ADAPTERS} "
    "--logprobs-mode processed_logprobs --enforce-eager --generation-config vllm"
)
MODEL = str(bundled_model_path("tiny-reasoner"))
real = pytest.mark.skipif(not VLLM, reason="no vLLM here: make test-servers")


@contextmanager
def serving(kind: str, command: str, folder: Path) -> Iterator[str]:
    """The address of a server with the bundled model."""
    if kind == "standin":
        made = StandIn(MODEL)
    else:
        made = ServerProcess(command, MODEL, folder, server_environment(None), lambda text, level: print(text))
    try:
        eventually(lambda: answers(made.url), 400)
        yield made.url
    finally:
        made.close()


@pytest.fixture(scope="module", params=["standin", pytest.param("vllm", marks=real)])
def server(request, tmp_path_factory):
    with serving(request.param, COMMAND, tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture(scope="module", params=["standin", pytest.param("vllm", marks=real)])
def teaching(request, tmp_path_factory):
    """Without adapters: see ``test_an_adapter_teaches_one_question_at_a_time``."""
    command = COMMAND.replace(ADAPTERS, "")
    with serving(request.param, command, tmp_path_factory.mktemp("teacher")) as url:
        yield url


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def base():
    return load_base("tiny-reasoner", devices="cpu")


@pytest.fixture(scope="module")
def lanes(base):
    return Lanes(base)


@pytest.fixture
def engine(base, server, tmp_path):
    made = engine_of(base, [server], tmp_path / "adapters")
    yield made
    made.close()


def written(path: Path, training: dict[str, float], conditions: list[str], problems: int = 0, *, seeds: list[int],
            max_steps: int, **sections: dict[str, object]) -> Path:  # fmt: skip
    """Write a campaign that learns arithmetic with these advantage modes."""
    sections |= {"model": {"model": "tiny-reasoner", "lora_rank": 16}, "reward": {"type": "match"}}
    sections |= {"training": {"eval_every": 0, "save_every": 2, **training}, "evaluation": {"problems": problems}}
    head = campaign_head(*((mode, "none") for mode in conditions), seeds=seeds, max_steps=max_steps)
    path.write_text(head + document(sections | {"squeeze": {"enabled": False}}))
    return path


def names_at(url: str) -> list[str]:
    return [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"] if each["parent"]]


def says_what_it_is(server, model, own, base, lanes, **keys) -> np.ndarray:
    """What a teacher there says of all samples, which is what ``own`` says in this process."""
    samples = rollout(base, lanes, trained(lanes, 3, size=0.03))
    samples = [*samples, in_turns(samples[0])]
    policy = local_policy(base, lanes)
    teacher = ServerTeacher(model, server, DIALECTS["vllm"], **keys)
    teacher.open()
    said = np.concatenate(teacher.score(policy, samples))
    np.testing.assert_allclose(said, np.concatenate(own.score(policy, samples)), atol=1e-4)
    return said


def test_a_teacher_says_of_every_token_what_the_model_says(base, lanes, teaching):
    says_what_it_is(teaching, "base", ModelTeacher(base, 4096, 1.0), base, lanes)


def test_an_adapter_teaches_one_question_at_a_time(base, lanes, engine, server):
    """With --enable-lora this vLLM takes one prompt at a time (its issue 16668)."""
    strong = weights(lanes, 5, 8, 16.0, 0.03)
    ref = publish(engine, strong)
    engine.sample(requests(ref, 1, 1))  # the server loads it when it is first asked for
    (name,) = names_at(server)
    own = {"base": ModelTeacher(base, 4096, 1.0), name: AdapterTeacher(LocalSnapshot(strong), "strong")}
    found = [says_what_it_is(server, *each, base, lanes, max_in_flight=1) for each in own.items()]
    assert np.abs(found[0] - found[1]).max() > 1e-2
    engine.retire(ref)


def test_students_learn_from_a_teacher_behind_it_as_from_the_model_itself(tmp_path, teaching):
    """Paid for answers too, so that students leave the teacher and are pulled back."""
    learned = []
    for place, keys in (("here", {}), ("there", {"url": teaching})):
        teacher = {"teacher": "base", "reward_weight": 1.0, **keys}
        training = {"batch_size": 4, "group_size": 4, "max_tokens": 60, "lr": 1e-2}
        file = written(tmp_path / f"{place}.toml", training, ["grpo"], seeds=[1, 2], max_steps=4, distillation=teacher)
        train(file, tmp_path / place)
        rows = [row for own in rows_of(tmp_path / place).values() for row in own]
        learned.append([row["distillation/reverse_kl"] for row in rows])
    assert len(learned[0]) == 2 * 4
    assert max(learned[0]) > 1e-3
    assert learned[1] == pytest.approx(learned[0], abs=2e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_versions_are_swapped_and_none_is_mistaken_for_another(base, lanes, engine, server, temperature):
    own = [weights(lanes, seed, rank, 2.0 * rank, 0.03) for seed, rank in enumerate((4, 8, 12, 16))]
    refs = [publish(engine, each, version) for version, each in enumerate(own)]
    asked = [request for ref in refs for request in requests(ref, 2, 2, temperature=temperature, max_tokens=24)]
    groups = engine.sample(asked)
    for version, each in enumerate(own):
        part = slice(2 * version, 2 * version + 2)
        assert apart(base, lanes, each, asked[part], groups[part]) < 1e-4
        assert apart(base, lanes, own[version - 1], asked[part], groups[part]) > 1e-2
    assert tokens(engine.sample(asked)) == tokens(groups)
    assert len(names_at(server)) == 4
    for ref in refs:
        engine.retire(ref)
    eventually(lambda: names_at(server) == [], 30)


def test_the_canary_passes(base, lanes, engine):
    settings = CanarySettings(16, 32.0, 1.0, 1e-4)
    found = Canary(base, lanes, settings).test(engine, engine.pool.servers[0])
    assert found.adapter < 1e-4 < 0.3 < found.effect


def test_what_is_sampled_does_not_depend_on_the_batch(lanes, engine):
    ref = publish(engine, weights(lanes, 1, 16, 32.0, 0.03))
    asked = requests(ref, 4, 4, max_tokens=24)
    assert tokens(engine.sample(asked, max_rows=1)) == tokens(engine.sample(asked))


def file_of(tmp_path: Path, server: dict[str, str], steps: int, problems: int = 0) -> Path:
    training = {"batch_size": 8, "group_size": 8, "max_tokens": 80, "lr": 2e-3}
    inference = {"engine": "vllm", "patience_s": 600.0, **server}
    head = {"seeds": [1], "max_steps": steps, "inference": inference}
    return written(tmp_path / "served.toml", training, ["grpo", "maxrl"], problems, **head)


def mismatches(directory: Path) -> list[float]:
    return [row["kl_sample_train_v2"] for own in rows_of(directory).values() for row in own]


PARSE = """
import sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # before 0.31
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
validate_parsed_serve_args(parsed)
print(parsed.max_model_len, parsed.kv_cache_memory_bytes, parsed.max_loras, parsed.hf_overrides, parsed.logprobs_mode)
"""


@real
@pytest.mark.parametrize("cards", [1, 2])
def test_its_parser_takes_the_command_that_is_composed_for_a_gpu(tmp_path, cards):
    inference = '[inference]\nengine = "vllm"\nlaunch_options = "--max-loras 3"\n'
    (tmp_path / "c.toml").write_text(f'[model]\nmodel = "Qwen/Qwen3-1.7B"\n{inference}')
    machine = Machine({str(card): 24 * GIB for card in range(cards)}, 64 * GIB, "0.31.0")
    plan = with_engine(Plan.of(load(tmp_path / "c.toml")), machine)
    command = shlex.split(plan.specs[0].config.inference.launch)
    options = command[command.index("serve") + 1 :]
    ran = subprocess.run([VLLM, "-c", PARSE, *options], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    cache = options[options.index("--kv-cache-memory-bytes") + 1] if cards == 1 else "None"
    assert ran.stdout.splitlines()[-1] == f"-1 {cache} 3 {{'head_dtype': 'float32'}} processed_logprobs"


@real
@pytest.mark.parametrize("released", ["weights", "kv"])
def test_it_sleeps_and_samples_the_same_when_it_is_awake_again(base, lanes, tmp_path, released):
    """vLLM on a CPU frees nothing and refuses --enable-sleep-mode, but it has the routes. It releases its cache alone
    only on a GPU: elsewhere it answers with an error, which becomes one line with what to type."""
    environment = server_environment(None, sleeps=True)
    made = ServerProcess(COMMAND, MODEL, tmp_path, environment, lambda text, level: print(text))
    try:
        eventually(lambda: answers(made.url), 400)
        with closing(engine_of(base, [made.url], tmp_path / "adapters", released=released)) as engine:
            ref = publish(engine, weights(lanes, 1))
            before = engine.sample(requests(ref))
            for _ in range(2):
                if released == "kv":
                    with pytest.raises(ServerFailed, match=r"cannot release_kv_cache_memory: .*start vLLM with"):
                        engine.forget_sequences()
                else:
                    engine.forget_sequences()
                    assert httpx.get(f"{made.url}/is_sleeping").json() == {"is_sleeping": True}
                after = engine.sample(requests(ref))
                assert httpx.get(f"{made.url}/is_sleeping").json() == {"is_sleeping": False}
                assert [[action.token_ids for action in group] for group in after] == [
                    [action.token_ids for action in group] for group in before
                ]
    finally:
        made.close()


@real
def test_the_doctor_starts_it_and_lets_it_sleep(tmp_path):
    file = tmp_path / "run.toml"
    command = COMMAND.replace("--max-lora-rank 16", "--max-lora-rank 32")
    file.write_text(document({"model": {"model": MODEL}, "inference": {"launch": command, "sleep": "weights"}}))
    result = run_cli("doctor", "--vllm", "--file", file)
    assert result.exit_code == 0, result.output
    starts, canary, sleeps, speed = result.output.splitlines()[1:]
    assert starts.startswith("PASS  starts             http://127.0.0.1:")
    assert canary.startswith("PASS  canary             canary: base within ")
    assert sleeps.startswith("PASS  sleeps             equal seeds give equal tokens (weights released), ")
    assert re.match(
        r"PASS  speed              5 adapters loaded in [\d.]+ s; \d+/\d+/\d+/\d+ tokens/s at 1/16/64/256", speed
    )


@real
def test_thirty_versions_pass_through_a_small_cache(base, lanes, tmp_path):
    """Two lanes with two live versions each, in the cache that the composed command would have for them; vLLM reads a
    version that was pushed out of its cache from its files again, and ends if they are gone."""
    command = COMMAND.replace("--max-loras 4", "--max-loras 2") + f" --max-cpu-loras {2 * 2 + 2}"
    made = ServerProcess(command, MODEL, tmp_path, server_environment(None), lambda text, level: print(text))
    try:
        eventually(lambda: answers(made.url), 400)
        with closing(engine_of(base, [made.url], tmp_path / "adapters")) as engine:
            for version in range(15):
                refs = [publish(engine, weights(lanes, 10 * version + lane), version, f"lane{lane}") for lane in (0, 1)]
                for ref in refs:
                    if version > 1:
                        engine.retire(PolicyRef(ref.run_id, version - 2))
                asked = [*requests(refs[0]), *requests(refs[1])]
                older = [each for ref in refs if version for each in requests(PolicyRef(ref.run_id, version - 1))]
                for group in engine.sample([*asked, *older]):
                    assert all(np.isfinite(action.logprobs_T).all() for action in group)
            assert len(list((tmp_path / "adapters").rglob("adapter_model.safetensors"))) <= 4
    finally:
        made.close()


@real
def test_two_lanes_learn_arithmetic(tmp_path, server):
    path = file_of(tmp_path, {"url": server}, 30, 128)
    train(path, tmp_path / "out")
    assert len(mismatches(tmp_path / "out")) == 60
    assert max(mismatches(tmp_path / "out")) < 1e-4
    for run in (tmp_path / "out/runs").iterdir():
        before, after = (row["eval/heldout/correct_rate"] for row in read_jsonl(run / "evals.jsonl"))
        assert after - before > 0.3


@real
@pytest.mark.parametrize("behind", [0, 1])
def test_two_conditions_and_two_seeds_end_in_a_report(tmp_path, server, behind):
    """Four adapters in one server; where rollouts may be behind, it samples while the update goes on."""
    sets = ["campaign.seeds=[1, 2]", f"training.max_off_policy_steps={behind}", "algorithm.correction='tis'"]
    path = file_of(tmp_path, {"url": server}, 4, 16)
    train(path, tmp_path / "out", *sets, "training.max_tokens=40")
    assert names_at(server) == []
    rows = rows_of(tmp_path / "out")
    assert [len(own) for own in rows.values()] == [4] * 4
    for own in rows.values():
        assert [row["off_policy_steps_max"] for row in own] == [min(step, behind) for step in range(4)]
        assert own[0]["kl_sample_train_v2"] < 1e-4
        assert not behind or sum(row["time/overlap"] for row in own) > 0
    assert (tmp_path / "out/report.html").is_file()
    assert len(read_json(tmp_path / "out/comparison.json")["conditions"]) == 2


def kill_in_the_middle(identity: Path) -> Heard:
    """Kills the launched server a moment after the first step, while the second is being sampled."""

    def kill(spec, count):
        if count == 1:
            threading.Timer(1.0, os.killpg, (read_json(identity)["pid"], signal.SIGKILL)).start()

    return Heard(kill)


LAUNCHES = {"standin": SERVE, "vllm": COMMAND}


@real
@pytest.mark.parametrize("kind", list(LAUNCHES))
def test_a_server_that_is_killed_in_the_middle_of_a_step(tmp_path, kind):
    path = file_of(tmp_path, {"launch": LAUNCHES[kind]}, 4)
    undisturbed = tmp_path / "undisturbed"
    train(path, undisturbed)
    told = kill_in_the_middle(tmp_path / "out/server.json")
    train(path, tmp_path / "out", observer=told)
    assert any("has died (signal 9) and is started again" in line for line in told.messages)
    assert max(mismatches(tmp_path / "out")) < 1e-4
    again = rows_of(tmp_path / "out")
    for run, own in rows_of(undisturbed).items():
        assert [row["mean_reward"] for row in own] == [row["mean_reward"] for row in again[run]]


@real
@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_two_workers_share_two_servers(tmp_path, executor):
    """Started by their controller, or by Ray beside its workers; each worker has two runs."""
    sets = ["campaign.seeds=[1,2]", "campaign.workers=2", "campaign.lanes=2", "backend.devices=cpu"]
    sets += ["inference.replicas=2", f"campaign.executor={executor}"]
    command = COMMAND if executor == "processes" else COMMAND.replace("127.0.0.1", "{host}")
    told, out = kill_in_the_middle(tmp_path / "out/server_1.json"), tmp_path / "out"
    with ExitStack() as stack:
        if executor == "ray":
            nodes = stack.enter_context(cluster_of({"num_cpus": 2}, {"num_cpus": 2}))
            sets.append(f"ray.address={nodes.address}")
        train(file_of(tmp_path, {"launch": command}, 3), out, *sets, observer=told)
    assert any("has died (signal 9) and is started again" in line for line in told.messages)
    assert len(mismatches(out)) == 12
    assert max(mismatches(out)) < 1e-4
    assert len([line for line in told.messages if line.startswith("canary")]) >= 2
    assert {run["state"] for run in read_json(out / "manifest.json")["runs"]} == {"done"}


@real
def test_a_stopped_campaign_goes_on(tmp_path, server):
    path = file_of(tmp_path, {"url": server}, 4)
    train(path, tmp_path / "out", observer=StopAfter(4), status=130)
    continue_training(tmp_path / "out")
    assert len(mismatches(tmp_path / "out")) == 8
    assert max(mismatches(tmp_path / "out")) < 1e-4
    assert names_at(server) == []
