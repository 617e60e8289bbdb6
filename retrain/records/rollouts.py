"""Every trajectory of an iteration as data: summary lines, a logtree, and completions with their texts shortened.

The formats are those of the Tinker cookbook, so that readers written for it work. There is one summary line per
trajectory, those of discarded groups included. A logtree is an object with ``title``, ``started_at``, ``path`` and
``root``; its nodes have ``tag``, ``attrs``, ``children`` and, for a conversation, ``data``. Strings among the children
are HTML-escaped, as in the cookbook; the messages in ``data`` are plain text.
"""

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from retrain.records.measure import mean
from retrain.records.schema.base import Row
from retrain.records.schema.rows import Generation, HeldOutCompletion, TrajectorySummary
from retrain.records.scores import answer_of
from retrain.tokenizer import Offsets
from retrain.types import (
    CreditedGroup,
    CreditedRollout,
    EvalRecord,
    Group,
    Message,
    Prompt,
    RewardResult,
    Rollout,
    StepRecord,
)
from retrain.util.text import escape, without_keys

# Maps token ids to their text and the character range [start, end) of each token in it
TokenText = Callable[[Sequence[int]], tuple[str, Offsets]]

MESSAGE_CHARACTERS = 200_000  # Longest message in a logtree; a longer one ends with the number of characters cut
# Characters of all messages of a logtree: with many samples each gets an equal share, at least LEAST_CHARACTERS
LOGTREE_CHARACTERS = 4_000_000
LEAST_CHARACTERS = 2_000
SCHEMA_VERSION = 1
PROMPT_CHARACTERS = 200  # Characters of a completion's prompt in ``emergence/``
COMPLETION_CHARACTERS = 500
SHOWN = 1000  # Characters of a held-out completion; a longer one loses its middle
SHOWN_END = 300


@dataclass(frozen=True)
class Batch:
    """The rollouts of one iteration. ``iteration`` counts the updates before it.

    ``split`` is ``train`` or ``eval/<name>``. ``run`` and ``condition`` name the run. ``started`` is in seconds since
    the epoch. ``token_text`` locates tokens in texts; it is None if that is not possible. ``weights`` maps each
    component of a weighted reward to its weight and offset.
    """

    split: str
    iteration: int
    groups: Sequence[CreditedGroup]
    run: str
    condition: str
    started: float
    token_text: TokenText | None = None
    weights: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Stem of the files: ``train_iteration_000010``, ``eval_<name>_iteration_000010``."""
        return batch_name(self.split, self.iteration)

    @property
    def title(self) -> str:
        _, _, name = self.split.partition("/")
        return f"evaluation {name}, step {self.iteration}" if name else f"step {self.iteration}"


def batch_name(split: str, iteration: int) -> str:
    kind, _, name = split.partition("/")
    return f"{kind}_{sanitised(name)}_iteration_{iteration:06d}" if name else f"{kind}_iteration_{iteration:06d}"


def sanitised(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+~=-]+", "_", name).strip("._") or "unnamed"


def summary_rows(batch: Batch) -> list[Row]:
    return [
        TrajectorySummary(
            schema_version=SCHEMA_VERSION,
            split=batch.split,
            iteration=batch.iteration,
            group_idx=index,
            traj_idx=sample,
            tags=list(dict.fromkeys((*group.prompt.problem.tags, *rollout.reward.tags))),
            sampling_client_step=batch.iteration - rollout.staleness,
            total_reward=rollout.reward.total_reward,
            final_reward=0.0,  # for a whole group; a rollout is rewarded in its last turn
            trajectory_metrics=metrics_of(rollout.reward),
            steps=_turn_rows(rollout),
            final_ob_len=0,
            problem_id=group.prompt.problem.id,
            stop_reason=rollout.stop_reason,
            ended=rollout.ended,
            advantage=advantage_of(rollout),
            discarded=group.discarded,
        ).to_row()
        for index, group in enumerate(batch.groups)
        for sample, rollout in enumerate(group.rollouts)
    ]


def _turn_rows(rollout: CreditedRollout) -> list[Row]:
    """Return one row per turn. ``ob_len`` counts all tokens that the policy saw before it acted, as in the Tinker
    cookbook. The reward of the last turn is the total reward minus the rewards of earlier turns, so that the rewards
    add up to the total."""
    rows, at, context = [], 0, 0
    for index, turn in enumerate(rollout.turns):
        observation = len(turn.observation_ids) + (0 if turn.fresh else context)
        context = observation + len(turn.action)
        row: Row = {
            "step_idx": index,
            "ob_len": observation,
            "ac_len": len(turn.action),
            "reward": turn.reward or 0.0,
            "episode_done": False,
            "stop_reason": turn.action.stop_reason,
            "metrics": dict(turn.metrics),
            "logs": dict(turn.logs),
        }
        if rollout.turn_advantages is not None:
            row["advantage"] = rollout.turn_advantages[index]
        for name, values_T in (("value_mean", rollout.values_T), ("value_target_mean", rollout.value_targets_T)):
            if values_T is not None:
                row[name] = mean(values_T[at : at + len(turn.action)].astype(np.float64))
        rows.append(row)
        at += len(turn.action)
    if not rows:
        return []
    reward, last = rollout.reward, rows[-1]
    earlier = math.fsum(row["reward"] for row in rows[:-1])
    last["reward"] = None if reward.total_reward is None else reward.total_reward - earlier
    last["episode_done"] = True
    last["metrics"] |= metrics_of(reward)
    last["logs"] |= reward.logs
    if reward.error:
        last["logs"]["error"] = reward.error[:500]
    return rows


def metrics_of(reward: RewardResult) -> Row:
    """Return by name: ``correct``, ``format`` if the reward defines one, every component and every sample metric."""
    values: Row = {"correct": float(reward.is_correct)}
    if reward.format_ok is not None:
        values["format"] = float(reward.format_ok)
    return {**reward.sample_metrics, **reward.components, **values}


@dataclass(frozen=True)
class Part:
    """One number of a reward, None if missing. For a component with a weight, ``adds`` is the amount that it adds to
    the total, and ``how`` is the calculation of this amount as text."""

    name: str
    value: float | None
    adds: float | None = None
    how: str = ""


def breakdown(reward: RewardResult, weights: Mapping[str, tuple[float, float]]) -> tuple[list[Part], list[Part]]:
    """Return the components of the total reward, and the other numbers: sample metrics, ``correct`` and ``format``."""
    components = []
    for name, value in reward.components.items():
        if name in weights and value is not None:
            weight, offset = weights[name]
            inner = f"({value:g} {'+' if offset > 0 else '−'} {abs(offset):g})" if offset else f"{value:g}"
            adds = weight * (value + offset)
            components.append(Part(name, value, adds, f"{weight:g} · {inner} = {adds:g}"))
        else:
            components.append(Part(name, value))
    others = {name: value for name, value in metrics_of(reward).items() if name not in reward.components}
    return components, [Part(name, value) for name, value in others.items()]


def part_names(groups: Sequence[CreditedGroup]) -> list[str]:
    rewards = [rollout.reward for group in groups for rollout in group.rollouts]
    components = dict.fromkeys(name for reward in rewards for name in reward.components)
    return list(components | dict.fromkeys(name for reward in rewards for name in metrics_of(reward)))


def advantage_of(rollout: CreditedRollout) -> float | None:
    """Return the rollout's advantage; None if it has none, because it has no reward or belongs to an evaluation."""
    return rollout.advantage if math.isfinite(rollout.advantage) else None


def conversation_of(prompt: Prompt, limit: int | None = None) -> list[dict[str, str]]:
    messages, problem = prompt.messages, prompt.problem.prompt
    if not messages:
        messages = ({"role": "user", "content": problem},) if isinstance(problem, str) else problem
    return _plain(messages, limit)


def _plain(messages: Sequence[Message], limit: int | None) -> list[dict[str, str]]:
    return [
        {**({"name": str(m["name"])} if m.get("name") else {}), "role": str(m.get("role", "user")),
         "content": cut(str(m.get("content", "")), limit)}
        for m in messages
    ]  # fmt: skip


def fair_share(total: int, most: int, count: int) -> int:
    """Return how many characters each of ``count`` texts may have: an equal share of ``total``, but at least
    ``LEAST_CHARACTERS`` and at most ``most``."""
    return min(most, max(LEAST_CHARACTERS, total // max(1, count)))


# -- the logtree ------------------------------------------------------------------------------------------------


def logtree(batch: Batch, num_groups: int) -> Row:
    """Return the tree of one iteration: texts and grading of the first ``num_groups`` groups, and a table of details
    for every group."""
    count = sum(len(group.rollouts) for group in batch.groups[:num_groups])
    limit = fair_share(LOGTREE_CHARACTERS, MESSAGE_CHARACTERS, count)
    title = f"{batch.run}: {batch.title}"
    started = datetime.datetime.fromtimestamp(batch.started, datetime.UTC).isoformat(timespec="seconds")
    children = [node("h1", "lt-title", escape(title)), node("div", "lt-subtitle", f"Generated {started}")]
    for index, group in enumerate(batch.groups):
        body = _group_body(group, limit, batch.weights) if index < num_groups else []
        details = _section("Trajectory Details", 3, [_details_table(group)])
        children.append(_section(f"Group {index}: {group.prompt.problem.id}", 2, [*body, details]))
    if len(batch.groups) > num_groups:
        more = len(batch.groups) - num_groups
        text = f"{more} more groups without their texts: [logging] num_groups_to_log = {num_groups}"
        children.append(node("p", "lt-p", escape(text)))
    return {
        "title": title,
        "started_at": started,
        "path": f"{batch.name}.html",
        "root": node("div", "lt-root", *children),
    }


def node(tag: str, css: str, *children: Row | str, data: Row | None = None) -> Row:
    """Return one node of a logtree; strings among the children must be HTML-escaped."""
    made: Row = {"tag": tag, "attrs": {"class": css} if css else {}, "children": list(children)}
    return made | ({"data": data} if data is not None else {})


def _section(title: str, level: int, body: Sequence[Row]) -> Row:
    heading = node(f"h{level}", f"lt-h{level}", escape(title))
    return node("section", "lt-section", heading, node("div", "lt-section-body", *body))


def _group_body(group: Group, limit: int, weights: Mapping[str, tuple[float, float]]) -> list[Row]:
    prompt = conversation_of(group.prompt, limit)
    body = []
    for sample, rollout in enumerate(group.rollouts):
        reward, messages = rollout.reward, [*prompt]
        for index, turn in enumerate(rollout.turns):
            if turn.fresh:
                messages = _plain(turn.messages, limit)
            elif index:
                messages += _plain(turn.messages, limit)
            messages.append({"role": "assistant", "content": cut(turn.action.text, limit)})
        graded = f"Reward: {_number(reward.total_reward)}, correct: {'yes' if reward.is_correct else 'no'}"
        graded += "" if rollout.ended == "done" else f", ended by {rollout.ended}"
        parts = [
            _conversation(messages),
            node("div", "answer", escape(f"Reference answer: {cut(group.prompt.problem.answer, LEAST_CHARACTERS)}")),
            node("div", "reward", escape(graded)),
            _breakdown_table(reward, weights),
        ]
        parts += [
            node("p", "lt-p", escape(f"{name}: {cut(text, LEAST_CHARACTERS)}")) for name, text in reward.logs.items()
        ]
        if reward.error:
            parts.append(node("p", "lt-p", escape(f"Not graded: {cut(reward.error, LEAST_CHARACTERS)}")))
        body.append(_section(f"Trajectory {sample}", 3, parts))
    return body


def _conversation(messages: list[dict[str, str]]) -> Row:
    lines = [
        node("div", f"lt-message lt-role-{sanitised(message['role'])}",
             node("div", "lt-message-role", escape(message["role"])),
             node("div", "lt-message-content", escape(message["content"])))
        for message in messages
    ]  # fmt: skip
    return node("div", "lt-conversation", *lines, data={"type": "conversation", "messages": messages})


def _breakdown_table(reward: RewardResult, weights: Mapping[str, tuple[float, float]]) -> Row:
    components, others = breakdown(reward, weights)
    rows = [_row("th", ("reward", "value", "adds"))]
    rows += [_row("td", (part.name, _number(part.value), part.how)) for part in components]
    rows += [_row("td", (part.name, _number(part.value), "")) for part in others]
    rows.append(_row("td", ("total", _number(reward.total_reward), "")))
    data = {
        "type": "reward",
        "total": reward.total_reward,
        "components": {part.name: part.value for part in components},
        "adds": {part.name: part.adds for part in components if part.adds is not None},
        "metrics": {part.name: part.value for part in others},
    }
    return node("table", "reward-breakdown", *rows, data=data)


def _details_table(group: CreditedGroup) -> Row:
    names = part_names([group])
    rows = [_row("th", ("trajectory", "tokens read", "ac_len", "reward", "advantage", "stop_reason", *names))]
    for sample, rollout in enumerate(group.rollouts):
        numbers = metrics_of(rollout.reward)
        rows.append(_row("td", (
            str(sample), str(rollout.observation_tokens), str(len(rollout)), _number(rollout.reward.total_reward),
            _number(advantage_of(rollout)), rollout.stop_reason,
            *(_number(numbers.get(name)) if name in numbers else "" for name in names),
        )))  # fmt: skip
    return node("table", "lt-table", *rows)


def _row(tag: str, cells: Sequence[str]) -> Row:
    return node("tr", "", *(node(tag, "", escape(cell)) for cell in cells))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def cut(text: str, limit: int | None) -> str:
    hidden = 0 if limit is None else len(text) - limit
    return text if hidden <= 0 else f"{text[:limit]}\n… {hidden:,} more characters not shown"


# -- completions with their texts shortened ---------------------------------------------------------------------


def generations(record: StepRecord) -> list[Row]:
    return [
        Generation(
            **_common(record.step, rollout),
            completion=rollout.text[:COMPLETION_CHARACTERS],
            group=index,
            sample=sample,
            advantage=rollout.advantage,
        ).to_row()
        for index, group in enumerate(record.groups)
        for sample, rollout in enumerate(group.rollouts)
    ]


def held_out_completions(record: EvalRecord, strict: bool = True) -> list[Row]:
    """Return the lines of ``emergence/evaluations.jsonl``; ``strict`` is passed to ``scores.answer_of``."""
    return [
        HeldOutCompletion(
            **_common(record.step, rollout),
            completion=shortened(rollout.text),
            name=record.name,
            sample=sample,
            tags=list(rollout.prompt.problem.tags),
            answer=answer_of(rollout, strict),
        ).to_row()
        for group in record.groups
        for sample, rollout in enumerate(group.rollouts)
    ]


def shortened(text: str) -> str:
    """Return the text, without its middle if it exceeds ``SHOWN`` characters; the end is kept for the answer."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - SHOWN_END]} […] {text[-SHOWN_END:]}"


def _common(step: int, rollout: Rollout) -> Row:
    reward, messages = rollout.reward, conversation_of(rollout.prompt)
    return {
        "step": step,
        "prompt": (messages[-1]["content"] if messages else rollout.prompt.text)[:PROMPT_CHARACTERS],
        "reward": reward.total_reward,
        "num_tokens": len(rollout),
        "stop_reason": rollout.stop_reason,
        "correct": reward.is_correct,
        "problem_id": rollout.prompt.problem.id,
        "error": without_keys(reward.error) if reward.error else "",
        "reference": rollout.prompt.problem.answer[:PROMPT_CHARACTERS],
    }
