import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from helpers.campaigns import campaign, continue_training, files_of, run_cli, toy_toml, train
from helpers.lanes import small_snapshot

from retrain import ownership
from retrain.adapters.squeeze import compress_adapter, squeeze
from retrain.errors import NotOurs
from retrain.files import aside_of, read_json, read_jsonl, write_json
from retrain.training import checkpoints
from retrain.util.session import machine
from retrain.verdicts.report import write_report

THEIRS = "not of retrain"
GOLDEN = Path(__file__).parents[2] / "golden" / "campaign_directory.txt"


def put(path: Path, text: str = THEIRS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def single(folder: Path, model: Path, steps: int = 3) -> Path:
    path, training = folder / "single.toml", {"batch_size": 2, "max_steps": steps, "save_every": 1}
    path.write_text(toy_toml(model, training=training, squeeze={"enabled": None}))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("trained")
    path = single(folder, model)
    train(path, folder / "out", "training.keep_last=0")
    return folder / "out", path


@pytest.fixture
def out(trained, tmp_path) -> Path:
    shutil.copytree(trained[0], tmp_path / "out")
    return tmp_path / "out"


def test_every_name_that_a_run_writes_is_looked_for(trained):
    """In the golden campaign and in a single run, at both levels; whatever is added must be in LAYOUT."""
    lines = [line.split()[0] for line in GOLDEN.read_text().splitlines() if line and not line.startswith(" ")]
    names = {line.split("/")[0] for line in lines} | {p.split("/")[2] for p in lines if p.startswith("runs/")}
    names |= {path.name for path in trained[0].iterdir()}
    assert {"metrics.jsonl", "final", "squeeze", "plan.json", ownership.MARK} <= names
    assert [name for name in names - {".lock"} if not any(fnmatchcase(name, glob) for glob in ownership.LAYOUT)] == []


def test_a_claimed_directory_is_known_again_and_others_are_not(tmp_path):
    owner = ownership.claim(tmp_path / "a")
    assert ownership.claim(tmp_path / "a") == owner == ownership.owner_of(tmp_path / "a")
    put(tmp_path / "a/metrics.jsonl")
    ownership.check_claim(tmp_path / "a")
    assert ownership.claim(tmp_path / "a/runs/x", owner.at("runs/x")) == ownership.Owner(owner.id, "runs/x")
    with pytest.raises(NotOurs, match="runs/x of another directory"):
        ownership.check_claim(tmp_path / "a/runs/x")  # a run of a campaign is no place for another campaign
    shutil.copytree(tmp_path / "a/runs/x", tmp_path / "a/runs/y")
    with pytest.raises(NotOurs):
        ownership.check_claim(tmp_path / "a/runs/y", owner.at("runs/y"))


def test_what_was_published_is_replaced_and_what_lies_beside_it_stays(tmp_path):
    owner, target = ownership.Owner("me", "final"), tmp_path / "final"

    def write(**files: str) -> None:
        for name, text in files.items():
            put(aside_of(target) / name, text)
        ownership.publish(aside_of(target), target, owner)

    write(a="1", b="1")
    write(a="2")
    put(target / "notes.txt")
    write(b="3")
    assert files_of(target).keys() == {"b", "notes.txt", ownership.MARK}
    put(target / "a")
    with pytest.raises(NotOurs, match=r"holds a, which this run did not write"):
        write(a="4")
    assert (target / "a").read_text() == THEIRS
    assert not ownership.remove(target, ownership.Owner("other", "final"))
    assert not ownership.remove(target, ownership.Owner("me", "elsewhere"))
    assert ownership.remove(target, owner)
    assert files_of(target).keys() == {"a", "notes.txt"}


def test_a_published_directory_is_not_written_through_links(tmp_path):
    theirs = put(tmp_path / "theirs/b")
    put(tmp_path / "new/sub/b", "ours")
    (tmp_path / "target").mkdir()
    (tmp_path / "target/sub").symlink_to(tmp_path / "theirs")
    with pytest.raises(NotOurs, match="sub/b"):
        ownership.install(tmp_path / "new", tmp_path / "target", ownership.Owner("me"))
    write_json(tmp_path / "target" / ownership.MARK, {"owner": "me", "place": ".", "files": ["sub/b"]})
    ownership.remove(tmp_path / "target", ownership.Owner("me"))
    assert theirs.read_text() == THEIRS
    write_json(tmp_path / "target" / ownership.MARK, {"owner": "me", "place": ".", "files": ["../theirs/b"]})
    assert ownership.mark_of(tmp_path / "target") is None


def test_leftovers_of_others_stay(tmp_path):
    ownership.claim(tmp_path)
    dead = "4194305.retrain-tmp"  # above the highest process number
    mine = [put(tmp_path / "runs/x" / f".metrics.jsonl.{dead}"), put(tmp_path / "checkpoints" / f".step.{dead}/file")]
    ownership.claim(tmp_path / "squeeze/continue_2")
    stay = [put(tmp_path / "runs/x/.metrics.jsonl.77.tmp"), put(tmp_path / "checkpoints/.final.old/file"),
            put(tmp_path / "squeeze/continue_2" / f".metrics.jsonl.{dead}")]  # fmt: skip
    ownership.remove_leftovers(tmp_path)
    assert not any(path.exists() for path in mine)
    assert all(path.read_text() == THEIRS for path in stay)


FOREIGN = (
    "manifest.json", "config.json", "metrics.jsonl", "run.log", "report.html", "retrain.json", ".lease",
    "final/adapter_model.safetensors", "checkpoints/step_000001/weights.pt", "squeeze/analysis.json",
    "runs/grpo+none_s1/metrics.jsonl", "train_iteration_000000.html", "eval_mine_iteration_000000_logtree.json",
)  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_every_name_that_retrain_writes_is_refused_where_it_is_foreign(tmp_path, name):
    top = name.split("/")[0]
    theirs = put(tmp_path / "theirs" / name).parents[name.count("/")]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / top).symlink_to(theirs / top)
    for directory in (theirs, tmp_path / "linked"):
        before = files_of(directory)
        with pytest.raises(NotOurs, match=rf"holds {re.escape(top)}, which retrain did not write"):
            ownership.claim(directory)
        assert files_of(directory) == before


def test_a_foreign_directory_is_refused_and_stays_as_it_is(tmp_path, model):
    put(tmp_path / "out/metrics.jsonl")
    before = files_of(tmp_path / "out")
    result = run_cli("train", single(tmp_path, model), "--out", tmp_path / "out")
    assert result.exit_code == 2
    (line,) = [line for line in result.output.splitlines() if not line.startswith("note:")]
    assert "out holds metrics.jsonl, which retrain did not write there" in line
    assert "another directory with --out" in line
    assert files_of(tmp_path / "out") == before


def test_unrelated_files_and_a_start_that_was_killed_are_continued(tmp_path, model):
    """Killed after the lock, after the mark, after the lease, at any later file: the next start goes on."""
    out, path = tmp_path / "out", single(tmp_path, model, 1)
    (out / "checkpoints").mkdir(parents=True)  # empty: nothing can be lost
    stays = [put(out / name) for name in ("notes.txt", ".notes.1.tmp", ".lock", "data/config.json")]
    (out / "link").symlink_to("/nowhere")
    put(out / ".retrain.json.4194305.retrain-tmp", "{")
    ownership.claim(out)
    write_json(out / ".lease", {"token": "x", "pid": 4194305, "process_start": "0", **machine()})
    leftover = put(out / ".manifest.json.4194305.retrain-tmp", "{")
    train(path, out)
    assert not leftover.exists()
    continue_training(out)
    assert [file.read_text() for file in stays] == [THEIRS] * 4
    assert (out / "link").is_symlink()
    assert len(read_jsonl(out / "metrics.jsonl")) == 1


def test_another_campaigns_runs_are_not_joined_nor_those_of_another_seed(trained, model, tmp_path):
    out, path = trained
    before = files_of(out)
    with pytest.raises(NotOurs, match=r"holds other runs \(grpo\+none_s\d+; here grpo\+none_s9\)"):
        train(path, out, "training.seed=9")
    with pytest.raises(NotOurs, match="holds other runs"):
        train(campaign(tmp_path, model), out, "campaign.seeds=[8]")
    assert files_of(out) == before


def test_a_foreign_directory_of_a_run_is_refused_before_a_campaign(tmp_path, model):
    path, out = campaign(tmp_path, model, steps=1), tmp_path / "out"
    owner = ownership.claim(out)
    put(out / "runs/grpo+none_s2/metrics.jsonl", '{"step": 0}\n')
    put(out / "runs/grpo+none_s2/final/adapter_model.safetensors")
    before = files_of(out)
    with pytest.raises(NotOurs, match=r"grpo\+none_s2 holds final, metrics\.jsonl.*move it away"):
        train(path, out)
    assert files_of(out) == before
    shutil.rmtree(out / "runs")
    ownership.claim(out / "runs/grpo+none_s2", owner.at("runs/grpo+none_s1"))  # ours, but another run's
    with pytest.raises(NotOurs, match=r"grpo\+none_s1 of another directory"):
        train(path, out)


def test_foreign_checkpoints_survive_pruning_and_forgetting_and_are_not_continued(tmp_path):
    """Any directory, a checkpoint of another run, and a link."""
    run, other = tmp_path / "run", tmp_path / "other"
    ownership.claim(run)
    ownership.claim(other)
    for step in (2, 4, 6):
        checkpoints.write_checkpoint(checkpoints.checkpoint_directory(run, step), small_snapshot(step))
    put(checkpoints.checkpoint_directory(run, 1) / "state.json")
    checkpoints.write_checkpoint(checkpoints.checkpoint_directory(other, 5), small_snapshot(5))
    shutil.copytree(checkpoints.checkpoint_directory(other, 5), checkpoints.checkpoint_directory(run, 5))
    checkpoints.checkpoint_directory(run, 9).symlink_to(put(tmp_path / "theirs/weights.pt").parent)
    put(checkpoints.checkpoint_directory(run, 2) / "notes.txt")

    def foreign() -> list[dict]:
        return [files_of(checkpoints.checkpoint_directory(run, step)) for step in (1, 5, 9)]

    def ours() -> list[str]:
        return [path.name[-1] for path in checkpoints.checkpoint_directories(run)]

    before = foreign()
    assert ours() == ["2", "4", "6"]
    with pytest.raises(NotOurs, match=r"step_000001 holds state\.json"):
        checkpoints.write_checkpoint(checkpoints.checkpoint_directory(run, 1), small_snapshot(1))
    checkpoints.delete_checkpoints_after(run, 4)
    assert not checkpoints.checkpoint_directory(run, 6).exists()
    checkpoints.prune(run, keep_last=1)
    assert files_of(checkpoints.checkpoint_directory(run, 2)).keys() == {"notes.txt"}
    assert ours() == ["4"]
    checkpoints.delete_checkpoints_after(run, 0)
    assert ours() == []
    assert foreign() == before


def test_a_run_goes_on_beside_foreign_files_and_is_refused_where_they_are_in_the_way(out):
    first = out / "checkpoints/step_000001"
    shutil.rmtree(first)
    theirs = put(first / "adapter_model.safetensors")
    sets = ["training.max_steps=4", "training.keep_last=1"]
    blocked = put(out / "checkpoints/step_000004/state.json")
    before = files_of(out)
    with pytest.raises(NotOurs, match=r"step_000004 holds state\.json.*move it away"):
        continue_training(out, *sets)
    assert files_of(out) == before
    shutil.rmtree(blocked.parent)
    put(out / "final/README.md")
    continue_training(out, *sets)
    assert theirs.read_text() == (out / "final/README.md").read_text() == THEIRS
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step_000001", "step_000004"]
    last = out / "checkpoints/step_000004/adapter_model.safetensors"
    assert (out / "final/adapter_model.safetensors").read_bytes() == last.read_bytes()
    shutil.rmtree(out / "final")
    put(out / "final/adapter_model.safetensors")
    before = files_of(out)
    with pytest.raises(NotOurs, match=r"final holds adapter_model\.safetensors"):
        continue_training(out, "training.max_steps=5")
    assert files_of(out) == before


@pytest.mark.parametrize("through", ["directory", "link", "campaign", "squeeze"])
def test_somebodys_adapter_in_an_output_path_is_refused_before_anything_is_written(tmp_path, model, through):
    mine, name = tmp_path / "mine", "adapter_model.safetensors"
    path = campaign(tmp_path, model) if through == "campaign" else single(tmp_path, model)
    file = put(mine / "rloo+gtpo_hicra_placebo_s2" / name if through == "campaign" else mine / name)
    target = mine
    if through == "link":
        target = tmp_path / "link"
        target.symlink_to(mine)
    section, key = ("squeeze", "output_path") if through == "squeeze" else ("backend", "adapter_path")
    with pytest.raises(NotOurs, match=rf"{name}, which this run did not write: set \[{section}\] {key}"):
        train(path, tmp_path / "out", f'{section}.{key}="{target}"')
    assert files_of(mine) == {str(file.relative_to(mine)): THEIRS.encode()}
    assert not (tmp_path / "out").exists()


def test_an_adapter_path_is_used_again_by_its_run_and_by_no_other(out, trained, tmp_path):
    notes, final = put(tmp_path / "mine/notes.txt"), out / "final/adapter_model.safetensors"
    here = f'backend.adapter_path="{notes.parent}"'
    for steps in (4, 5):
        train(trained[1], out, here, f"training.max_steps={steps}")
        assert (notes.parent / "adapter_model.safetensors").read_bytes() == final.read_bytes()
    before = files_of(notes.parent)
    with pytest.raises(NotOurs, match="adapter_path to another directory"):
        train(trained[1], tmp_path / "other", here)
    assert files_of(notes.parent) == before
    assert notes.read_text() == THEIRS


def test_squeeze_writes_over_nothing_but_its_own(trained, tmp_path):
    out, _ = trained
    theirs = put(tmp_path / "foreign/adapter_config.json")
    (tmp_path / "linked").symlink_to(theirs.parent)
    for target in ("foreign", "linked"):
        with pytest.raises(NotOurs, match=r"adapter_config\.json.*another directory with --out"):
            squeeze(out, to=2, out=tmp_path / target)
    with pytest.raises(NotOurs, match=r"is a file"):
        squeeze(out, to=2, out=theirs)
    assert files_of(theirs.parent) == {"adapter_config.json": THEIRS.encode()}
    notes = put(tmp_path / "small/notes.txt")
    for rank in (2, 1):
        squeeze(out, to=rank, out=tmp_path / "small")
        assert read_json(tmp_path / "small/adapter_config.json")["r"] == rank
    assert notes.read_text() == THEIRS
    with pytest.raises(NotOurs):
        compress_adapter(out / "checkpoints/step_000001", 1, tmp_path / "small")  # another adapter's
    put(tmp_path / "analyses/analysis.json")
    with pytest.raises(NotOurs, match=r"analyses holds analysis\.json"):
        squeeze(out, out=tmp_path / "analyses")


def test_a_report_replaces_only_a_report_of_the_same_directory(out, tmp_path):
    file = put(tmp_path / "thesis.html")
    result = run_cli("report", out, "--out", file)
    assert result.exit_code == 2
    assert "is not a report of" in result.output
    assert file.read_text() == THEIRS
    file.unlink()
    for _ in range(2):
        write_report(out, file)
    ownership.claim(tmp_path / "b")
    for name in ("manifest.json", "plan.json"):
        shutil.copy(out / name, tmp_path / "b" / name)
    with pytest.raises(NotOurs):
        write_report(tmp_path / "b", file)


@pytest.mark.parametrize("text", ['{"name": "web app", "icons": []}', "[1, 2]", "not JSON"])
def test_a_foreign_manifest_is_called_foreign(tmp_path, text):
    put(tmp_path / "site/manifest.json", text)
    for command in ("status", "compare", "report", "squeeze"):
        result = run_cli(command, tmp_path / "site")
        assert (result.exit_code, "is not retrain's" in result.output) == (2, True), result.output
    assert (tmp_path / "site/manifest.json").read_text() == text
