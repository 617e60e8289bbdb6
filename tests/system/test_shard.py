import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.campaigns import Heard, StopAfter, campaign, contents, continue_training, train
from helpers.models import campaign_head
from helpers.servers import StandIn

from retrain.campaign.controller import execute
from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.campaign.running import team
from retrain.config import load
from retrain.errors import RetrainError, UsageError
from retrain.files import read_json, read_jsonl
from retrain.records.observer import NullObserver
from tests.system.clusters import ranks_of

TOML = (
    campaign_head(("grpo", "none"), seeds=[1], max_steps=5, lanes=2) + "kl_coef = 0.01\n"
    '[[campaign.conditions]]\nadvantage_mode = "gae"\ntransform_mode = "none"\nnum_iterations = 2\n'
    "critic = { lora_rank = 2 }\n[model]\nlora_rank = 4\n[training]\nbatch_size = 8\ngroup_size = 8\nmax_tokens = 16\n"
    "lr = 0.002\nsave_every = 1\neval_every = 1\nmicro_batch_tokens = 400\n"
    "[evaluation]\nproblems = 40\n[squeeze]\nenabled = false\n"
)
"""Two lanes, one with a reference model, one with a critic and several updates; 128 rollouts a step, which decode in
several pieces, and more micro-batches than ranks."""
EQUAL = 1e-4
"""Relative difference of metrics and weights of a run between numbers of ranks that is rounding, in fp32."""
SMALL = 0.01
"""Numbers below are compared with this one: some metrics measure rounding."""
INTERRUPTED = "interrupted; everything up to the last finished step is saved. Type: retrain resume"
pytestmark = pytest.mark.filterwarnings("default:another token was drawn")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def on_ranks(count: int, shard: str = "dp") -> list[str]:
    return [f'backend.shard="{shard}"', f"backend.ranks={count}"] if count > 1 else ['backend.shard="none"']


def planned(out: Path, sets: list[str]) -> Plan:
    file = out.parent / f"{out.name}.toml"
    file.write_text(TOML)
    return check(Plan.of(load(file, sets), out))


def left_by(out: Path) -> dict[str, Any]:
    """Return the files that do not depend on the clock or on the number of ranks."""
    files = {name: value for name, value in contents(out).items() if not name.endswith("config.json")}
    return {name.removeprefix("runs/"): value for name, value in files.items() if name != "cohorts"}


def trained(out: Path, *sets: str) -> dict[str, Any]:
    assert execute(planned(out, [*sets]), NullObserver()).exit_status == 0
    return left_by(out)


def distance(one: Any, other: Any) -> float:
    """The largest relative difference of numbers, or of norms of tensors; infinite where anything else differs."""
    if isinstance(one, np.ndarray):
        return 0.0 if np.array_equal(one, other) else float(np.linalg.norm(one - other) / np.linalg.norm(other))
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], bytes):
        return max(distance(*pair) for pair in zip(_tensors(one), _tensors(other), strict=True))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((distance(value, other[key]) for key, value in one.items()), default=0.0)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return max((distance(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if one == other:
        return 0.0
    if isinstance(one, float) and isinstance(other, float | int) and not isinstance(other, bool):
        return abs(one - other) / max(abs(one), abs(other), SMALL)
    return math.inf


def _tensors(file: tuple[dict[str, Any], bytes]) -> list[list[Any]]:
    """Name, type and values of every tensor of a safetensors file; bytes of what is not F32. Left out are texts with
    numbers, which other files hold too, and where these begin."""
    rows = []
    for name, facts in sorted((name, facts) for name, facts in file[0].items() if name != "__metadata__"):
        data = file[1][slice(*facts["data_offsets"])]
        values = np.frombuffer(data, np.float32).astype(np.float64) if facts["dtype"] == "F32" else data
        if not name.startswith("rollout"):
            rows.append([name, facts["dtype"], values])
    return rows


def tokens_that_differ(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the files of recorded tokens in which another token was drawn."""
    names = [name for name in one if Path(name).name.startswith("tokens_")]
    ids = [{name: dict(row[::2] for row in _tensors(left[name]))["ids"] for name in names} for left in (one, other)]
    return [name for name in names if ids[0][name] != ids[1][name]]


def assert_equal_but_for_rounding(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Fail where numbers differ by more than rounding, unless another token was drawn, which is reported."""
    if drawn := tokens_that_differ(one, other):
        warnings.warn(f"another token was drawn, so that the runs part: {', '.join(drawn)}", stacklevel=2)
        return
    assert distance(one, other) <= EQUAL


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shard")


@pytest.fixture(scope="module")
def one(folder) -> dict:
    return trained(folder / "one")


@pytest.fixture(scope="module")
def two(folder) -> dict:
    return trained(folder / "two", *on_ranks(2))


@pytest.fixture(scope="module")
def stopped(folder) -> Path:
    """The directory of two ranks that were asked to stop in the second step."""
    assert execute(planned(folder / "stopped", on_ranks(2)), StopAfter(3)).exit_status == 130
    return folder / "stopped"


def resumed(stopped: Path, name: str, *sets: str) -> dict[str, Any]:
    """What a copy leaves that goes on with these settings; nothing has to be accepted."""
    out = stopped.with_name(name)
    shutil.copytree(stopped, out)
    continue_training(out, *sets)
    return left_by(out)


def test_five_steps_on_ranks_are_those_of_one_process_but_for_rounding(one, two, folder):
    """Whether they hold all of the base or shards of it, which changes no byte."""
    assert_equal_but_for_rounding(two, one)
    for name, count in (("one", 1), ("two", 2)):
        configs = [read_json(path) for path in (folder / name / "runs").glob("*/config.json")]
        assert [config["built"]["ranks"] for config in configs] == [count, count]
    assert trained(folder / "sharded", *on_ranks(2, "fsdp2")) == two
    assert trained(folder / "alone", 'backend.shard="dp"', "backend.ranks=1") == one


def test_the_same_number_of_ranks_leaves_the_same_bytes(two, one, folder):
    assert trained(folder / "two_again", *on_ranks(2)) == two
    three = trained(folder / "three", *on_ranks(3))
    assert_equal_but_for_rounding(three, one)
    assert trained(folder / "three_sharded", *on_ranks(3, "fsdp2")) == three


def test_stopped_ranks_have_saved_their_step_and_go_on_on_any_number_of_ranks(stopped, one, two):
    assert {len(read_jsonl(run / "metrics.jsonl")) for run in (stopped / "runs").iterdir()} == {2}
    assert resumed(stopped, "again") == two
    for ranks in (1, 3):
        assert_equal_but_for_rounding(resumed(stopped, f"on_{ranks}", *on_ranks(ranks)), one)
        for log in (stopped.with_name(f"on_{ranks}") / "runs").glob("*/run.log"):
            assert "continues at step 2" in log.read_text()


def test_a_run_goes_from_shards_to_whole_bases_and_back(folder, two, stopped):
    out = folder / "halted"
    assert execute(planned(out, on_ranks(2, "fsdp2")), StopAfter(3)).exit_status == 130
    assert {len(read_jsonl(run / "metrics.jsonl")) for run in (out / "runs").iterdir()} == {2}
    assert resumed(out, "halted_again") == two
    assert resumed(out, "halted_whole", 'backend.shard="dp"') == two
    assert resumed(stopped, "stopped_sharded", 'backend.shard="fsdp2"') == two
    assert_equal_but_for_rounding(resumed(out, "halted_on_3", *on_ranks(3, "fsdp2")), two)


@pytest.mark.parametrize("shard", ["dp", "fsdp2"])
def test_a_rank_that_dies_ends_the_others_within_30_s_and_costs_steps_alone(folder, two, shard):
    started, killed = [], []

    def kill(spec, count):
        if count == 3:
            started.extend(ranks_of(os.getpid()))
            killed.append(time.monotonic())
            os.kill(started[0], signal.SIGKILL)

    killer = Heard(kill)
    out = folder / f"killed_{shard}"
    with pytest.raises(RetrainError) as raised:
        execute(planned(out, on_ranks(3, shard)), killer)
    assert raised.value.exit_status == 1
    dead = f"rank 1 (process {started[0]}) was ended by SIGKILL, as when memory runs out"
    assert dead in str(raised.value)
    assert f"See what ended it, then type: retrain resume {out}" in str(raised.value)
    assert time.monotonic() - killed[0] < 30
    assert [psutil.pid_exists(rank) for rank in started] == [False, False]
    assert {run["state"] for run in read_json(out / "manifest.json")["runs"]} == {"interrupted"}
    continue_training(out, *on_ranks(2, shard))
    assert_equal_but_for_rounding(left_by(out), two)


def started_here(out: Path, before: tuple[str, ...] = (), shard: str = "dp") -> subprocess.Popen[str]:
    """``retrain train`` of this campaign in a process group of its own, ``before`` it words for Python; without them
    it starts two ranks itself."""
    planned(out, [])
    words = [*before, "-m", "retrain", "train", str(out.parent / f"{out.name}.toml"), "--out", str(out), "--verbose"]
    sets = "campaign.max_steps=5" if before else "backend.ranks=2"
    return subprocess.Popen(
        [sys.executable, *words, "--set", f'backend.shard="{shard}"', "--set", sets],
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"},  # on a busy machine a step takes its time
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def until_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any(line.startswith("step ") for line in process.stdout), "it ended before"


@pytest.mark.parametrize("shard", ["dp", "fsdp2"])
def test_torchrun_starts_the_ranks(folder, two, shard):
    out = folder / f"torchrun_{shard}"
    process = started_here(out, TORCHRUN, shard)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert said.count(f"directory   {out}") == 1
    assert left_by(out) == two
    again = started_here(out, TORCHRUN, shard)  # nothing is left to do, and nobody waits for anybody
    said, _ = again.communicate(timeout=400)
    assert again.returncode == 0, said
    assert f"every run in {out} is done" in said


@pytest.mark.parametrize(("before", "shard"), [(TORCHRUN, "dp"), ((), "dp"), ((), "fsdp2")])
def test_ctrl_c_saves_and_says_so_once(folder, two, before, shard):
    out = folder / f"interrupted_{len(before)}_{shard}"
    process = started_here(out, before, shard)
    until_step(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to torchrun and to both ranks
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 130 if not before else process.returncode != 0
    assert said.count(INTERRUPTED) == 1, said
    continue_training(out, *on_ranks(2) if before else ())
    assert left_by(out) == two


def test_ranks_end_with_rank_0(folder):
    process = started_here(folder / "headless")
    until_step(process)
    (other,) = psutil.Process(process.pid).children()
    process.kill()
    said, _ = process.communicate(timeout=100)  # until nobody writes there any more
    assert "rank 1 ends: another rank is gone" in said
    psutil.wait_procs([other], timeout=20)
    assert not other.is_running()


@pytest.mark.filterwarnings("ignore:.*websockets.*:DeprecationWarning")
def test_servers_are_asked_by_rank_0_alone(tmp_path, model):
    rows, counts = [], []
    quiet = ["squeeze.enabled=false", "evaluation.problems=4", "training.eval_every=1"]
    for name, sets in (("alone", on_ranks(1)), ("together", on_ranks(2)), ("sharded", on_ranks(2, "fsdp2"))):
        server = StandIn(model)
        served = ["inference.engine='vllm'", f"inference.url='{server.url}'", "training.micro_batch_tokens=40"]
        try:
            train(campaign(tmp_path, model, steps=2), tmp_path / name, *quiet, *served, *sets)
        finally:
            server.close()
        counts.append(len(server.asked))
        rows.append({key: rows for key, rows in left_by(tmp_path / name).items() if "metrics" in key})
    assert counts[0] > 0
    assert counts == [counts[0]] * 3
    apart = max(distance(each, rows[0]) for each in rows)
    assert apart < 1e-3  # what is sampled depends on what reaches the server together


def test_what_torchrun_has_started_has_to_be_what_is_asked_for(tmp_path, monkeypatch, gpus):
    there = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r'started 2 process\(es\), .* type --set backend.shard="dp"'):
        execute(planned(tmp_path / "out", []), NullObserver())
    with pytest.raises(UsageError, match=r'of executor = "processes" start their ranks themselves: start retrain with'):
        execute(planned(tmp_path / "out", [*on_ranks(2), "campaign.executor=processes"]), NullObserver())
    assert not (tmp_path / "out").exists()
    config = planned(tmp_path / "out", on_ranks(3)).specs[0].config
    with pytest.raises(UsageError, match=r"ranks = 3, and torchrun has started 2: type --set backend\.ranks=2"):
        team.Team(config).ranks()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    gpus.count = 2
    with pytest.raises(UsageError, match=r"3 ranks, .* means 2 GPU\(s\).*type --set backend\.ranks=2"):
        team.Team(config).ranks()
