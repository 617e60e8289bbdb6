import json
import re
import string
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from helpers.records import (
    HOSTILE,
    MEGABYTE,
    Reader,
    completion,
    config,
    context,
    evaluation,
    find_conversations,
    group,
    step,
    updated,
    with_action,
)

from retrain.files import read_jsonl
from retrain.records.pages.rollouts import SAMPLE_CHARACTERS, TABLE_ROWS, rollout_page
from retrain.records.recorder import RunRecorder, write_rollouts
from retrain.records.rollouts import MESSAGE_CHARACTERS, Batch, logtree, summary_rows
from retrain.types import Action, CreditedGroup, Group, Problem, Prompt, RewardResult, Turn, single_turn
from retrain.util.text import visible


def batch(groups: Sequence[CreditedGroup], split: str = "train", **changes: Any) -> Batch:
    return Batch(split, 3, groups, "grpo+none_s1", "grpo+none", 1000.0, **changes)


def characters(groups: Sequence[Group]) -> Callable[[Sequence[int]], tuple[str, np.ndarray]]:
    """Return a placement with tokens of one character each, the rest empty; equal ids stand for equal texts."""
    actions = [turn.action for group in groups for rollout in group.rollouts for turn in rollout.turns]
    texts = {tuple(action.token_ids): action.text for action in actions}
    assert all(texts[tuple(action.token_ids)] == action.text for action in actions)

    def place(token_ids: Sequence[int]) -> tuple[str, np.ndarray]:
        text = texts[tuple(token_ids)]
        ends = np.minimum(np.arange(len(token_ids) + 1), len(text))
        return text, np.stack([ends[:-1], ends[1:]], axis=1)

    return place


def find_data(node: Any, kind: str) -> list[dict[str, Any]]:
    found = [node["data"]] if node.get("data", {}).get("type") == kind else []
    return found + [each for child in node["children"] if isinstance(child, dict) for each in find_data(child, kind)]


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


def test_the_cookbook_s_readers_find_conversations_and_rewards_by_component(tmp_path):
    """correct + 0.1·(format − 1): 1 and −0.1 make 0.9; in texts of the first groups, in the details of all of them."""
    parts = [{"type": "math", "weight": 1.0}, {"type": "format", "weight": 0.1, "offset": -1.0}]
    components, metrics = {"math": 1.0, "format": 0.0}, {"steps": 3.0, "score": None}
    weighted = RewardResult(0.9, metrics, components=components, correct=True, format_ok=False)
    many = RewardResult(1.0, {f"m{n}": float(n) for n in range(20)})
    groups = [group([weighted, many], [4, 5]), *(group([weighted, 0.0], [4, 5], problem_id=f"p{i}") for i in range(5))]
    settings = config(reward={"type": "weighted", "components": parts})
    with closing(RunRecorder(tmp_path, context(config=settings))) as recorder:
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
        page = (tmp_path / f"{name}.html").read_text()
        assert '<span title="0.1 · (0 − 1) = -0.1">format 0 <b>−0.1</b></span>' in page
        assert "<span>m19 19</span>" in page


def hostile_group(name: str, text: str) -> CreditedGroup:
    """The text wherever one can stand, also in what an environment answers."""
    made = single_turn(
        Prompt(Problem(text, text, text, (text,) if text else ()), text, (1, 2), ({"role": text, "content": text},)),
        [Action([ord(c) for c in text], text, np.full(len(text), -1.0), None, "stop"), completion(3)],
        [RewardResult(None, {text: 1.0}, (text,), error=text, logs={text: text}), RewardResult(1.0, {name: 1.0})],
    )
    answer = ({"role": text, "name": text, "content": text},)
    turns = (*made.rollouts[1].turns, Turn((3,), completion(2), answer, reward=0.5, logs={"said": text}))
    return updated(
        CreditedGroup.of(made),
        {"planning_T": np.zeros(len(text), bool)},
        {"planning_T": np.ones(5, bool), "advantage": 0.0, "turns": turns},
    )


def test_hostile_texts_are_inert(tmp_path):
    groups = [hostile_group(name, text) for name, text in HOSTILE.items()]
    evaluated = batch(groups, token_text=characters(groups), split="eval/" + HOSTILE["path"])
    assert re.fullmatch(r"eval_[\w.+~=-]+_iteration_000003", evaluated.name)
    write_rollouts(tmp_path, evaluated, len(groups))
    text = (tmp_path / f"{evaluated.name}.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.tags.count("script") == 1
    assert not {"img", "svg", "link", "iframe", "object", "base", "form"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on") or name == "src"]
    assert {value for name, value in reader.attributes if name == "href"} == {f"#g{i}" for i in range(len(groups))}
    shown = "".join(reader.texts)
    assert all(visible(hostile) in shown for hostile in HOSTILE.values())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    tree = json.loads((tmp_path / f"{evaluated.name}_logtree.json").read_text(encoding="utf-8"))
    check_node(tree["root"])
    assert len(find_conversations(tree["root"])) == 2 * len(groups)


def test_pages_are_bounded_and_say_what_is_left_out():
    groups = [group([1.0, 0.0], [4, 5]) for _ in range(700)]
    for sample, length in enumerate((4, 5)):
        token_ids = [1000 + token for token in range(length)]
        groups[0] = with_action(groups[0], sample, text=MEGABYTE, token_ids=token_ids)
    groups[0] = updated(groups[0], {"reward": RewardResult(None, error=MEGABYTE)})
    text = rollout_page(batch(groups, token_text=characters(groups)), 4)
    assert len(text) < 1_500_000
    assert f"{len(MEGABYTE) - SAMPLE_CHARACTERS:,} more characters not shown" in text
    assert "696 more groups are not shown with their texts" in text
    assert f"{1400 - TABLE_ROWS} more not shown" in text
    message = find_conversations(logtree(batch(groups), 4)["root"])[0]["messages"][1]["content"]
    assert message.endswith(f"{len(MEGABYTE) - MESSAGE_CHARACTERS:,} more characters not shown")
    many = [group([0.0] * 64, [4] * 64)]
    assert "32 more samples not shown" in rollout_page(batch(many), 1)


def test_a_page_of_four_groups_of_eight_takes_at_most_150_kb_and_reads_without_its_script():
    """Answers of 300 words, a token each, with surprisal, token advantages and planning."""
    length, words = 300, ["so", "we", "compute", "12", "+", "30", ",", "which", "is", "42"] * 30
    starts = [0, *accumulate(len(word) + 1 for word in words[:-1])]
    offsets = [(start, start + len(word)) for start, word in zip(starts, words, strict=True)]
    groups = [group([1.0, 0.0] * 4, [length] * 8, problem_id=f"p{number}") for number in range(4)]
    for sample in range(8):
        groups = [with_action(each, sample, text=" ".join(words), token_ids=[*range(length)]) for each in groups]
    credit = {"token_advantages_T": np.linspace(-1, 1, length), "planning_T": np.arange(length) % 9 == 0}
    made = batch([updated(each, *[credit] * 8) for each in groups], token_text=lambda ids: (" ".join(words), offsets))
    text = rollout_page(made, 4)
    assert text.count(" data-l=") == 32
    assert len(text.encode()) <= 150_000
    shown = "".join(Reader(text.split("<script>")[0]).texts)
    assert shown.count(" ".join(words)) == 32
    assert shown.count("✓ 1") == 16
    assert all(f"p{number}" in shown for number in range(4))


def two_turns(critic: bool = True) -> CreditedGroup:
    """One episode of two turns, of three and two tokens, perhaps with a critic."""
    first = Action([1, 2, 3], "a🙂c", np.array([-0.5, -0.004, -np.inf]), None, "stop")
    second = Action([4, 5], "de", np.array([-0.25, -3.0]), None, "stop")
    made = single_turn(Prompt(Problem("p", "q", "a"), "q", (1,)), [first], [RewardResult(1.0)])
    turn = Turn((7, 8), second, ({"role": "user", "content": "<b>go on</b>"},))
    credit = {
        "turns": (*made.rollouts[0].turns, turn),
        "advantage": 0.5,
        "token_advantages_T": np.array([-0.5, 2.0, 0.0004, -1.9996, np.nan]),
        "planning_T": np.array([False, True, True, False, False]),
    }
    if critic:
        credit["values_T"] = np.array([-0.25, 0.0, 0.1234, 0.4996, 0.75], dtype=np.float32)
        credit["value_targets_T"] = np.array([0.0, 0.5, 0.25, 1.0, 1.5], dtype=np.float32)
    return updated(CreditedGroup.of(made), credit)


def test_a_turn_has_the_means_of_a_critic_s_values_over_its_own_tokens():
    (with_critic,), (without,) = (summary_rows(batch([two_turns(critic)])) for critic in (True, False))
    first, second = with_critic["steps"]
    assert (first["value_mean"], second["value_mean"]) == pytest.approx((-0.1266 / 3, 1.2496 / 2))
    assert (first["value_target_mean"], second["value_target_mean"]) == (0.25, 1.25)
    assert not any(key.startswith("value") for turn in without["steps"] for key in turn)


def body(text: str) -> str:
    """Return a page without its styles and scripts."""
    return text.split("</style>")[1].split("<script>")[0]


def integers(text: str) -> list[int]:
    """Decode the base-64 VLQ of source maps: a digit of 32 or more has another after it, the lowest bit is the sign."""
    digits = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
    numbers = re.findall(f"[{digits[32:]}]*[{digits[:32]}]", text)
    sums = [sum(digits.index(c) % 32 << 5 * place for place, c in enumerate(number)) for number in numbers]
    return [-(number >> 1) if number & 1 else number >> 1 for number in sums]


def attributes_of(text: str) -> list[tuple[str, dict[str, list[int]]]]:
    """Return every text of the policy with the numbers of its tokens."""
    found = re.findall(r'<div class="text sample"([^>]*)>([^<]*)</div>', text)
    pairs = [(said, re.findall(r' data-(\w)="([^"]*)"', numbers)) for numbers, said in found]
    return [(said, {name: integers(digits) for name, digits in numbers}) for said, numbers in pairs]


def test_tokens_carry_surprisal_advantage_planning_and_the_values_of_a_critic():
    made, plain = two_turns(), two_turns(critic=False)
    text = rollout_page(batch([made], token_text=characters([made])), 1)
    tokens = {"l": [1, 1, 1], "s": [50, 0, 0], "a": [-500, 2000, 0], "p": [1, 2]}
    of_critic = {"v": [-250, 0, 123], "t": [0, 500, 250]}
    second = {"l": [1, 1], "s": [25, 300], "a": [-2000, 0], "p": [2], "v": [500, 750], "t": [1000, 1500]}
    assert attributes_of(text) == [("a🙂c", tokens | of_critic), ("de", second)]
    assert ' data-l="CCC" data-s="kDAA"' in text  # as source maps write 1, 1, 1 and 50, 0, 0
    without = body(rollout_page(batch([plain], token_text=characters([plain])), 1))
    assert 'data-mode="a"' in without
    assert not re.search(r' data-[vt]="|data-mode="v"', without)
    unplaced = body(rollout_page(batch([made], token_text=lambda ids: ("something else", [])), 1))
    assert 'data-mode="v"' in unplaced
    assert "data-l=" not in unplaced
    diverged_T = np.array([3e38, -3e38, np.nan, np.inf, 0.5], dtype=np.float32)
    made = updated(made, {"values_T": diverged_T})
    text = rollout_page(batch([made], token_text=characters([made])), 1)
    assert [numbers["v"] for _, numbers in attributes_of(text)] == [[10**15, -(10**15), 0], [0, 500]]


@pytest.mark.parametrize(("text", "folded", "rest"), [
    ("<think>a b</think>c", "<think>a b</think>", "c"), ("<think>no end", "<think>no end", ""), ("plain", "", "plain"),
])  # fmt: skip
def test_thinking_is_folded(text, folded, rest):
    made = with_action(group([1.0], [3]), text=text)
    part = rollout_page(batch([made]), 1).split('class="text sample">')[1].split("</article>")[0].split("\n")[0]
    inside = re.search(r'<details class="think"><summary>.*?</summary><div>(.*?)</div></details>', part)
    assert (Reader(inside[1]).texts if inside else [""]) == [folded]
    assert re.sub(r"<details.*?</details>", "", part).removesuffix("</div>") == rest
