import json

import numpy as np
import pytest
from helpers.records import group, with_action
from safetensors.numpy import load_file

from retrain.errors import CheckpointError
from retrain.files import read_jsonl
from retrain.records.rollouts import Batch
from retrain.records.schema.layout import TRAIN
from retrain.records.tokens import TokenFile, tokens_name, write_tokens
from retrain.types import Action, CreditedGroup, CreditedRollout, Problem, Prompt, RewardResult, Turn


def words(token_ids):
    """Token n is written as the letter n."""
    text = "".join(chr(97 + token) for token in token_ids)
    return text, [(i, i + 1) for i in range(len(text))]


def episode() -> CreditedRollout:
    """Two turns, the second after a rewritten conversation, and one with a hostile text."""
    said = Action([0, 1], "ab", np.array([-1.0, -2.0]), np.array([0.1, 0.2]), "stop", policy_version=3)
    then = Action([2, 3, 4], "cde", np.array([-3.0, -4.0, -5.0]), np.array([0.3, 0.4, 0.5]), "length", policy_version=4)
    message = {"role": "tool", "content": "<script>é\u2028" + "x" * 300_000}
    turns = (Turn((7, 8, 9), said), Turn((5,), then, (message,), reward=0.5, metrics={"calls": 1.0}))
    return CreditedRollout(
        Prompt(Problem("p", "ask", "42", ("t",)), "ask", (7, 8, 9)), turns, RewardResult(1.0), advantage=2.0,
        token_advantages_T=np.arange(5.0), planning_T=np.array([0, 1, 0, 0, 0], bool),
        loss_mask_T=np.array([1, 1, 1, 1, 0], bool),
        old_logprobs_T=np.array([-1.5, -2.0, -3.0, -4.0, -5.0], np.float32),
    )  # fmt: skip


def batch(split: str, groups: list[CreditedGroup], **more) -> Batch:
    return Batch(split, 10, groups, "run", "grpo+none", 1000.0, **{"token_text": words} | more)


def test_a_rollout_comes_back_token_for_token_with_its_whole_text(tmp_path):
    one = episode()
    path = write_tokens(tmp_path, batch(TRAIN, [group([1.0, 0.0, None], [3, 4, 2]), CreditedGroup(one.prompt, (one,))]))
    assert path.name == "tokens_000010.safetensors"
    expected = {
        "ids": [7, 8, 9, 0, 1, 5, 2, 3, 4], "action": [0, 0, 0, 1, 1, 0, 1, 1, 1], "logprobs": [-1, -2, -3, -4, -5],
        "trainer_logprobs": [-1.5, -2, -3, -4, -5], "entropy": pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5]),
        "advantages": [0, 1, 2, 3, 4], "planning": [0, 1, 0, 0, 0], "trained": [1, 1, 1, 1, 0],
        "versions": [3, 3, 4, 4, 4],
    }  # fmt: skip
    with TokenFile(path) as file:
        found, ungraded = file.rollout(3), file.rollout(2)
        for name, values in expected.items():
            assert found.arrays[name].tolist() == values
        assert found.pieces() == [["a", "b"], ["c", "d", "e"]]
        assert (found.prompt["reference"], found.prompt["messages"]) == ("42", [{"role": "user", "content": "ask"}])
        turn = found.line["turns"][1]
        assert turn["messages"] == [{"role": "tool", "content": "<script>é\u2028" + "x" * 300_000}]
        assert (turn["reward"], turn["metrics"], turn["stop_reason"]) == (0.5, {"calls": 1.0}, "length")
        assert (ungraded.line["reward"], ungraded.line["error"]) == (None, "timed out")
        assert np.isnan(ungraded.arrays["advantages"]).all()
        with pytest.raises(IndexError, match="has 4 rollouts"):
            file.rollout(4)
        tensors = load_file(path)  # safetensors' own reader
        for name, values in expected.items():
            assert tensors[name].tolist()[-len(found.arrays[name]) :] == values


def test_an_evaluation_has_no_advantages_and_a_batch_may_be_empty(tmp_path):
    with TokenFile(write_tokens(tmp_path, batch("eval/hard set", [group([1.0], [3])]))) as file:
        assert file.path.name == tokens_name("eval/hard set", 10) == "tokens_eval_hard_set_000010.safetensors"
        assert sorted(file.names) == ["action", "ends", "entropy", "ids", "logprobs"]
    with TokenFile(write_tokens(tmp_path, batch(TRAIN, []))) as file:
        assert (len(file), list(file.lines()), file.prompts()) == (0, [], [])
    prompt = Prompt(Problem("p", "ask", "42"), "ask", (7,))
    nothing = CreditedRollout(prompt, (), RewardResult(None, error="raised"), ended="raised")
    groups = [CreditedGroup(prompt, (nothing,)), with_action(group([1.0], [3]), entropy_T=None)]
    with TokenFile(write_tokens(tmp_path, batch(TRAIN, groups, token_text=None))) as file:
        assert "entropy" not in file.names  # an engine that gives none
        assert file.rollout(0).pieces() == []
        assert file.rollout(1).pieces() == [["so \\boxed{4}", "", ""]]  # nobody can place its tokens
        assert file.rollout(1).arrays["trained"].tolist() == [0, 0, 0]  # it has no advantages


def test_what_is_no_file_of_tokens_is_told_and_nothing_outside_of_it_is_read(tmp_path):
    path = write_tokens(tmp_path, batch(TRAIN, [group([1.0, 0.0], [3, 4])]))
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for size in (0, 20, 8 + length, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="no file of tokens, or cut short"):
            TokenFile(path)
    header = json.loads(whole[8 : 8 + length])
    header["ids"]["data_offsets"] = [0, 10**9]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    with pytest.raises(CheckpointError, match="outside"):
        TokenFile(path)


def test_a_run_keeps_the_advantages_that_its_tokens_train_with(mixed_campaign):
    seen = 0
    for path in sorted((mixed_campaign / "out" / "runs").glob("*/tokens_0*.safetensors")):
        rows = {row["step"]: row for row in read_jsonl(path.parent / "metrics.jsonl")}
        tensors = load_file(path)
        if not rows[int(path.stem.removeprefix("tokens_"))]["num_datums"]:
            assert "trainer_logprobs" not in tensors
            continue
        trained, advantages = tensors["trained"].astype(bool), tensors["advantages"]
        assert np.isfinite(advantages[trained]).all()
        assert np.isnan(advantages[~trained]).all()
        assert np.abs(advantages[trained]).max() > 0
        seen += 1
    assert seen
