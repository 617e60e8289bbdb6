"""The page of one iteration: each prompt once, its samples side by side, tokens coloured on demand.

Prompts, answers and rewards are in the HTML and need no script; scripts add colours and sorting. Attributes of each
sample hold one integer per token, in the base-64 VLQ of source maps: lengths in characters, surprisal in hundredths of
a nat, token advantage in thousandths and, with a critic, values and value targets in thousandths. The planning mask is
stored as run lengths. The constants below bound the size; the page says how much was left out.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from retrain.records.catalogue import ENDED
from retrain.records.measure import collect, env_metrics, mean
from retrain.records.pages import document
from retrain.records.rollouts import (
    LEAST_CHARACTERS,
    Batch,
    Part,
    advantage_of,
    breakdown,
    conversation_of,
    fair_share,
    metrics_of,
    part_names,
)
from retrain.types import MAX_STALENESS, CreditedGroup, CreditedRollout, Message, RewardResult, Turn
from retrain.util.text import minus, percent

SAMPLE_CHARACTERS = 20_000  # Longest text of one sample on a page
# Characters of all samples of a page: with many samples each gets an equal share, at least LEAST_CHARACTERS
PAGE_CHARACTERS = 1_000_000
SAMPLES_SHOWN = 32  # Samples of a group that appear with their texts
LEAST_TURN_CHARACTERS = 500  # Fewest characters shown of each turn
PROMPT_CHARACTERS = 20_000
MAP_GROUPS = 256  # Groups in the overview of rewards
TABLE_ROWS = 1_000  # Trajectories in the table at the end of the page
PARTS_SHOWN = 50  # Numbers of a reward beside each sample, and columns for them in the table
LARGEST_INTEGER = 10**15  # Largest magnitude of integers in attributes, which JavaScript represents exactly
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

_UNDECODED = re.compile("[\ud800-\udfff\ufffd]+")

# Thoughts before an answer: between tags, or up to a closing tag whose opening tag was in the prompt
THINKING = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>\s*|\Z)|\A(?:(?!<think).)*?</think>\s*", re.DOTALL)

DISCARDED = {
    "zero_advantage": "all advantages are 0",
    "no_reward": "nothing could be graded",
    MAX_STALENESS: "too many steps behind the policy",
}


class Chip(NamedTuple):
    text: str
    css: str = ""
    hint: str = ""
    tag: str = "span"


def rollout_page(batch: Batch, num_groups: int) -> str:
    """Return the HTML page. The first ``num_groups`` groups have their texts; the overview and the table of
    trajectories cover the other groups too."""
    groups = batch.groups
    chosen = groups[:num_groups]
    samples = sum(min(len(group.rollouts), SAMPLES_SHOWN) for group in chosen)
    limit = fair_share(PAGE_CHARACTERS, SAMPLE_CHARACTERS, samples)
    return document(
        "rollouts.html", styles=["tokens.css", "pages/rollouts.css"], script="pages/rollouts.js",
        title=f"{batch.title} · {batch.run}", heading=batch.title[:1].upper() + batch.title[1:],
        run=batch.run, condition=batch.condition, iteration=batch.iteration, name=batch.name,
        numbers=_facts(groups), map=_overview(groups), modes=_modes(chosen),
        groups=[_group(batch, group, limit) for group in chosen], hidden=len(groups) - len(chosen),
        trajectories=_table(groups), count=sum(len(group.rollouts) for group in groups),
        prompt_limit=PROMPT_CHARACTERS, answer_limit=LEAST_CHARACTERS,
    )  # fmt: skip


def _facts(groups: Sequence[CreditedGroup]) -> list[tuple[str, str, str]]:
    """Return (name, value, hint) of the iteration's numbers."""
    samples = collect(groups)
    numbers = env_metrics(samples)
    failed = int(np.isnan(samples.reward_N).sum())
    several = any(len(group.rollouts) > 1 for group in groups)
    reward, length = numbers["reward/total"], mean(samples.length_N)
    mixed = ("mixed groups", _percent(numbers["by_group/frac_mixed"]), "rewards differ; only these give a gradient")
    return [
        ("prompts", str(len(groups)), ""),
        ("samples", str(len(samples)), ""),
        ("mean reward", "none" if reward is None else f"{reward:.3f}", ""),
        ("correct", _percent(numbers["correct"]), ""),
        *([mixed] if several else []),
        ("mean length", "none" if length is None else f"{length:.0f} tokens", ""),
        ("cut off", _percent(samples.cut_off), "ended by max_tokens"),
        *([("not graded", str(failed), "")] if failed else []),
    ]


def _percent(share: float | None) -> str:
    return "none" if share is None else percent(share)


def _overview(groups: Sequence[CreditedGroup]) -> dict[str, object]:
    """Return the data of the overview: for each group a row of squares, one per sample, whose colour shows the reward
    between the iteration's smallest and largest."""
    values = [v for group in groups for v in group.rewards_N.tolist() if np.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    scale = high - low or 1.0
    low = low if high > low else min(0.0, low)  # all equal: full where positive, empty where 0

    def square(sample: int, reward: float | None) -> tuple[str, str]:
        if reward is None:
            return "none", "not graded"
        return f"v{round(9 * min(1.0, max(0.0, (reward - low) / scale)))}", f"sample {sample}: {reward:g}"

    return {
        "rows": [
            [square(sample, rollout.reward.total_reward) for sample, rollout in enumerate(group.rollouts)]
            for group in groups[:MAP_GROUPS]
        ],
        "more": len(groups) - MAP_GROUPS,
        "widest": min(32, max((len(group.rollouts) for group in groups), default=1)),
        "single": all(len(group.rollouts) == 1 for group in groups),
        "low": f"{low:g}",
        "high": f"{high:g}",
    }


def _modes(groups: Sequence[CreditedGroup]) -> dict[str, str]:
    """Return the token colourings for which these groups have data: attribute letter (or "none") → name."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    columns = {
        "a": ("advantage", [rollout.token_advantages_T for rollout in rollouts]),
        "v": ("value", [rollout.values_T for rollout in rollouts]),
        "p": ("planning", [rollout.planning_T for rollout in rollouts]),
    }
    known = {letter: name for letter, (name, column) in columns.items() if any(part is not None for part in column)}
    return {"none": "plain", "s": "surprisal"} | known


def _group(batch: Batch, group: CreditedGroup, limit: int) -> dict[str, object]:
    return {
        "prompt": group.prompt,
        "problem": group.prompt.problem,
        "conversation": conversation_of(group.prompt),
        "discarded": DISCARDED.get(group.discarded or ""),
        "single": len(group.rollouts) == 1,
        "samples": [_sample(batch, rollout, limit) for rollout in group.rollouts[:SAMPLES_SHOWN]],
        "more": len(group.rollouts) - SAMPLES_SHOWN,
    }


def _sample(batch: Batch, rollout: CreditedRollout, limit: int) -> dict[str, object]:
    limit = max(LEAST_TURN_CHARACTERS, limit // max(1, len(rollout.turns)))
    reward, advantage = rollout.reward.total_reward, advantage_of(rollout)
    return {
        "reward": "" if reward is None else f"{reward:g}",
        "advantage": "" if advantage is None else f"{advantage:g}",
        "length": len(rollout),
        "chips": list(_chips(rollout)),
        "parts": list(_parts(rollout.reward, batch)),
        "turns": list(_turns(batch, rollout, limit)),
        "limit": limit,
        "logs": list(rollout.reward.logs.items()),
        "error": rollout.reward.error,
    }


def _chips(rollout: CreditedRollout) -> Iterator[Chip]:
    total, advantage = rollout.reward.total_reward, advantage_of(rollout)
    css, sign = ("good", "✓ ") if rollout.reward.is_correct and total is not None else ("bad", "✗ ")
    yield Chip("not graded" if total is None else f"{sign}{total:g}", css, "reward", "b")
    if advantage is not None:
        yield Chip(f"A {_signed(advantage, 2)}", hint="advantage")
    yield Chip(f"{len(rollout):,} tokens")
    if len(rollout.turns) > 1:
        yield Chip(f"{len(rollout.turns)} turns")
    if rollout.ended != "done":
        yield Chip(rollout.ended, "warn", ENDED[rollout.ended][0])
    if rollout.stop_reason == "length":
        yield Chip("cut off", "warn", "ended by max_tokens")


def _turns(batch: Batch, rollout: CreditedRollout, limit: int) -> Iterator[dict[str, object]]:
    end = 0
    for index, turn in enumerate(rollout.turns):
        start, end = end, end + len(turn.action)
        text, tokens = _tokens(batch, rollout, slice(start, end), turn.action.text, limit)
        seen: dict[str, object] = {"observed": ""} if index == 0 else _observation(turn)
        yield seen | {"tokens": tokens, "pieces": list(_pieces(text[:limit])), "left": max(0, len(text) - limit)}


def _observation(turn: Turn) -> dict[str, object]:
    """Render the environment's messages of a turn, or the whole conversation where the environment rewrote it."""
    who = "everything, rewritten" if turn.fresh else ", ".join(dict.fromkeys(_speaker(m) for m in turn.messages))
    heads = [who, f"{len(turn.observation_ids):,} tokens"]
    if turn.reward is not None:
        heads.append(f"reward {_value(turn.reward)}")
    messages = [(_speaker(message), str(message.get("content", ""))) for message in turn.messages]
    beginning = " ".join(messages[-1][1].split())[:60] if messages else ""
    return {"observed": " · ".join(heads), "beginning": beginning, "messages": messages}


def _speaker(message: Message) -> str:
    role, name = str(message.get("role", "user")), message.get("name")
    return f"{role} {name}" if name else role


def _parts(reward: RewardResult, batch: Batch) -> Iterator[tuple[str, list[dict[str, str]], int]]:
    """Yield (label, shown parts, number of parts left out) for the reward's components and then for its other metrics,
    without ``correct``, which the heading shows."""
    components, others = breakdown(reward, batch.weights)
    if [part.value for part in components] == [reward.total_reward] and components[0].adds is None:
        components = []  # the only component is the reward itself
    others = [part for part in others if part.name != "correct"]
    for label, parts in (("reward", components), ("metrics", others)):
        yield label, [_part(part) for part in parts[:PARTS_SHOWN]], max(0, len(parts) - PARTS_SHOWN)


def _part(part: Part) -> dict[str, str]:
    adds = "" if part.adds is None else minus(f"{part.adds:+.3g}") if part.adds else "0"
    return {"name": part.name, "value": _value(part.value), "adds": adds, "how": part.how}


def _value(value: float | None) -> str:
    return "none" if value is None else minus(f"{value:g}")


def _signed(value: float, digits: int) -> str:
    return minus(f"{value:+.{digits}f}") if round(value, digits) else "0"


def _pieces(text: str) -> Iterator[tuple[str, int | None]]:
    """Yield the parts of a text: (answer, None) and (thoughts, number of words)."""
    start = 0
    for match in THINKING.finditer(text):
        if match[0]:
            yield text[start : match.start()], None
            yield match[0], len(match[0].split())
            start = match.end()
    yield text[start:], None


def _tokens(
    batch: Batch, rollout: CreditedRollout, turn: slice, recorded: str, limit: int
) -> tuple[str, dict[str, str]]:
    """Return the text of one action and the token attributes of its HTML element. ``turn`` is the action's slice of the
    rollout's tokens. If the tokens cannot be located in the text, return ``recorded`` and {}."""
    if batch.token_text is None:
        return recorded, {}
    text, offsets = batch.token_text(rollout.token_ids[turn])
    if _UNDECODED.sub("?", text).strip() != _UNDECODED.sub("?", recorded).strip():
        return recorded, {}
    ends_T = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 1]
    ends_T = np.minimum(np.maximum.accumulate(ends_T), limit)
    lengths_T = np.diff(ends_T, prepend=0)
    seen = int((np.cumsum(lengths_T) < min(len(text), limit)).sum()) + 1
    keep = slice(0, min(seen, len(lengths_T)))
    columns = {"l": lengths_T[keep], "s": _scaled(-np.asarray(rollout.logprobs_T)[turn][keep], 100)}
    if rollout.token_advantages_T is not None:
        columns["a"] = _scaled(rollout.token_advantages_T[turn][keep], 1000)
    if rollout.planning_T is not None:
        columns["p"] = _runs(rollout.planning_T[turn][keep])
    if rollout.values_T is not None:
        columns["v"] = _scaled(rollout.values_T[turn][keep], 1000)
        if rollout.value_targets_T is not None:
            columns["t"] = _scaled(rollout.value_targets_T[turn][keep], 1000)
    return text, {name: "".join(map(_vlq, values.tolist())) for name, values in columns.items()}


@lru_cache(1 << 14)
def _vlq(value: int) -> str:
    """Return an integer as base-64 VLQ, as in source maps. The integer is doubled, plus 1 if negative, and written in
    digits of five bits, the lowest first; every digit but the last also has bit 32 set."""
    rest, digits = 2 * abs(value) + (value < 0), ""
    while rest > 31:
        digits += _DIGITS[32 + rest % 32]
        rest //= 32
    return digits + _DIGITS[rest]


def _scaled(values: np.ndarray, factor: float) -> np.ndarray:
    finite = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return np.rint(np.clip(finite * factor, -LARGEST_INTEGER, LARGEST_INTEGER)).astype(np.int64)


def _runs(mask_T: np.ndarray) -> np.ndarray:
    """Return the run lengths of a mask, beginning with a (possibly empty) run of false."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], mask_T]).astype(np.int8)))
    return np.diff(np.concatenate([[0], changes, [len(mask_T)]]))


def _table(groups: Sequence[CreditedGroup]) -> dict[str, object]:
    rollouts = [(index, sample, rollout) for index, group in enumerate(groups)
                for sample, rollout in enumerate(group.rollouts)]  # fmt: skip
    every = part_names(groups)
    names = every[:PARTS_SHOWN]
    rows = []
    for index, sample, rollout in rollouts[:TABLE_ROWS]:
        total, advantage, numbers = rollout.reward.total_reward, advantage_of(rollout), metrics_of(rollout.reward)
        rows.append([
            index,
            rollout.prompt.problem.id[:80],
            sample,
            rollout.stop_reason,
            "none" if total is None else f"{total:g}",
            "" if advantage is None else _signed(advantage, 3),
            rollout.observation_tokens,
            len(rollout),
            *(_value(numbers[name]) if name in numbers else "" for name in names),
        ])  # fmt: skip
    heads = ("group", "problem", "sample", "end", "reward", "advantage", "prompt", "tokens", *names)
    return {
        "heads": heads,
        "rows": rows,
        "left": max(0, len(rollouts) - TABLE_ROWS),
        "names_left": len(every) - len(names),
    }
