"""The page of one iteration: each prompt once, its samples side by side, tokens coloured on demand.

Without scripts the page is complete except for the colours. Each sample carries its tokens as short integer lists in
attributes: lengths in characters, surprisal in hundredths of a nat, token advantage in thousandths, and the planning
mask as run lengths. The size is bounded by the constants below; what is left out is counted on the page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.record.html import asset, escape, page
from retrain.record.numbers import minus, percent
from retrain.record.rollouts import (
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
from retrain.types import Group, RewardResult, Rollout

SAMPLE_CHARACTERS = 20_000
"""Longest text of one sample on a page."""
PAGE_CHARACTERS = 1_000_000
"""Texts of all samples of a page together: with many samples each gets its share, at least 2,000 characters."""
SAMPLES_SHOWN = 32
"""Samples of a group that appear with their texts."""
PROMPT_CHARACTERS = 20_000
MAP_GROUPS = 256
"""Groups in the overview of rewards."""
TABLE_ROWS = 1_000
"""Trajectories in the table at the end of the page."""
PARTS_SHOWN = 50
"""Numbers of a reward beside each sample, and columns for them in the table."""

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
        cards.append(
            f'<p class="muted">{hidden} more groups are not shown with their texts '
            "(<code>[logging] num_groups_to_log</code>); they are in the overview and the table.</p>"
        )
    body = f"""<header><h1>{escape(batch.title[:1].upper() + batch.title[1:])}</h1>
<p class="muted">{escape(batch.run)} · {escape(batch.condition)} · sampled by the policy after {batch.policy_step}
{"update" if batch.policy_step == 1 else "updates"}</p></header>
{_facts(groups)}
{_overview(groups, len(chosen))}
{_toolbar(chosen)}
{"".join(cards)}
{_table(groups, batch.name)}"""
    title = f"{batch.title} · {batch.run}"
    return page(title, body, styles=asset("rollouts.css"), script=asset("rollouts.js"))


def _facts(groups: Sequence[Group]) -> str:
    rewards = np.array([value for group in groups for value in group.rewards_N.tolist()], dtype=np.float64)
    known = rewards[np.isfinite(rewards)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout) for rollout in rollouts]
    correct = [rollout.reward.is_correct for rollout in rollouts]
    cut_off = [rollout.stop_reason == "length" for rollout in rollouts]
    mixed = [np.ptp(r[np.isfinite(r)]) > 0 for r in (group.rewards_N for group in groups) if np.isfinite(r).any()]
    several = any(len(group.rollouts) > 1 for group in groups)
    facts = [
        ("prompts", str(len(groups)), ""),
        ("samples", str(len(lengths)), ""),
        ("mean reward", f"{known.mean():.3f}" if len(known) else "none", ""),
        ("correct", _percent(correct), ""),
        *([("mixed groups", _percent(mixed), "rewards differ; only these give a gradient")] if several else []),
        ("mean length", f"{np.mean(lengths):.0f} tokens" if lengths else "none", ""),
        ("cut off", _percent(cut_off), "ended by max_tokens"),
        *([("not graded", str(len(rewards) - len(known)), "")] if len(known) < len(rewards) else []),
    ]
    items = "".join(f'<div title="{hint}"><dt>{name}</dt><dd>{value}</dd></div>' for name, value, hint in facts)
    return f'<dl class="facts">{items}</dl>'


def _percent(flags: Sequence[Any]) -> str:
    return percent(sum(map(bool, flags)) / len(flags)) if flags else "none"


def _overview(groups: Sequence[Group], linked: int) -> str:
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
    note = f'<p class="muted">{more} more groups not shown</p>' if more > 0 else ""
    widest = min(32, max(len(group.rollouts) for group in groups)) if groups else 1
    single = " single" if all(len(group.rollouts) == 1 for group in groups) else ""
    legend = (
        f'<span class="muted">reward {low:g} <i class="v0"></i><i class="v4"></i><i class="v9"></i> {high:g}</span>'
    )
    return (
        f'<section class="map{single}" style="--n:{widest}"><h2>Rewards {legend}</h2>'
        f'<div class="rows">{"".join(rows)}</div>{note}</section>'
    )


def _toolbar(groups: Sequence[Group]) -> str:
    if not groups:
        return ""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trained = any(rollout.token_advantages_T is not None for rollout in rollouts)
    planned = any(rollout.planning_T is not None for rollout in rollouts)
    modes = [
        ("none", "plain", True),
        ("s", "surprisal", True),
        ("a", "advantage", trained),
        ("p", "planning", planned),
    ]
    buttons = "".join(
        f'<button type="button" data-mode="{mode}" aria-pressed="{str(mode == "none").lower()}">{name}</button>'
        for mode, name, there in modes
        if there
    )
    return (
        '<div class="toolbar no-print" id="toolbar"><span class="muted">colour tokens by</span>'
        f'<span class="modes">{buttons}</span><span class="legend" id="legend"></span>'
        '<button type="button" id="unfold" hidden>unfold thinking</button>'
        '<output class="mono" id="readout"></output></div>'
    )


def _group_card(batch: Batch, index: int, group: Group, limit: int) -> str:
    problem = group.prompt.problem
    tags = "".join(f'<span class="chip">{escape(tag)}</span>' for tag in problem.tags)
    state = {
        "zero_advantage": "did not train: all advantages are 0",
        "no_reward": "did not train: nothing could be graded",
    }.get(group.discarded or "", "")
    note = f'<span class="chip warn">{state}</span>' if state else ""
    messages = "".join(_message(m["role"], m["content"], PROMPT_CHARACTERS) for m in conversation_of(group.prompt))
    raw = (
        f'<details class="raw"><summary>as the model read it · {len(group.prompt.token_ids)} tokens</summary>'
        f'<div class="text mono">{_shortened(group.prompt.text, PROMPT_CHARACTERS)}</div></details>'
    )
    samples = [_sample(batch, sample, rollout, limit) for sample, rollout in enumerate(group.rollouts[:SAMPLES_SHOWN])]
    more = len(group.rollouts) - len(samples)
    left = f'<p class="muted">{more} more samples not shown; they are in the table.</p>' if more > 0 else ""
    answer = _message("answer", problem.answer, LEAST_CHARACTERS) if problem.answer else ""
    single = " one" if len(group.rollouts) == 1 else ""
    return f"""<section class="group{single}" id="g{index}"><h2>Group {index}
<span class="muted">{escape(problem.id)}</span>{tags}{note}</h2><div class="card prompt">{messages}{answer}{raw}</div>
<div class="samples">{"".join(samples)}</div>{left}</section>"""


def _message(role: str, text: str, limit: int) -> str:
    body = f'<div class="text">{_shortened(text, limit)}</div>'
    return f'<div class="message"><span class="role">{escape(role)}</span>{body}</div>'


def _sample(batch: Batch, sample: int, rollout: Rollout, limit: int) -> str:
    reward, advantage = rollout.reward, advantage_of(rollout)
    total = reward.total_reward
    mark = ("bad", "not graded") if total is None else ("good" if reward.is_correct else "bad", f"{total:g}")
    sign = "" if total is None else ("✓ " if reward.is_correct else "✗ ")
    chips = [f'<b class="{mark[0]}" title="reward">{sign}{mark[1]}</b>']
    if advantage is not None:
        chips.append(f'<span title="advantage">A {_signed(advantage, 2)}</span>')
    chips.append(f"<span>{len(rollout):,} tokens</span>")
    if rollout.stop_reason == "length":
        chips.append('<span class="warn" title="ended by max_tokens">cut off</span>')
    extra = _parts(reward, batch)
    error = f'<p class="bad small">{_shortened(reward.error, 500)}</p>' if reward.error else ""
    text, data = _tokens(batch, rollout, limit)
    left = len(text) - limit
    note = f'<p class="muted">{left:,} more characters not shown</p>' if left > 0 else ""
    return f"""<article class="card"><header><span class="muted">#{sample}</span>{"".join(chips)}</header>
{extra}<div class="text sample"{data}>{_folded(text[:limit])}</div>
{note}{error}</article>"""


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


def _part(part: Part) -> str:
    value = "none" if part.value is None else minus(f"{part.value:g}")
    if part.adds is None:
        return f"<span>{escape(part.name)} {value}</span>"
    told = escape(f"{part.how} = {part.adds:g}")
    adds = minus(f"{part.adds:+.3g}") if part.adds else "0"
    return f'<span title="{told}">{escape(part.name)} {value} <b>{adds}</b></span>'


def _signed(value: float, digits: int) -> str:
    """With its sign, a true minus; 0 as such."""
    return minus(f"{value:+.{digits}f}") if round(value, digits) else "0"


def _shortened(text: str, limit: int) -> str:
    """Escaped text up to ``limit`` characters, then how many more there are."""
    left = len(text) - limit
    return escape(text[:limit]) + (
        f' <span class="muted">… {left:,} more characters not shown</span>' if left > 0 else ""
    )


def _folded(text: str) -> str:
    """Escaped text in which what the model thought is folded away."""
    html, start = [], 0
    for match in THINKING.finditer(text):
        if match.end() == match.start():
            continue
        html.append(escape(text[start : match.start()]))
        words = len(match[0].split())
        html.append(
            f'<details class="think"><summary>thinking · {words:,} words</summary>'
            f"<div>{escape(match[0])}</div></details>"
        )
        start = match.end()
    return "".join([*html, escape(text[start:])])


def _tokens(batch: Batch, rollout: Rollout, limit: int) -> tuple[str, str]:
    """The text to show and the attributes with its tokens; no attributes when tokens cannot be placed in the text."""
    if batch.token_text is None:
        return rollout.text, ""
    text, offsets = batch.token_text(rollout.token_ids)
    if _UNDECODED.sub("?", text).strip() != _UNDECODED.sub("?", rollout.text).strip():
        return rollout.text, ""
    ends_T = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 1]
    ends_T = np.minimum(np.maximum.accumulate(ends_T), limit) if len(ends_T) else ends_T
    lengths_T = np.diff(ends_T, prepend=0)
    seen = int((np.cumsum(lengths_T) < min(len(text), limit)).sum()) + 1
    keep = slice(0, min(seen, len(lengths_T)))
    columns = {
        "l": lengths_T[keep],
        "s": _scaled(-np.asarray(rollout.logprobs_T)[keep], 100),
    }
    if rollout.token_advantages_T is not None:
        columns["a"] = _scaled(rollout.token_advantages_T[keep], 1000)
    if rollout.planning_T is not None:
        columns["p"] = _runs(rollout.planning_T[keep])
    return text, "".join(f' data-{name}="{" ".join(map(str, values.tolist()))}"' for name, values in columns.items())


def _scaled(values: np.ndarray, factor: float) -> np.ndarray:
    """Integers of ``values`` times ``factor``; what is not finite counts as 0."""
    return np.rint(
        np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0) * factor
    ).astype(np.int64)


def _runs(mask_T: np.ndarray) -> np.ndarray:
    """Run lengths of a mask, beginning with a (possibly empty) run of false."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], mask_T]).astype(np.int8)))
    return np.diff(np.concatenate([[0], changes, [len(mask_T)]]))


def _table(groups: Sequence[Group], name: str) -> str:
    """Every trajectory in one row."""
    rows, count = [], sum(len(group.rollouts) for group in groups)
    every = part_names(groups)
    names = every[:PARTS_SHOWN]
    for index, group in enumerate(groups):
        for sample, rollout in enumerate(group.rollouts):
            if len(rows) == TABLE_ROWS:
                break
            reward, advantage = rollout.reward, advantage_of(rollout)
            values = (
                "none" if reward.total_reward is None else f"{reward.total_reward:g}",
                "" if advantage is None else _signed(advantage, 3),
                rollout.observation_tokens,
                len(rollout),
            )
            numbers = {**reward.components, **metrics_of(reward)}
            found = (numbers.get(each, "") for each in names)
            values += tuple("none" if v is None else v if v == "" else minus(f"{v:g}") for v in found)
            cells = "".join(f'<td class="number">{value}</td>' for value in values)
            rows.append(
                f'<tr><td class="number">{index}</td><td>{escape(group.prompt.problem.id[:80])}</td>'
                f'<td class="number">{sample}</td><td>{escape(rollout.stop_reason)}</td>{cells}</tr>'
            )
    more = f'<p class="muted">{count - len(rows):,} more not shown</p>' if count > len(rows) else ""
    heads = "".join(
        f"<th{css}>{text}</th>"
        for text, css in (
            ("group", ' class="number"'), ("problem", ""), ("sample", ' class="number"'), ("end", ""),
            *((text, ' class="number"') for text in ("reward", "advantage", "prompt", "tokens", *map(escape, names))),
        )
    )  # fmt: skip
    if len(every) > len(names):
        more += f'<p class="muted">{len(every) - len(names)} more numbers of the reward not shown</p>'
    return f"""<details class="all"><summary>All {count:,} trajectories</summary>
<p class="muted">The same and more, as JSON lines: <code>{escape(name)}_rollout_summaries.jsonl</code></p>
<div class="scroll"><table><thead><tr>{heads}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>{more}</details>"""
