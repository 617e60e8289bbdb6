"""What is looked at first: the banner of a campaign, the rows of the first page, the tiles of a run."""

import fcntl
import shlex

import pytest
from helpers.pages import LABELS, campaign, client_of, cookbook_run, evaluation, get, row
from scipy.stats import binomtest

from retrain.files import append_jsonl, read_json, write_json
from retrain.ui.findings import Finding, Findings
from retrain.ui.library import Library
from retrain.ui.places import Places
from retrain.ui.summary import Summaries

TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 3, in <module>
    fail()
KeyError: 'answer'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 9, in grade
    raise RunFailed(name)
retrain.errors.RunFailed: the grader has no answer
for problem p17"""


def with_states(home, **states):
    """Give runs of the campaign other states, by run id without its condition (``s1``, of the first condition)."""
    manifest = read_json(home / "manifest.json")
    for entry in manifest["runs"]:
        name = f"{'a' if entry['label'].startswith('grpo') else 'b'}{entry['seed']}"
        if name in states:
            entry |= {"state": states[name], "reason": "RunFailed: no answer" if states[name] == "failed" else None}
    write_json(home / "manifest.json", manifest)


def test_a_banner_has_failures_with_their_last_line_and_the_command(tmp_path, monkeypatch):
    home = campaign(tmp_path / "one", seeds=3)
    with_states(home, a2="failed", b3="interrupted")
    stamp = "2026-01-01 00:00:09 error   "
    log = home / "runs/grpo+none_s2/run.log"
    before = len(log.read_bytes())
    with open(log, "a") as file:
        file.write("".join(f"{stamp}{line}\n" for line in TRACEBACK.splitlines()))
    client = client_of(home)
    banner = get(client, "/api/campaign", at="one", wait_ms=60_000)["banner"]
    assert (banner["state"], banner["words"]) == ("failed", "6 runs: 1 failed, 1 interrupted, 4 finished")
    (failure,) = banner["failed"]
    assert (failure["run_id"], failure["seed"], failure["reason"]) == ("grpo+none_s2", 2, "RunFailed: no answer")
    assert failure["line"] == "retrain.errors.RunFailed: the grader has no answer"
    text = log.read_text()
    assert text.encode()[failure["log"]["byte"] :].decode().startswith(f"{stamp}Traceback")
    assert failure["log"]["byte"] > before + 100  # the second of the two
    assert banner["resume"] == {"command": shlex.join(["retrain", "resume", str(home), "--retry-failed"]), "now": True}
    comparison = get(client, "/api/campaign", at="one", wait_ms=60_000)["comparison"]
    assert banner["verdict"] == comparison["conditions"][1]["sentence"]
    run = get(client, "/api/campaign", at=failure["place"])["banner"]
    assert (run["state"], run["resume"]) == ("failed", banner["resume"])
    monkeypatch.chdir(tmp_path)
    assert get(client, "/api/campaign", at="one")["banner"]["resume"]["command"] == "retrain resume one --retry-failed"


@pytest.mark.parametrize(("states", "state", "command"), [
    ({}, "done", None),
    ({"a1": "stopped"}, "done", None),
    ({"a1": "interrupted"}, "interrupted", "retrain resume one"),
    ({"a1": "pending"}, "interrupted", "retrain resume one"),
    ({"a1": "failed", "a2": "pending"}, "failed", "retrain resume one --retry-failed"),
])  # fmt: skip
def test_the_command_continues_what_is_left(tmp_path, monkeypatch, states, state, command):
    monkeypatch.chdir(tmp_path)
    with_states(home := campaign(tmp_path / "one"), **states)
    banner = get(client_of(home), "/api/campaign", at="one")["banner"]
    assert (banner["state"], banner["resume"] and banner["resume"]["command"]) == (state, command)
    assert bool(banner["failed"]) == ("failed" in states.values())


def test_the_first_page_has_accuracies_with_their_interval_and_the_time_left(tmp_path):
    home = campaign(tmp_path / "one", seeds=2)
    for step in range(7, 60):  # of the last evaluations one run lacks the end
        append_jsonl(home / "runs/grpo+none_s1/evals.jsonl", [evaluation(step, 0.5)])
        append_jsonl(home / "runs/grpo+none_s2/evals.jsonl", [evaluation(step, 0.75)] if step < 59 else [])
    (one,) = get(client_of(home), "/api/places")["places"]
    assert one["heldout"]["set"] == "heldout"
    first, second = one["heldout"]["conditions"]
    assert (first["label"], first["index"], len(first["points"])) == (LABELS[0], 0, 30)
    assert (first["points"][0], first["points"][-1]) == ([0, 0.25], [58, 0.625])
    assert {key: first["last"][key] for key in ("step", "rate", "n", "runs")} == {
        "step": 58, "rate": 0.625, "n": 64, "runs": 2,
    }  # fmt: skip
    wilson = binomtest(40, 64).proportion_ci(method="wilson")
    assert (first["last"]["low"], first["last"]["high"]) == pytest.approx((wilson.low, wilson.high))
    assert second["points"] == [[0, 0.25], [6, pytest.approx(0.7 + 1.5 / 64)]]
    assert (one["left_s"], one["devices"]) == (None, [])


def test_the_time_left_is_that_of_all_steps_at_the_pace_of_late(tmp_path):
    home = campaign(tmp_path / "one", seeds=2, steps=6, state="running")
    manifest = read_json(home / "manifest.json")
    for entry, state in zip(manifest["runs"], ("running", "running", "pending", "done"), strict=True):
        entry |= {"state": state, "max_steps": 16, "step": 0 if state == "pending" else 6}
    write_json(home / "manifest.json", manifest)
    config = home / "runs/grpo+none_s1/config.json"
    write_json(config, read_json(config) | {"built": {"device": "cuda:0"}})
    with open(home / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (one,) = get(client_of(home), "/api/places")["places"]
    assert (one["state"], one["devices"]) == ("running", ["cuda:0"])
    assert one["left_s"] == (10 + 10 + 16) * 2.0 / 2  # two runs at a time, two seconds a step


def test_only_directories_that_have_changed_are_read_again(tmp_path):
    for name in ("one", "two"):
        campaign(tmp_path / name)
    library = Library(Places([tmp_path]), fresh_s=-1.0)

    def known():
        return {home.name: home for home in library.homes()}

    before, again = known(), known()
    assert all(again[name] is before[name] for name in ("one", "two"))
    append_jsonl(tmp_path / "two/runs/grpo+none_s1/metrics.jsonl", [row(6)])
    after = known()
    assert after["one"] is before["one"]
    assert after["two"] is not before["two"]


def test_the_truncated_share_of_a_run_has_its_interval_and_other_tools_runs_have_tiles(tmp_path):
    home = campaign(tmp_path / "one")
    last = {"max_token_hit_rate": 0.125, "env/all/total_episodes": 64}
    append_jsonl(home / "runs/grpo+none_s1/metrics.jsonl", [row(6, **last)])
    tiles = {tile["name"]: tile for tile in get(client_of(home), "/api/run", at="one/runs/grpo+none_s1")["tiles"]}
    wilson = binomtest(8, 64).proportion_ci(method="wilson")
    assert tiles["truncated"] | {"unit": "share", "step": 6, "value": 0.125, "n": 64} == tiles["truncated"]
    assert (tiles["truncated"]["low"], tiles["truncated"]["high"]) == pytest.approx((wilson.low, wilson.high))
    assert tiles["held-out"]["n"] == 64
    found = get(client_of(cookbook_run(tmp_path / "math_rl")), "/api/run", at="math_rl")
    assert [(tile["name"], tile["key"]) for tile in found["tiles"]] == [("reward", "env/all/reward/total")]
    assert (found["command"], found["marks"]) == (None, [])


class Changing(Findings):
    """Returns another comparison at each call, as while comparisons end."""

    def last(self, home):
        return Finding((), None, None)


def test_what_was_just_read_is_shown_although_a_comparison_ends_meanwhile(tmp_path):
    home = campaign(tmp_path / "one")
    library = Library(Places([home]))
    summary = Summaries(library, Changing(library)).of(library.home("one"))
    assert summary["heldout"]["set"] == "heldout"
    assert summary["note"]["level"] == "warning"
