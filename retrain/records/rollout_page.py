"""The page of one iteration: each prompt once, its samples side by side, tokens coloured on demand.

Without scripts the page is complete except for the colours. Each sample carries its tokens as short integer lists in
attributes: lengths in characters, surprisal in hundredths of a nat, token advantage in thousandths, the planning mask
as run lengths and, with a critic, values and value targets in thousandths. The size is bounded by the constants below;
what is left out is counted on the page.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from retrain.records.catalogue import ENDED
from retrain.records.html import asset, facts, page, table
from retrain.records.measure import collect, env_metrics, mean
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
from retrain.records.text import escape, minus, percent
from retrain.types import MAX_STALENESS, CreditedGroup, CreditedRollout, Message, RewardResult, Turn

SAMPLE_CHARACTERS = 20_000  # Longest text of one sample on a page
PAGE_CHARACTERS = 1_000_000
"""Texts of all samples of a page together: with many samples each gets its share, at least 2,000 characters."""
SAMPLES_SHOWN = 32  # Samples of a group that appear with their texts
LEAST_TURN_CHARACTERS = 500  # Fewest characters shown of each turn
PROMPT_CHARACTERS = 20_000
MAP_GROUPS = 256  # Groups in the overview of rewards
TABLE_ROWS = 1_000  # Trajectories in the table at the end of the page
PARTS_SHOWN = 50  # Numbers of a reward beside each sample, and columns for them in the table
LARGEST_INTEGER = 10**15  # Magnitude at which the integers of the attributes end; a script counts so far exactly

_UNDECODED = re.compile("[\ud800-\udfff\ufffd]+")

THINKING = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>\s*|\Z)|\A(?:(?!<think).)*?</think>\s*", re.DOTALL)
"""What a model thinks before it answers: between tags, or up to a closing tag whose opening stood in the prompt."""


def rollout_page(batch: Batch, shown: int) -> str:
    """The page; the first ``shown`` groups appear with their texts, every group in the overview and the table."""
    groups = batch.groups
    chosen = groups[:shown]
    samples = sum(min(len(group.rollouts), SAMPLES_SHOWN) for group in chosen)
    limit = fair_share(PAGE_CHARACTERS, SAMPLE_CHARACTERS, samples)
    cards = [_group_card(batch, index, group, limit) for index, group in enumerate(chosen)]
    hidden = len(groups) - len(chosen)
    if hidden:
        where = "(<code>[logging] num_groups_to_log</code>); they are in the overview and the table."
        cards.append(_muted(f"{hidden} more groups are not shown with their texts {where}"))
    steps = f"{batch.iteration}\n{'step' if batch.iteration == 1 else 'steps'}"
    body = f"""<header><h1>{escape(batch.title[:1].upper() + batch.title[1:])}</h1>
<p class="muted">{escape(batch.run)} · {escape(batch.condition)} · sampled by the policy after {steps}</p></header>
{_facts(groups)}
{_overview(groups, len(chosen))}
{_toolbar(chosen)}
{"".join(cards)}
{_table(groups, batch.name)}"""
    title = f"{batch.title} · {batch.run}"
    return page(title, body, styles=asset("rollouts.css"), script=asset("rollouts.js"))


def _muted(html: str) -> str:
    return f'<p class="muted">{html}</p>'


def _facts(groups: Sequence[CreditedGroup]) -> str:
    samples = collect(groups)
    numbers = env_metrics(samples)
    failed = int(np.isnan(samples.reward_N).sum())
    several = any(len(group.rollouts) > 1 for group in groups)
    reward, length = numbers["reward/total"], mean(samples.length_N)
    mixed = _percent(numbers["by_group/frac_mixed"])
    return facts([
        ("prompts", str(len(groups))),
        ("samples", str(len(samples))),
        ("mean reward", "none" if reward is None else f"{reward:.3f}"),
        ("correct", _percent(numbers["correct"])),
        *([("mixed groups", mixed, "rewards differ; only these give a gradient")] if several else []),
        ("mean length", "none" if length is None else f"{length:.0f} tokens"),
        ("cut off", _percent(samples.cut_off), "ended by max_tokens"),
        *([("not graded", str(failed))] if failed else []),
    ])  # fmt: skip


def _percent(share: float | None) -> str:
    return "none" if share is None else percent(share)


def _overview(groups: Sequence[CreditedGroup], linked: int) -> str:
    """One row of squares per group, coloured by reward between the smallest and the largest of the iteration."""
    values = [v for group in groups for v in group.rewards_N.tolist() if np.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    scale = high - low or 1.0
    low = low if high > low else min(0.0, low)  # all equal: full where positive, empty where 0
    rows = []
    for index, group in enumerate(groups[:MAP_GROUPS]):
        squares = "".join(
            '<i class="none" title="not graded"></i>' if rollout.reward.total_reward is None else
            f'<i class="v{round(9 * min(1.0, max(0.0, (rollout.reward.total_reward - low) / scale)))}" '
            f'title="sample {sample}: {rollout.reward.total_reward:g}"></i>'
            for sample, rollout in enumerate(group.rollouts)
        )  # fmt: skip
        name = f'<a href="#g{index}">{index}</a>' if index < linked else str(index)
        rows.append(f"<div><b>{name}</b>{squares}</div>")
    more = len(groups) - MAP_GROUPS
    note = _muted(f"{more} more groups not shown") if more > 0 else ""
    widest = min(32, max((len(group.rollouts) for group in groups), default=1))
    single = " single" if all(len(group.rollouts) == 1 for group in groups) else ""
    legend = (
        f'<span class="muted">reward {low:g} <i class="v0"></i><i class="v4"></i><i class="v9"></i> {high:g}</span>'
    )
    return (
        f'<section class="map{single}" style="--n:{widest}"><h2>Rewards {legend}</h2>'
        f'<div class="rows">{"".join(rows)}</div>{note}</section>'
    )


def _toolbar(groups: Sequence[CreditedGroup]) -> str:
    if not groups:
        return ""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    modes = {"none": "plain", "s": "surprisal"}
    if any(rollout.token_advantages_T is not None for rollout in rollouts):
        modes["a"] = "advantage"
    if any(rollout.values_T is not None for rollout in rollouts):
        modes["v"] = "value"
    if any(rollout.planning_T is not None for rollout in rollouts):
        modes["p"] = "planning"
    buttons = "".join(
        f'<button type="button" data-mode="{mode}" aria-pressed="{str(mode == "none").lower()}">{name}</button>'
        for mode, name in modes.items()
    )
    return (
        '<div class="toolbar no-print" id="toolbar"><span class="muted">colour tokens by</span>'
        f'<span class="modes">{buttons}</span><span class="legend" id="legend"></span>'
        '<button type="button" id="unfold" hidden>unfold thinking</button>'
        '<output class="mono" id="readout"></output></div>'
    )


DISCARDED = {
    "zero_advantage": "all advantages are 0",
    "no_reward": "nothing could be graded",
    MAX_STALENESS: "too many steps behind the policy",
}
"""Why a group did not train."""


def _group_card(batch: Batch, index: int, group: CreditedGroup, limit: int) -> str:
    problem = group.prompt.problem
    chips = "".join(f'<span class="chip">{escape(tag)}</span>' for tag in problem.tags)
    if group.discarded in DISCARDED:
        chips += f'<span class="chip warn">did not train: {DISCARDED[group.discarded]}</span>'
    messages = [_message(m["role"], m["content"], PROMPT_CHARACTERS) for m in conversation_of(group.prompt)]
    if problem.answer:
        messages.append(_message("answer", problem.answer, LEAST_CHARACTERS))
    samples = [_sample(batch, sample, rollout, limit) for sample, rollout in enumerate(group.rollouts[:SAMPLES_SHOWN])]
    more = len(group.rollouts) - len(samples)
    left = _muted(f"{more} more samples not shown; they are in the table.") if more > 0 else ""
    single = " one" if len(group.rollouts) == 1 else ""
    return f"""<section class="group{single}" id="g{index}"><h2>Group {index}
<span class="muted">{escape(problem.id)}</span>{chips}</h2><div class="card prompt">{"".join(messages)}
<details class="raw"><summary>as the model read it · {len(group.prompt.token_ids)} tokens</summary>
<div class="text mono">{_shortened(group.prompt.text, PROMPT_CHARACTERS)}</div></details></div>
<div class="samples">{"".join(samples)}</div>{left}</section>"""


def _message(role: str, text: str, limit: int) -> str:
    body = f'<div class="text">{_shortened(text, limit)}</div>'
    return f'<div class="message"><span class="role">{escape(role)}</span>{body}</div>'


def _sample(batch: Batch, sample: int, rollout: CreditedRollout, limit: int) -> str:
    reward, advantage = rollout.reward, advantage_of(rollout)
    total = reward.total_reward
    css, sign = ("good", "✓ ") if reward.is_correct and total is not None else ("bad", "✗ ")
    shown = "not graded" if total is None else f"{sign}{total:g}"
    chips = [f'<b class="{css}" title="reward">{shown}</b>']
    if advantage is not None:
        chips.append(f'<span title="advantage">A {_signed(advantage, 2)}</span>')
    chips.append(f"<span>{len(rollout):,} tokens</span>")
    if len(rollout.turns) > 1:
        chips.append(f"<span>{len(rollout.turns)} turns</span>")
    if rollout.ended != "done":
        chips.append(f'<span class="warn" title="{escape(ENDED[rollout.ended][0])}">{escape(rollout.ended)}</span>')
    if rollout.stop_reason == "length":
        chips.append('<span class="warn" title="ended by max_tokens">cut off</span>')
    error = f'<p class="bad small">{_shortened(reward.error, 500)}</p>' if reward.error else ""
    turns = "".join(_turns(batch, rollout, max(LEAST_TURN_CHARACTERS, limit // max(1, len(rollout.turns)))))
    return f"""<article class="card"><header><span class="muted">#{sample}</span>{"".join(chips)}</header>
{_parts(reward, batch)}{turns}{error}</article>"""


def _turns(batch: Batch, rollout: CreditedRollout, limit: int) -> Iterator[str]:
    """What the policy said in each turn, and between, folded, what it read."""
    at = 0
    for index, turn in enumerate(rollout.turns):
        own = slice(at, at + len(turn.action))
        at = own.stop
        if index:
            yield _observation(turn, limit)
        text, data = _tokens(batch, rollout, own, turn.action.text, limit)
        left = len(text) - limit
        note = _muted(f"{left:,} more characters not shown") if left > 0 else ""
        yield f'<div class="text sample"{data}>{_folded(text[:limit])}</div>\n{note}'


def _observation(turn: Turn, limit: int) -> str:
    """The messages that answered an action, or the whole conversation where it was rewritten."""
    who = "everything, rewritten" if turn.fresh else ", ".join(dict.fromkeys(_speaker(m) for m in turn.messages))
    facts = [who, f"{len(turn.observation_ids):,} tokens"]
    if turn.reward is not None:
        facts.append(f"reward {_value(turn.reward)}")
    shown = "".join(_message(_speaker(m), str(m.get("content", "")), limit) for m in turn.messages)
    first = " ".join(str(turn.messages[-1].get("content", "")).split())[:60] if turn.messages else ""
    return (
        f'<details class="observation"><summary>{escape(" · ".join(facts))} <span>{escape(first)}</span></summary>'
        f"{shown}</details>"
    )


def _speaker(message: Message) -> str:
    role, name = str(message.get("role", "user")), message.get("name")
    return f"{role} {name}" if name else role


def _parts(reward: RewardResult, batch: Batch) -> str:
    """What the total is made of, and the reward's other numbers; ``correct`` stands in the heading already."""
    components, others = breakdown(reward, batch.weights)
    if [part.value for part in components] == [reward.total_reward] and components[0].adds is None:
        components = []  # the only component is the reward itself
    others = [part for part in others if part.name != "correct"]
    lines = []
    for label, parts in (("reward", components), ("metrics", others)):
        spans = [_part(part) for part in parts[:PARTS_SHOWN]]
        if len(parts) > PARTS_SHOWN:
            spans.append(f"<span>{len(parts) - PARTS_SHOWN} more not shown</span>")
        if spans:
            lines.append(f'<div class="parts"><i>{label}</i>{"".join(spans)}</div>')
    return "".join(lines)


def _value(value: float | None) -> str:
    return "none" if value is None else minus(f"{value:g}")


def _part(part: Part) -> str:
    text = f"{escape(part.name)} {_value(part.value)}"
    if part.adds is None:
        return f"<span>{text}</span>"
    adds = minus(f"{part.adds:+.3g}") if part.adds else "0"
    return f'<span title="{escape(part.how)}">{text} <b>{adds}</b></span>'


def _signed(value: float, digits: int) -> str:
    """With its sign, a true minus; 0 as such."""
    return minus(f"{value:+.{digits}f}") if round(value, digits) else "0"


def _shortened(text: str, limit: int) -> str:
    """Escaped text up to ``limit`` characters, then how many more there are."""
    left = len(text) - limit
    more = f' <span class="muted">… {left:,} more characters not shown</span>' if left > 0 else ""
    return escape(text[:limit]) + more


def _folded(text: str) -> str:
    html, start = [], 0
    for match in THINKING.finditer(text):
        if match[0]:
            words = len(match[0].split())
            html.append(
                f'{escape(text[start : match.start()])}<details class="think"><summary>thinking · {words:,} words'
                f"</summary><div>{escape(match[0])}</div></details>"
            )
            start = match.end()
    return "".join([*html, escape(text[start:])])


def _tokens(batch: Batch, rollout: CreditedRollout, own: slice, said: str, limit: int) -> tuple[str, str]:
    """The text of an action, whose tokens are ``own`` of the rollout's, and the attributes with these tokens; no
    attributes when they cannot be placed in the text."""
    if batch.token_text is None:
        return said, ""
    text, offsets = batch.token_text(rollout.token_ids[own])
    if _UNDECODED.sub("?", text).strip() != _UNDECODED.sub("?", said).strip():
        return said, ""
    ends_T = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 1]
    ends_T = np.minimum(np.maximum.accumulate(ends_T), limit)
    lengths_T = np.diff(ends_T, prepend=0)
    seen = int((np.cumsum(lengths_T) < min(len(text), limit)).sum()) + 1
    keep = slice(0, min(seen, len(lengths_T)))
    columns = {"l": lengths_T[keep], "s": _scaled(-np.asarray(rollout.logprobs_T)[own][keep], 100)}
    if rollout.token_advantages_T is not None:
        columns["a"] = _scaled(rollout.token_advantages_T[own][keep], 1000)
    if rollout.planning_T is not None:
        columns["p"] = _runs(rollout.planning_T[own][keep])
    if rollout.values_T is not None:
        columns["v"] = _scaled(rollout.values_T[own][keep], 1000)
        if rollout.value_targets_T is not None:
            columns["t"] = _scaled(rollout.value_targets_T[own][keep], 1000)
    return text, "".join(f' data-{name}="{" ".join(map(str, values.tolist()))}"' for name, values in columns.items())


def _scaled(values: np.ndarray, factor: float) -> np.ndarray:
    """Integers of ``values`` times ``factor``; what is not finite counts as 0."""
    finite = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return np.rint(np.clip(finite * factor, -LARGEST_INTEGER, LARGEST_INTEGER)).astype(np.int64)


def _runs(mask_T: np.ndarray) -> np.ndarray:
    """Run lengths of a mask, beginning with a (possibly empty) run of false."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], mask_T]).astype(np.int8)))
    return np.diff(np.concatenate([[0], changes, [len(mask_T)]]))


def _table(groups: Sequence[CreditedGroup], name: str) -> str:
    """Every trajectory in one row."""
    rollouts = [(index, sample, rollout) for index, group in enumerate(groups)
                for sample, rollout in enumerate(group.rollouts)]  # fmt: skip
    every = part_names(groups)
    names = every[:PARTS_SHOWN]
    rows = []
    for index, sample, rollout in rollouts[:TABLE_ROWS]:
        total, advantage, numbers = rollout.reward.total_reward, advantage_of(rollout), metrics_of(rollout.reward)
        rows.append([
            str(index),
            escape(rollout.prompt.problem.id[:80]),
            str(sample),
            escape(rollout.stop_reason),
            "none" if total is None else f"{total:g}",
            "" if advantage is None else _signed(advantage, 3),
            str(rollout.observation_tokens),
            str(len(rollout)),
            *(_value(numbers[each]) if each in numbers else "" for each in names),
        ])  # fmt: skip
    heads = ("group", "problem", "sample", "end", "reward", "advantage", "prompt", "tokens", *names)
    left, more = len(rollouts) - len(rows), ""
    if left:
        more += _muted(f"{left:,} more not shown")
    if len(every) > len(names):
        more += _muted(f"{len(every) - len(names)} more numbers of the reward not shown")
    return f"""<details class="all"><summary>All {len(rollouts):,} trajectories</summary>
<p class="muted">The same and more, as JSON lines: <code>{escape(name)}_rollout_summaries.jsonl</code></p>
{table(heads, rows, {1, 3})}{more}</details>"""
