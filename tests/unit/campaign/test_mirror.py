from __future__ import annotations

import json
import shutil
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import fsspec
import pytest
from helpers.campaigns import StopAfter, contents, continue_training, differing, eventually, files_of, planned, run_cli

from retrain.campaign.controller import execute
from retrain.errors import ConfigError, LeaseLost, NotOurs, RetrainError, StorageError, UsageError
from retrain.files import ASIDE, read_json
from retrain.ownership import MARK, Owner, claim, owner_of, publish, remove
from retrain.records.observer import NullObserver
from retrain.util.mirror import INDEX, Mirror, uploading
from retrain.util.session import LEASE

files = partial(files_of, without={".lock", LEASE, INDEX})


def add_checkpoint(folder: Path, owner: Owner, step: int) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    place = f"checkpoints/step_{step:06}"
    aside = folder / f".{step}.1{ASIDE}"
    aside.mkdir()
    (aside / "state.json").write_text(json.dumps({"step": step}))
    (folder / "checkpoints").mkdir(exist_ok=True)
    publish(aside, folder / place, owner.at(place))


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's directory with records, one checkpoint and a manifest."""
    folder = tmp_path / "run"
    add_checkpoint(folder, claim(folder), 1)
    (folder / "manifest.json").write_text('{"runs": []}')
    return folder


def train_on(run: Path) -> None:
    """Add a checkpoint, remove the one before."""
    owner = owner_of(run)
    add_checkpoint(run, owner, 2)
    remove(run / "checkpoints/step_000001", owner.at("checkpoints/step_000001"))
    (run / "manifest.json").write_text('{"runs": [1]}')


def copied(run: Path, url: str) -> Mirror:
    mirror = Mirror(url, run)
    mirror.claim()
    mirror.push()
    return mirror


def fetched(url: str, folder: Path) -> dict[str, bytes]:
    Mirror(url, folder).fetch()
    return files(folder)


@pytest.fixture
def flaky(run, tmp_path) -> Flaky:
    """A mirror of the run at ``tmp_path``/store whose network can fail."""
    return Flaky(Mirror(f"file://{tmp_path}/store", run))


class Flaky:
    """A store that records what is written and removed, and fails these while ``broken``."""

    def __init__(self, mirror: Mirror):
        self.mirror, self.store, self.broken, self.done = mirror, mirror.store, lambda: False, []
        mirror.store = self

    def __getattr__(self, name):
        method = getattr(self.store, name)
        if name not in ("pipe_file", "put_file", "rm_file"):
            return method

        def call(*arguments):
            if self.broken():
                raise ConnectionError("no network")
            self.done.append((name[:2], arguments[name == "put_file"].removesuffix(ASIDE)))
            method(*arguments)

        return call


@pytest.fixture(scope="module")
def bucket():
    """A bucket of a server that speaks S3, on this machine."""
    pytest.importorskip("s3fs")
    moto, boto3 = pytest.importorskip("moto.server"), pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}", "NO_PROXY": host}.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="lab")
        yield "s3://lab"
    server.stop()


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"


def test_the_copy_follows_the_directory(run, url, tmp_path):
    mirror = copied(run, url)
    assert fetched(url, tmp_path / "first") == files(run)
    train_on(run)
    mirror.push()
    assert fetched(url, tmp_path / "second") == files(run)
    assert not mirror.store.exists("checkpoints/step_000001/state.json")


def test_there_is_one_writer(run, url):
    first, second = copied(run, url), copied(run, url)
    second.push()
    train_on(run)
    with pytest.raises(LeaseLost, match="another process writes"):
        first.push()
    assert not second.store.exists("checkpoints/step_000002/state.json")


def test_files_of_others_are_refused(run, url, tmp_path):
    fs, root = fsspec.url_to_fs(url)
    fs.makedirs(f"{root}/full")
    fs.pipe_file(f"{root}/full/thesis.tex", b"words")
    with pytest.raises(NotOurs, match="is not a copy of"):
        Mirror(f"{url}/full", run).claim()
    copied(run, f"{url}/copy")
    claim(tmp_path / "other")
    with pytest.raises(NotOurs, match="is not a copy of"):
        Mirror(f"{url}/copy", tmp_path / "other").claim()


def test_a_bucket_that_does_not_exist(run, bucket):
    with pytest.raises(StorageError, match="nobucket"):
        Mirror("s3://nobucket/x", run).claim()


def test_records_come_before_checkpoints_before_the_manifest_before_the_index(run, flaky):
    flaky.mirror.claim()
    flaky.mirror.push()
    checkpoint = ["checkpoints/step_000001/state.json", "checkpoints/step_000001/retrain.json"]
    order = [INDEX, "metrics.jsonl", MARK, *checkpoint, "manifest.json", INDEX]
    flaky.mirror.push()  # nothing has changed
    assert [name for _, name in flaky.done] == order
    train_on(run)
    flaky.mirror.push()
    assert flaky.done[-3] == ("pi", INDEX)
    assert sorted(flaky.done[-2:]) == [("rm", name) for name in sorted(checkpoint)]


def test_a_checkpoint_that_is_being_replaced_is_not_in_the_index(run, tmp_path):
    mirror, owner = copied(run, f"file://{tmp_path}/store"), owner_of(run)
    remove(run / "checkpoints/step_000001", owner.at("checkpoints/step_000001"))
    add_checkpoint(run, owner, 1)
    store = Flaky(mirror)
    store.broken = lambda: len(store.done) == 3
    with pytest.raises(StorageError):
        mirror.push()
    assert not [name for name in fetched(mirror.url, tmp_path / "fetched") if "checkpoints" in name]


def test_only_what_retrain_has_completed_is_uploaded(run, tmp_path):
    expected = files(run)
    claim(run / "squeeze/continued")  # has another owner
    for name in ("mine.txt", LEASE, "workers/worker_1.log", f".config.json.7{ASIDE}", f"checkpoints/.x.7{ASIDE}/a"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("not for others")
    (run / "config.json").symlink_to(tmp_path / "elsewhere")
    copied(run, f"file://{tmp_path}/store")
    assert files(tmp_path / "store") == expected


@pytest.mark.parametrize("number", range(9))
def test_an_interrupted_upload_leaves_a_copy_to_resume_from(run, flaky, tmp_path, number):
    """The network fails after any number of writes; a later upload completes the copy."""
    url = flaky.mirror.url
    copied(run, url)
    train_on(run)
    flaky.broken = lambda: len(flaky.done) == number
    with pytest.raises(StorageError, match="no network") if number < 8 else nullcontext():
        flaky.mirror.claim()
        flaky.mirror.push()
    there = fetched(url, tmp_path / "fetched")
    steps = sorted((tmp_path / "fetched/checkpoints").iterdir())
    assert steps
    assert all(owner_of(step) == owner_of(run).at(f"checkpoints/{step.name}") for step in steps)
    assert there["metrics.jsonl"].count(b"\n") >= read_json(steps[-1] / "state.json")["step"]
    copied(run, url)
    assert fetched(url, tmp_path / "completed") == files(run)


def ignore(*message: str) -> None:
    pass


def test_a_store_that_fails_is_reported_once_and_gets_everything_when_it_answers(run, flaky, tmp_path):
    messages: list[tuple[str, str]] = []
    with uploading(flaky.mirror, lambda *message: messages.append(message), ignore, period=0.01):
        flaky.broken = lambda: True
        (run / "evals.jsonl").write_text("{}\n")
        eventually(lambda: messages)
        train_on(run)
        flaky.broken = lambda: False
    ((text, level),) = messages
    assert (level, text[:22]) == ("warning", "upload failed (file://")
    assert text.endswith("no network); keeping local files and retrying")
    assert files(tmp_path / "store") == files(run)


def test_a_store_that_fails_at_the_end_fails_the_command(run, flaky, tmp_path):
    uploads = uploading(flaky.mirror, ignore, ignore, pauses=(0.0,))
    with pytest.raises(RetrainError, match=r"no network\)\nAll files are in .*retrain resume .*/run$"), uploads:
        flaky.broken = lambda: True
    uploads = uploading(Mirror(flaky.mirror.url, run), ignore, ignore)
    with pytest.raises(ValueError, match="of the run"), uploads:
        raise ValueError("of the run")
    assert files(tmp_path / "store") == files(run)


def test_who_has_lost_the_copy_is_stopped(run, tmp_path):
    mirror, lost = Mirror(f"file://{tmp_path}/store", run), threading.Event()
    uploads = uploading(mirror, ignore, lost.set, period=0.01)
    uploads.__enter__()
    Mirror(mirror.url, run).claim()
    assert lost.wait(60)
    with pytest.raises(LeaseLost):
        uploads.__exit__(None, None, None)


def test_a_campaign_resumes_from_its_copy(tmp_path, world, monkeypatch):
    """Interrupted, its directory lost, resumed from the URL: the result of a campaign that was not interrupted."""
    monkeypatch.chdir(tmp_path)
    url, out, again = f"file://{tmp_path}/store", tmp_path / "out", tmp_path / "logs/store"
    one = ["campaign.seeds=[1]"]
    assert execute(planned(world, tmp_path / "whole", one, steps=2), NullObserver()).exit_status == 0
    assert execute(planned(world, out, [*one, f"logging.mirror={url}"], steps=2), StopAfter(2)).exit_status == 130
    assert files(tmp_path / "store") == files(out)
    shutil.rmtree(out)
    result = run_cli("resume", url, "--plain")
    assert result.exit_code == 0, result.output
    assert f"{url} is in logs/store now" in result.output
    assert differing(contents(again), contents(tmp_path / "whole"), runs=2) == []
    shutil.rmtree(tmp_path / "store")
    continue_training(again)
    assert files(tmp_path / "store") == files(again)


def test_bad_urls_are_one_line(run, tmp_path, world):
    with pytest.raises(ConfigError, match=r"logging.mirror.*is no URL"):
        planned(world, tmp_path / "out", ["logging.mirror=results"])
    with pytest.raises(UsageError, match="cannot be opened"):
        Mirror("nosuch://bucket/x", tmp_path)
    nothing = f"file://{tmp_path}/nothing"
    for arguments, words in (([nothing], "holds no copy of"), ([str(tmp_path), "--out", "x"], "leave out --out")):
        result = run_cli("resume", *arguments)
        assert (result.exit_code, words in result.output) == (2, True)
    copied(run, f"file://{tmp_path}/store")
    index = read_json(tmp_path / "store" / INDEX)
    (tmp_path / "store" / INDEX).write_text(json.dumps(index | {"files": index["files"] | {"../outside": [1, 1]}}))
    with pytest.raises(UsageError, match="is damaged"):
        Mirror(f"file://{tmp_path}/store", tmp_path / "a/b").fetch()
    assert list((tmp_path / "a").iterdir()) == []
