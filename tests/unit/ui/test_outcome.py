"""Outcomes: the banner of a campaign, the rows of the first page, the tiles of a run."""

import shlex

import pytest
from helpers.pages import campaign, client_of, get

from retrain.files import read_json, write_json

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


@pytest.mark.parametrize(
    ("states", "state", "command"),
    [
        ({}, "done", None),
        ({"a1": "stopped"}, "stopped", None),
        ({"a1": "interrupted"}, "interrupted", "retrain resume one"),
        ({"a1": "pending"}, "interrupted", "retrain resume one"),
        ({"a1": "failed", "a2": "pending"}, "failed", "retrain resume one --retry-failed"),
    ],
)
def test_the_command_continues_what_is_left(tmp_path, monkeypatch, states, state, command):
    monkeypatch.chdir(tmp_path)
    with_states(home := campaign(tmp_path / "one"), **states)
    banner = get(client_of(home), "/api/campaign", at="one")["banner"]
    assert (banner["state"], banner["resume"] and banner["resume"]["command"]) == (state, command)
    assert bool(banner["failed"]) == ("failed" in states.values())
