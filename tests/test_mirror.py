"""The copy of a directory behind a URL: what is there at any moment can be gone on from, and is nobody else's."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from toycampaign import StopAfter
from typer.testing import CliRunner
from worker_cases import Heard, contents, planned

import retrain.campaign.running.mirror as mirror
from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.running.controller import execute
from retrain.campaign.running.lease import LEASE
from retrain.campaign.running.mirror import INDEX, Mirror, Mirroring, Store, fetch
from retrain.cli import app
from retrain.errors import ConfigError, LeaseLost, NotOurs, RetrainError, StorageError, UsageError
from retrain.files import ASIDE, read_json
from retrain.ownership import MARK, Owner, claim, owner_of, publish, remove
from retrain.record.observer import NullObserver


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(mirror, "PAUSE_SECONDS", 0.01)


def a_run(folder: Path) -> Owner:
    """A directory with records and one checkpoint."""
    owner = claim(folder)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (folder / "emergence").mkdir()
    (folder / "emergence/steps.jsonl").write_text("{}\n")
    a_checkpoint(folder, owner, 1)
    return owner


def a_checkpoint(folder: Path, owner: Owner, step: int) -> None:
    place = f"checkpoints/step_{step:06}"
    aside = folder / f".{step}.1{ASIDE}"
    aside.mkdir()
    (aside / "state.json").write_text(json.dumps({"step": step}))
    (folder / "checkpoints").mkdir(exist_ok=True)
    publish(aside, folder / place, owner.at(place))


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock", LEASE, INDEX)
    }


def copied(folder: Path) -> Mirror:
    """A copy beside the directory."""
    made = Mirror(Store(f"file://{folder}_copy"), ".", folder)
    made.claim()
    return made


def test_the_copy_is_what_is_there(tmp_path):
    folder = tmp_path / "run"
    owner = a_run(folder)
    made = copied(folder)
    made.push()
    assert files(tmp_path / "run_copy") == files(folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 1}\n')
    a_checkpoint(folder, owner, 2)
    remove(folder / "checkpoints/step_000001", owner.at("checkpoints/step_000001"))
    (folder / "emergence/steps.jsonl").unlink()
    made.push()
    assert files(tmp_path / "run_copy") == files(folder)


def test_what_is_not_retrains_and_what_is_half_written_stays_here(tmp_path):
    folder = tmp_path / "run"
    a_run(folder)
    for name in (
        "mine.txt",
        LEASE,
        "workers/worker_1.log",
        f".config.json.7{ASIDE}",
        f"checkpoints/.x.7{ASIDE}/state.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not for others")
    (folder / "config.json").symlink_to(tmp_path / "elsewhere")
    copied(folder).push()
    there = files(tmp_path / "run_copy")
    assert sorted(there) == [
        "checkpoints/step_000001/retrain.json", "checkpoints/step_000001/state.json", "emergence/steps.jsonl",
        "metrics.jsonl", "retrain.json",
    ]  # fmt: skip


class Recording(Store):
    """Keeps what is done in its order; ``fail`` is asked before each."""

    def __init__(self, url, fail=lambda name: False):
        super().__init__(url)
        self.done, self.fail = [], fail

    def write(self, name, data):
        self._do("write", name)
        super().write(name, data)

    def upload(self, name, source):
        self._do("upload", name)
        super().upload(name, source)

    def remove(self, name):
        self._do("remove", name)
        super().remove(name)

    def _do(self, what, name):
        if self.fail(name):
            raise StorageError(name, "no network")
        self.done.append((what, name))


def test_marks_come_last_and_go_first_and_the_index_says_no_more_than_there_is(tmp_path):
    folder = tmp_path / "run"
    owner = a_run(folder)
    store = Recording(f"file://{tmp_path}/copy")
    made = Mirror(store, ".", folder)
    made.claim()
    made.push(b"{}")
    order = [name for _, name in store.done]
    assert order[:2] == [MARK, INDEX]
    steps = [order.index(name) for name in (
        "metrics.jsonl", "checkpoints/step_000001/state.json", "checkpoints/step_000001/retrain.json", "manifest.json"
    )]  # fmt: skip
    assert steps == sorted(steps)
    assert order[-1] == INDEX
    store.done.clear()
    made.push(b"{}")
    assert store.done == []  # nothing has changed
    made.push(b'{"runs": []}')
    assert store.done == [("write", "manifest.json")]
    store.done.clear()
    a_checkpoint(folder, owner, 2)
    remove(folder / "checkpoints/step_000001", owner.at("checkpoints/step_000001"))
    made.push()
    assert store.done == [
        ("upload", "checkpoints/step_000002/state.json"), ("upload", "checkpoints/step_000002/retrain.json"),
        ("write", INDEX), ("remove", "checkpoints/step_000001/retrain.json"),
        ("remove", "checkpoints/step_000001/state.json"), ("write", INDEX),
    ]  # fmt: skip


def test_records_are_at_least_as_long_as_the_checkpoints_need(tmp_path, monkeypatch):
    """A step that ends while the directory is looked at: its checkpoint is not seen before its row."""
    folder = tmp_path / "run"
    owner = a_run(folder)
    made = copied(folder)
    look = mirror.mark_of

    def step(directory):
        found = look(directory)
        if directory.name == "checkpoints" and not (folder / "checkpoints/step_000002").exists():
            with open(folder / "metrics.jsonl", "a") as file:
                file.write('{"step": 1}\n')
            a_checkpoint(folder, owner, 2)
        return found

    monkeypatch.setattr(mirror, "mark_of", step)
    made.push()
    there = files(tmp_path / "run_copy")
    assert "checkpoints/step_000002/state.json" in there
    assert there["metrics.jsonl"].count(b"\n") == 2


@pytest.mark.parametrize("number", range(9))
def test_a_copy_that_broke_off_is_whole_when_brought(tmp_path, number):
    """After any number of uploads the network is gone: what is brought has whole checkpoints, and can be copied on."""
    folder = tmp_path / "run"
    owner = a_run(folder)
    copied(folder).push()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 1}\n')
    a_checkpoint(folder, owner, 2)
    remove(folder / "checkpoints/step_000001", owner.at("checkpoints/step_000001"))
    left = [number]

    def fail(name):
        left[0] -= 1
        return left[0] < 0

    made = Mirror(Recording(f"file://{folder}_copy", fail), ".", folder)
    try:
        made.claim()
        made.push(b'{"runs": []}')
    except StorageError:
        pass
    else:
        assert number == 8
    brought = tmp_path / "brought"
    Mirror(Store(f"file://{folder}_copy"), ".", brought).pull(owner)
    steps = sorted((brought / "checkpoints").iterdir())
    assert steps
    for step in steps:
        assert json.loads((step / "state.json").read_text())["step"] == int(step.name[5:])
        assert owner_of(step) == owner.at(f"checkpoints/{step.name}")
    rows = (brought / "metrics.jsonl").read_text().count("\n")
    assert rows >= int(steps[-1].name[5:])
    again = Mirror(Store(f"file://{folder}_copy"), ".", folder)
    again.claim()
    again.push()
    there = files(tmp_path / "run_copy")
    assert {name: data for name, data in there.items() if name != "manifest.json"} == files(folder)


def test_what_is_brought_replaces_what_is_old_and_removes_what_is_not_there(tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    owner = a_run(folder)
    made = copied(folder)
    made.push()
    shutil.copytree(folder, other)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 1}\n')
    made.push()
    a_checkpoint(other, owner, 7)
    (other / "evals.jsonl").write_text("{}\n")
    (other / "mine.txt").write_text("mine")
    Mirror(made.store, ".", other).pull(owner)
    assert files(other) == files(folder) | {"mine.txt": b"mine"}
    time = (other / "metrics.jsonl").stat().st_mtime_ns
    Mirror(made.store, ".", other).pull(owner)  # nothing is brought twice
    assert (other / "metrics.jsonl").stat().st_mtime_ns == time == (folder / "metrics.jsonl").stat().st_mtime_ns


def test_without_a_copy_nothing_is_brought(tmp_path):
    folder = tmp_path / "run"
    owner = a_run(folder)
    here = files(folder)
    Mirror(Store(f"file://{tmp_path}/nothing"), ".", folder).pull(owner)
    assert files(folder) == here
    store = Store(f"file://{tmp_path}/copy")
    store.write(INDEX, b'{"token": "of a process that was killed then", "files": {}}')
    Mirror(store, ".", folder).pull(owner)
    assert files(folder) == {MARK: here[MARK]}


def test_nothing_of_others_is_replaced(tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    a_run(folder)
    a_run(other)
    copied(folder).push()
    with pytest.raises(NotOurs, match="is the copy of another directory"):
        Mirror(Store(f"file://{tmp_path}/run_copy"), ".", other).claim()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("words")
    with pytest.raises(NotOurs, match="holds what retrain did not copy there"):
        Mirror(Store(f"file://{tmp_path}/full"), ".", folder).claim()
    assert files(tmp_path / "full") == {"thesis.tex": b"words"}
    with pytest.raises(NotOurs):
        Mirror(Store(f"file://{tmp_path}/run_copy"), ".", other).pull(Owner("another"))


def test_who_was_followed_by_another_stops(tmp_path):
    folder = tmp_path / "run"
    a_run(folder)
    first, second = copied(folder), copied(folder)
    (folder / "metrics.jsonl").write_text('{"step": "second"}\n')
    second.push()
    (folder / "metrics.jsonl").write_text('{"step": "of the first"}\n')
    with pytest.raises(LeaseLost, match="another process has taken over"):
        first.push()
    assert b"second" in (tmp_path / "run_copy/metrics.jsonl").read_bytes()


def test_a_campaign_whose_copy_was_taken_over_stops(tmp_path, world, monkeypatch):
    """Somebody goes on from the copy while this process still trains, as after a pause of its machine."""
    monkeypatch.setattr(mirror, "PERIOD_SECONDS", 0.01)
    url = f"file://{tmp_path}/store"

    def take(spec, count):
        if count == 3:
            fetch(url, tmp_path / "other")
            Mirror(Store(url), ".", tmp_path / "other").claim()
        if count > 3:
            time.sleep(0.1)

    heard = Heard(take)
    with pytest.raises(LeaseLost):
        execute(planned(world, tmp_path / "out", [f"logging.mirror={url}"]), heard)
    assert heard.steps < 24


def test_a_store_that_does_not_answer_is_told_once_and_tried_again(tmp_path):
    folder = tmp_path / "run"
    a_run(folder)
    broken, heard = [False], []
    store = Recording(f"file://{tmp_path}/copy", lambda name: broken[0])
    one = Mirror(store, ".", folder)
    with Mirroring(lambda: [one], lambda text, level: heard.append((text, level)), period=0.01) as keeping:
        broken[0] = True
        (folder / "evals.jsonl").write_text("{}\n")
        while len(heard) < 1:
            os.sched_yield()
        with pytest.raises(StorageError, match="no network"):
            keeping.push()
        assert len(heard) == 1
        broken[0] = False
    assert "no network" in heard[0][0]
    assert heard[0][1] == "warning"
    assert files(tmp_path / "copy") == files(folder)


class Gone(Store):
    """Does not answer once ``broken`` is set."""

    broken = False

    def write(self, name, data):
        if Gone.broken:
            raise StorageError(name, "no network")
        super().write(name, data)


def test_a_copy_that_fails_at_the_end_says_how_to_go_on(tmp_path, world, monkeypatch):
    monkeypatch.setattr(mirror, "Store", Gone)
    monkeypatch.setattr(Gone, "broken", False)
    out, url = tmp_path / "out", f"file://{tmp_path}/store"
    one = [f"logging.mirror={url}", "campaign.seeds=[1]"]
    with pytest.raises(RetrainError, match=f"no network\nAll is in {out}.*retrain resume {out}$") as caught:
        execute(planned(world, out, one, steps=1), Heard(lambda spec, count: setattr(Gone, "broken", True)))
    assert caught.value.exit_status == 1
    Gone.broken = False
    assert execute(read_plan(out), NullObserver()).exit_status == 0
    assert files(tmp_path / "store").keys() == files(out).keys()


def test_a_store_that_fails_at_the_first_copy_is_not_another_process(tmp_path):
    folder = tmp_path / "run"
    a_run(folder)
    for name in (MARK, INDEX):
        failing = [name]
        store = Recording(f"file://{tmp_path}/{name}", lambda name, failing=failing: name in failing)
        made = Mirror(store, ".", folder)
        with pytest.raises(StorageError, match="no network"):
            made.push()
        failing.clear()
        made.push()
        assert files(tmp_path / name) == files(folder)


@pytest.mark.parametrize("broken", [False, True])
def test_what_has_happened_is_told_whether_or_not_it_can_be_copied(tmp_path, broken):
    folder, heard = tmp_path / "run", []
    a_run(folder)
    store = Recording(f"file://{tmp_path}/copy", lambda name: broken and (folder / "evals.jsonl").exists())
    one = Mirror(store, ".", folder)

    def fails():
        with Mirroring(lambda: [one], lambda *told: heard.append(told)):
            (folder / "evals.jsonl").write_text("{}\n")
            raise ValueError("the run's own")

    with pytest.raises(ValueError, match="the run's own"):
        fails()
    assert (tmp_path / "copy/evals.jsonl").exists() is not broken
    assert ["no network" in text for text, _ in heard] == [True] * broken


def test_a_campaign_goes_on_from_its_copy_on_another_machine(tmp_path, world):
    """Stopped in the middle, its directory lost, brought from the copy and continued: as if nothing had been."""
    url = f"file://{tmp_path}/store"
    assert execute(planned(world, tmp_path / "whole"), NullObserver()).exit_status == 0
    out = tmp_path / "out"
    stopped = execute(planned(world, out, [f"logging.mirror={url}"]), StopAfter(8))
    assert stopped.exit_status == 130
    assert files(tmp_path / "store").keys() == files(out).keys()
    here = files(out)
    shutil.rmtree(out)
    fetch(url, out)
    assert files(out) == here
    assert execute(read_plan(out), NullObserver()).exit_status == 0
    assert differing_files(contents(out), contents(tmp_path / "whole")) == []
    assert files(tmp_path / "store").keys() == files(out).keys()
    assert (tmp_path / "store/manifest.json").read_bytes() == (out / "manifest.json").read_bytes()


def differing_files(mine: dict, reference: dict) -> list[str]:
    return sorted(name for name in {*mine, *reference} if mine.get(name, "absent") != reference.get(name, "absent"))


def test_the_command_line_goes_on_from_a_url(tmp_path, world, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/store"
    out = tmp_path / "out"
    assert execute(planned(world, out, [f"logging.mirror={url}"]), StopAfter(20)).exit_status == 130
    result = CliRunner().invoke(app, ["resume", url, "--plain"])
    assert result.exit_code == 0, result.output
    assert f"{url} is in logs/store now" in result.output
    runs = read_json(tmp_path / "logs/store/manifest.json")["runs"]
    assert [(run["state"], run["step"]) for run in runs] == [("done", 3)] * 8
    again = CliRunner().invoke(app, ["resume", url, "--plain"])
    assert (again.exit_code, "type: retrain resume logs/store" in again.output) == (2, True)
    nothing = CliRunner().invoke(app, ["resume", f"file://{tmp_path}/nothing"])
    assert (nothing.exit_code, "holds no copy of a run or campaign" in nothing.output) == (2, True)
    here = CliRunner().invoke(app, ["resume", str(out), "--out", "x"])
    assert (here.exit_code, "leave out --out" in here.output) == (2, True)


def test_a_url_that_cannot_be_opened_is_told_before_anything_is_done(tmp_path, world):
    with pytest.raises(ConfigError, match=r"logging.mirror.*is no URL"):
        planned(world, tmp_path / "out", ["logging.mirror=results"])
    with pytest.raises(UsageError, match="cannot be opened"):
        Store("nosuch://bucket/x")
    heard = Heard()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("words")
    with pytest.raises(NotOurs):
        execute(planned(world, tmp_path / "out", [f"logging.mirror=file://{tmp_path}/full"]), heard)
    assert heard.steps == 0


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of a server that speaks S3, on this machine."""
    server_of = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": host,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="lab")
    yield client
    server.stop()


def test_s3(tmp_path, bucket):
    """The same through S3's own protocol, whose uploads are seen when they are complete."""
    folder = tmp_path / "run"
    owner = a_run(folder)
    with pytest.raises(StorageError, match="nobucket"):
        Mirror(Store("s3://nobucket/x"), ".", folder).claim()
    store = Store("s3://lab/experiments/gtpo/")
    made = Mirror(store, ".", folder)
    made.claim()
    made.push()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 1}\n')
    a_checkpoint(folder, owner, 2)
    remove(folder / "checkpoints/step_000001", owner.at("checkpoints/step_000001"))
    made.push()
    keys = [each["Key"] for each in bucket.list_objects_v2(Bucket="lab")["Contents"]]
    assert {key.removeprefix("experiments/gtpo/") for key in keys} == {*files(folder), INDEX}
    brought = tmp_path / "brought"
    Mirror(Store("s3://lab/experiments/gtpo"), ".", brought).pull(owner)
    assert files(brought) == files(folder)
    second = Mirror(Store("s3://lab/experiments/gtpo"), ".", brought)
    second.claim()
    with pytest.raises(LeaseLost):
        made.push()
    bucket.put_object(Bucket="lab", Key="other/thesis.tex", Body=b"words")
    with pytest.raises(NotOurs):
        Mirror(Store("s3://lab/other"), ".", folder).claim()
