"""Rollout records: the cookbook's readers work on them, pages are inert and bounded, resuming continues exactly."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from browser import Browser, needs_chromium
from hostile import HOSTILE, MARKER, MEGABYTE
from pages import Reader
from record_cases import completion, config, context, evaluation, find_conversations, group, step

from retrain.files import read_jsonl
from retrain.record.html import visible
from retrain.record.recorder import RunRecorder
from retrain.record.rollout_files import write_files
from retrain.record.rollout_page import SAMPLE_CHARACTERS, TABLE_ROWS, rollout_page
from retrain.record.rollouts import MESSAGE_CHARACTERS, Batch, logtree, summary_rows
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Turn, single_turn

ACT = f"window.{MARKER}=1"
SHOW = "document.documentElement.dataset.hit=1"


def batch(groups: list[Group], split: str = "train", iteration: int = 3, **changes: Any) -> Batch:
    return Batch(split, iteration, groups, "grpo+none_s1", "grpo+none", 1000.0, **changes)


def characters(groups: Sequence[Group]) -> Callable[[Sequence[int]], tuple[str, np.ndarray]]:
    """Tokens of one character each, the rest of the tokens empty; the same ids stand for the same text."""
    actions = [turn.action for group in groups for rollout in group.rollouts for turn in rollout.turns]
    texts = {tuple(action.token_ids): action.text for action in actions}
    assert all(texts[tuple(action.token_ids)] == action.text for action in actions)

    def place(token_ids: Sequence[int]) -> tuple[str, np.ndarray]:
        text, places = texts[tuple(token_ids)], np.arange(len(token_ids) + 1)
        ends = np.minimum(places, len(text))
        return text, np.stack([ends[:-1], ends[1:]], axis=1)

    return place


def test_one_summary_line_for_every_trajectory():
    groups = [
        group([RewardResult(1.0, {"depth": 2.0}, ("hard",), format_ok=True), 0.0], [4, 5], tags=("sums",)),
        group([None, None], [2, 3], discarded="no_reward", problem_id="p1", stops=[True, False]),
    ]
    rows = summary_rows(batch(groups))
    assert [(row["group_idx"], row["traj_idx"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    expected = {
        "schema_version": 1, "split": "train", "iteration": 3, "sampling_client_step": 3, "tags": ["sums", "hard"],
        "total_reward": 1.0, "final_reward": 0.0, "final_ob_len": 0, "problem_id": "p0", "advantage": 0.5,
        "trajectory_metrics": {"depth": 2.0, "correct": 1.0, "format": 1.0}, "stop_reason": "stop",
    }  # fmt: skip
    first, turn = rows[0], rows[0]["steps"][0]
    assert {key: first[key] for key in expected} == expected
    assert (turn["step_idx"], turn["ob_len"], turn["ac_len"], turn["episode_done"]) == (0, 3, 4, True)
    assert first["total_reward"] == first["final_reward"] + turn["reward"]
    assert (rows[3]["total_reward"], rows[3]["advantage"], rows[3]["stop_reason"]) == (None, None, "length")
    assert rows[3]["steps"][0]["logs"] == {"error": "timed out"}


def find_data(node: Any, kind: str) -> list[dict[str, Any]]:
    found = [node["data"]] if node.get("data", {}).get("type") == kind else []
    return found + [each for child in node["children"] if isinstance(child, dict) for each in find_data(child, kind)]


def test_the_cookbook_s_readers_find_conversations_and_rewards_by_component(tmp_path):
    """correct + 0.1·(format − 1): 1 and −0.1 make 0.9; in texts of the first groups, in the details of all of them."""
    parts = [{"type": "math", "weight": 1.0}, {"type": "format", "weight": 0.1, "offset": -1.0}]
    components, metrics = {"math": 1.0, "format": 0.0}, {"steps": 3.0, "score": None}
    weighted = RewardResult(0.9, metrics, components=components, correct=True, format_ok=False)
    many = RewardResult(1.0, {f"m{n}": float(n) for n in range(20)})
    groups = [group([weighted, many], [4, 5]), *(group([weighted, 0.0], [4, 5], problem_id=f"p{i}") for i in range(5))]
    with RunRecorder(tmp_path, context(config=config(reward={"type": "weighted", "components": parts}))) as recorder:
        recorder.record_eval(evaluation(groups, number=0, name="held out/1"))
        recorder.record_step(step(groups))
    for name in ("train_iteration_000000", "eval_held_out_1_iteration_000000"):
        tree = json.loads((tmp_path / f"{name}_logtree.json").read_text())
        assert set(tree) == {"title", "started_at", "path", "root"}
        assert (tmp_path / tree["path"]).is_file()
        check_node(tree["root"])
        conversations = find_conversations(tree["root"])
        assert len(conversations) == 8  # two samples of each of the four groups that are shown
        assert [message["role"] for message in conversations[0]["messages"]] == ["user", "assistant"]
        assert conversations[4]["messages"][0]["content"] == "What is p1?"
        assert conversations[0]["messages"][1]["content"] == "so \\boxed{4}"
        assert len(read_jsonl(tmp_path / f"{name}_rollout_summaries.jsonl")) == 12
        rewards = find_data(tree["root"], "reward")
        assert rewards[0] == {
            "type": "reward", "total": 0.9, "components": components, "metrics": {**metrics, "correct": 1.0},
            "adds": {"math": 1.0, "format": pytest.approx(-0.1)},
        }  # fmt: skip
        assert (len(rewards), rewards[1]["metrics"]["m19"]) == (8, 19.0)
        text = json.dumps(tree, ensure_ascii=False)
        assert "0.1 · (0 − 1) = -0.1" in text
        assert text.count("Trajectory Details") == 6
        page = (tmp_path / f"{name}.html").read_text()
        assert '<span title="0.1 · (0 − 1) = -0.1">format 0 <b>−0.1</b></span>' in page
        for shown in ("<span>steps 3</span>", "<span>score none</span>", "<span>m19 19</span>"):
            assert shown in page
        heads = page[page.index('<details class="all">') :]
        for column in ("math", "format", "steps", "score", "m0", "m19", "correct"):
            assert f'<th class="number">{column}</th>' in heads


def check_node(node: Any) -> None:
    """``tag, attrs, children`` and at most ``data``; no string among the children is markup."""
    assert {"tag", "attrs", "children"} <= set(node) <= {"tag", "attrs", "children", "data"}
    assert re.fullmatch(r"[a-z][a-z0-9]*", node["tag"])
    assert all(isinstance(value, str) for value in node["attrs"].values())
    for child in node["children"]:
        if isinstance(child, str):
            assert Reader(child).tags == []
        else:
            check_node(child)


def hostile_groups() -> list[Group]:
    """Each hostile text everywhere a text can stand."""
    made = []
    for name, raw in HOSTILE.items():
        text = raw.replace(ACT, SHOW)
        one = Action([ord(c) for c in text], text, np.full(len(text), -1.0), None, "stop")
        hostile = single_turn(
            Prompt(
                Problem(text, text, text, (text,) if text else ()), text, (1, 2), ({"role": text, "content": text},)
            ),
            [one, completion(3)],
            [RewardResult(None, {text: 1.0}, (text,), error=text), RewardResult(1.0, {name: 1.0})],
        )
        first, second = hostile.rollouts
        second.advantage = 0.0
        first.planning_T, second.planning_T = np.zeros(len(text), bool), np.ones(3, bool)
        # What an environment answers is as hostile: the role, the tool's name, its text, a log.
        answer = ({"role": text, "name": text, "content": text},)
        second.turns.append(Turn((3,), completion(2), answer, reward=0.5, logs={"said": text}))
        second.planning_T = np.ones(5, bool)
        made.append(hostile)
    return made


def test_hostile_texts_are_inert(tmp_path):
    groups = hostile_groups()
    whole = batch(groups, token_text=characters(groups), split="eval/" + HOSTILE["path"])
    assert re.fullmatch(r"eval_[\w.+~=-]+_iteration_000003", whole.name)
    write_files(tmp_path, whole, len(groups))
    text = (tmp_path / f"{whole.name}.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.tags.count("script") == 2
    assert not {"img", "svg", "link", "iframe", "object", "base", "form"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name == "src"]
    assert {value for name, value in reader.attributes if name == "href"} == {f"#g{i}" for i in range(len(groups))}
    shown = "".join(reader.texts)
    for raw in HOSTILE.values():
        assert visible(raw.replace(ACT, SHOW)) in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    tree = json.loads((tmp_path / f"{whole.name}_logtree.json").read_text(encoding="utf-8"))
    check_node(tree["root"])
    assert len(find_conversations(tree["root"])) == 2 * len(groups)


@needs_chromium
def test_a_browser_runs_our_script_and_nothing_else(tmp_path):
    groups = hostile_groups()
    write_files(tmp_path, batch(groups, token_text=characters(groups)), len(groups))
    with Browser() as browser:
        browser.open(tmp_path / "train_iteration_000003.html", "#color=s")
        assert browser.run("document.querySelectorAll('.t.su.h2').length") > 0  # one nat: our script ran, and coloured
        assert browser.run("Object.keys(document.documentElement.dataset).join()") == ""
        assert browser.run("document.querySelectorAll('[data-hit]').length") == 0


def test_pages_are_bounded_and_say_what_is_left_out():
    groups = [group([1.0, 0.0], [4, 5]) for _ in range(700)]
    for rollout in groups[0].rollouts:
        action = rollout.turns[0].action
        action.text, action.token_ids = MEGABYTE, [1000 + token for token in action.token_ids]
    groups[0].rollouts[0].reward = RewardResult(None, error=MEGABYTE)
    text = rollout_page(batch(groups, token_text=characters(groups)), 4)
    assert len(text) < 1_500_000
    assert f"{len(MEGABYTE) - SAMPLE_CHARACTERS:,} more characters not shown" in text
    assert "696 more groups are not shown with their texts" in text
    assert f"{1400 - TABLE_ROWS} more not shown" in text
    message = find_conversations(logtree(batch(groups), 4)["root"])[0]["messages"][1]["content"]
    assert message.endswith(f"{len(MEGABYTE) - MESSAGE_CHARACTERS:,} more characters not shown")
    many = [group([0.0] * 64, [4] * 64)]
    for rollout in many[0].rollouts:
        rollout.turns[0].action.text = MEGABYTE
    text = rollout_page(batch(many), 1)
    assert "32 more samples not shown" in text
    assert len(text) < 3_000_000
    assert len(json.dumps(logtree(batch(many), 1))) < 20_000_000


def two_turns(values: bool = True, targets: bool = True) -> Group:
    """One episode of two turns, of three and two tokens, perhaps with a critic."""
    first = Action([1, 2, 3], "a🙂c", np.array([-0.5, -0.004, -np.inf]), None, "stop")
    second = Action([4, 5], "de", np.array([-0.25, -3.0]), None, "stop")
    made = single_turn(Prompt(Problem("p", "q", "a"), "q", (1,)), [first], [RewardResult(1.0)])
    (rollout,) = made.rollouts
    rollout.turns.append(Turn((7, 8), second, ({"role": "user", "content": "<b>go on</b>"},)))
    rollout.advantage, rollout.token_advantages_T = 0.5, np.array([-0.5, 2.0, 0.0004, -1.9996, np.nan])
    rollout.planning_T = np.array([False, True, True, False, False])
    rollout.values_T = np.array([-0.25, 0.0, 0.1234, 0.4996, 0.75], dtype=np.float32) if values else None
    rollout.value_targets_T = np.array([0.0, 0.5, 0.25, 1.0, 1.5], dtype=np.float32) if targets else None
    return made


CRITIC_MARKS = re.compile(r' data-[vt]="[^"]*"|<button type="button" data-mode="v"[^>]*>value</button>')


def test_tokens_carry_surprisal_advantage_planning_and_what_a_critic_expected():
    made, plain = two_turns(), two_turns(values=False, targets=False)
    text = rollout_page(batch([made], token_text=characters([made])), 1)
    planned = ' data-l="1 1 1" data-s="50 0 0" data-a="-500 2000 0" data-p="1 2" data-v="-250 0 123" data-t="0 500 250"'
    assert f"{planned}>a🙂c</div>" in text
    assert ' data-a="-2000 0" data-p="2" data-v="500 750" data-t="1000 1500">de</div>' in text
    without = rollout_page(batch([plain], token_text=characters([plain])), 1)
    assert CRITIC_MARKS.search(without.split("</style>")[1].split("<script>")[0]) is None
    assert CRITIC_MARKS.sub("", text) == without  # a critic adds these and changes nothing else
    assert 'data-mode="a"' in without
    unplaced = rollout_page(batch([made], token_text=lambda ids: ("something else", [])), 1)
    assert 'data-mode="v"' in unplaced
    assert "data-l=" not in unplaced.split("</style>")[1].split("<script>")[0]
    untrained = rollout_page(batch([group([1.0], [3])]), 1)
    assert 'data-mode="a"' not in untrained
    assert 'data-mode="p"' not in untrained


def test_numbers_of_a_diverged_critic_are_bounded_on_the_page():
    long, length = two_turns(), 2 * SAMPLE_CHARACTERS
    (rollout,) = long.rollouts
    rollout.turns = [Turn((1,), Action(list(range(length)), "x" * length, np.full(length, -1.0), None, "length"))]
    rollout.token_advantages_T = np.zeros(length)
    rollout.planning_T = None
    rollout.values_T = np.full(length, 0.5, dtype=np.float32)
    rollout.values_T[:4] = 3e38, -3e38, np.nan, np.inf
    rollout.value_targets_T = np.full(length, 1.0, dtype=np.float32)
    text = rollout_page(batch([long], token_text=characters([long])), 1)
    values = re.findall(r' data-v="([^"]*)"', text)[0].split()
    assert len(values) == SAMPLE_CHARACTERS
    assert values[:5] == ["1000000000000000", "-1000000000000000", "0", "0", "500"]


def test_summaries_have_the_values_of_a_critic_turn_by_turn(tmp_path):
    both = two_turns()
    both.rollouts[0].turns.append(Turn((9,), Action([], "", np.zeros(0), None, "length")))  # nothing was sampled
    write_files(tmp_path, batch([both, two_turns(values=False, targets=False)]), None)
    with_critic, without = read_jsonl(tmp_path / "train_iteration_000003_rollout_summaries.jsonl")
    means = [(turn["value_mean"], turn["value_target_mean"]) for turn in with_critic["steps"]]
    assert means == [(pytest.approx(-0.1266 / 3), 0.25), (pytest.approx(0.6248), 1.25), (None, None)]
    assert not {"value_mean", "value_target_mean"} & set(without["steps"][0])


def wait_for(browser: Browser, condition: str) -> None:
    """Wait until a JavaScript condition holds: what is in sight is coloured a moment after the click."""
    deadline = time.monotonic() + 10.0
    while not browser.run(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


@needs_chromium
def test_values_and_signed_advantages_are_coloured_and_labelled(tmp_path):
    """Values go from the page's lowest to its highest, advantages from 0 to the largest of either sign."""
    made, flat = two_turns(), two_turns()
    write_files(tmp_path, batch([made], token_text=characters([made])), 1)
    flat.rollouts[0].values_T = np.full(5, 0.5, dtype=np.float32)
    flat.rollouts[0].token_advantages_T = np.zeros(5)
    write_files(tmp_path, batch([flat], iteration=4, token_text=characters([flat])), 1)
    classes = "[...document.querySelectorAll('.sample .t')].map(t => t.className.slice(2)).join()"
    legend = "[...document.querySelectorAll('#legend .t')].map(t => t.textContent).join(' ')"
    readout = '"a" · token 0 · surprisal 0.50 · advantage −0.500 · V −0.250 (target 0.000)'
    with Browser() as browser:
        browser.open(tmp_path / "train_iteration_000003.html")
        assert browser.run(classes) == ""
        for mode, wanted, ends in (
            ("v", "va h0,va h2,va h2,va h5,va h6", "−0.25 0.25 0.75"),
            ("a", "dn h3,up h6,,dn h6,", "−2.00 −0.50 0 +0.50 +2.00"),
            ("v", "va h0,va h2,va h2,va h5,va h6", "−0.25 0.25 0.75"),
        ):
            browser.click(*browser.centre(f"[data-mode={mode}]"))
            wait_for(browser, f"document.querySelectorAll('.sample[data-shown={mode}]').length === 2")
            assert browser.run(classes) == wanted
            assert browser.run(legend) == ends
            browser.mouse("mouseMoved", *browser.centre(".sample .t"))
            assert browser.run("document.getElementById('readout').textContent") == readout
        shades = "[...document.querySelectorAll('.sample .t')].map(t => getComputedStyle(t).backgroundColor)"
        assert browser.run(f"new Set({shades}).size") == 4  # h0, h2 twice, h5, h6
        browser.open(tmp_path / "train_iteration_000004.html", "#color=v")
        assert browser.run("document.getElementById('legend').textContent") == "0.500"  # equal values have no scale
        browser.click(*browser.centre("[data-mode=a]"))
        assert browser.run("document.getElementById('legend').textContent") == "0"
        assert not browser.errors


@pytest.mark.parametrize(
    ("text", "folded", "rest"),
    [
        ("<think>a b</think>c", "<think>a b</think>", "c"),
        ("a b c</think>d", "a b c</think>", "d"),
        ("<think>no end", "<think>no end", ""),
        ("plain", "", "plain"),
        ("<reasoning>x</reasoning>y", "<reasoning>x</reasoning>", "y"),
    ],
)
def test_thinking_is_folded(text, folded, rest):
    made = group([1.0], [3])
    made.rollouts[0].turns[0].action.text = text
    part = rollout_page(batch([made]), 1).split('class="text sample">')[1].split("</article>")[0].split("\n")[0]
    inside = re.search(r'<details class="think"><summary>.*?</summary><div>(.*?)</div></details>', part)
    assert (Reader(inside[1]).texts if inside else [""]) == [folded]
    assert re.sub(r"<details.*?</details>", "", part).removesuffix("</div>") == rest
