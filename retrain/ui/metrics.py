"""Look up metrics in the catalogue, also by another tool's names; unknown keys get a section by their names."""

import functools
import re
from collections.abc import Collection, Iterator

from retrain.records.catalogue import METRICS, SECTIONS, Metric
from retrain.records.schema.base import Row
from retrain.ui.answers import JsonObject

WATCH = (
    "eval/<name>/correct_rate", "correct_rate", "mean_reward", "env/all/by_group/frac_mixed", "entropy",
    "optim/grad_norm", "kl_sample_train_v2", "policy/clipfrac_avg", "max_token_hit_rate", "completions/mean_length",
    "discarded_zero_advantage_pct", "val/ratio", "kl", "off_policy_steps_mean", "step_time_s",
    "perf/completion_tokens_per_s",
)  # fmt: skip
"""Metrics that pages show first, in this order, as far as runs have them."""
MOST_WATCHED = 12
GENERAL = "General"  # Section of unknown keys without a slash
STATISTICS = ("std", "min", "max")
HISTOGRAMS = {
    "mean_reward": "reward", "advantage_mean": "advantage", "completions/mean_length": "length",
    "length_prompt_mean": "prompt_length",
}  # fmt: skip
"""Metrics that are means over rollouts → name of the averaged number in ``/api/histogram``."""


@functools.cache
def about(key: str) -> Row:
    metric, alias = _metric_of(key)
    head, _, name = key.rpartition("/")
    section = _SECTION_OF[metric.key] if metric else head.partition("/")[0] or GENERAL
    return {
        "key": key,
        "section": section,
        "group": head if metric else head.partition("/")[2],
        "name": name,
        "unit": metric.unit if metric else "",
        "definition": _plain(metric.definition) if metric else "",
        "note": f"another name of {metric.key}" if metric and alias else None,
        "healthy": healthy_of(metric) if metric else None,
        "aliases": _aliases(metric) if metric else [],
        "alias_of": metric.key if metric and alias else None,
    }


def listed(keys: Collection[str], ranges: Row) -> list[JsonObject]:
    """Return the metrics of these keys in the catalogue's order, without aliases of a metric that is among them."""
    there = set(keys)
    metrics: list[JsonObject] = []
    for key in keys:
        is_named = any(metric.key in there for metric in _BY_ALIAS.get(key, ())) and not _is_own(key, there)
        if is_named or _repeats(key, there):
            continue
        spread = {name: other for name in STATISTICS if (other := _statistic(key, name)) in there}
        component = re.fullmatch(r"rewards/([^/]+)/mean", key)
        histogram = component[1] if component else HISTOGRAMS.get(key)
        more = {"range": _range_of(key, ranges), "spread": spread or None, "histogram": histogram}
        metrics.append({**about(key), **more})
    return sorted(metrics, key=lambda facts: _ORDER.get(str(facts["section"]), len(_ORDER)))


def name_in(key: str, keys: Collection[str]) -> str:
    facts = about(key)
    names = (key, facts["alias_of"], *facts["aliases"])
    return next((name for name in names if name is not None and name in keys), key)


def watched(keys: Collection[str]) -> list[str]:
    return list(dict.fromkeys(key for pattern in WATCH for key in named(pattern, keys)))[:MOST_WATCHED]


def named(pattern: str, keys: Collection[str]) -> list[str]:
    metric = _BY_PATTERN.get(pattern)
    aliases = _aliases(metric) if metric else []
    matching = [key for key in keys if re.fullmatch(_regex(pattern), key)]
    return matching or [name for name in aliases if name in keys][:1]


def tags_of(keys: Collection[str]) -> list[str]:
    tags = dict.fromkeys(parts[1] for key in keys if len(parts := key.split("/")) > 2 and parts[0] == "env")
    return [tag for tag in tags if tag != "all"]


def healthy_of(metric: Metric) -> Row | None:
    text = metric.healthy
    if not text:
        return None
    low, high = None, None
    number = r"(-?\d+(?:\.\d+)?)"
    per_cent = 100.0 if metric.unit == "share" and "%" in text else 1.0
    if match := re.match(rf"below {number}(?! % of the step)", text):
        high = float(match[1]) / per_cent
    elif match := re.match(rf"above {number}", text):
        low = float(match[1]) / per_cent
    elif match := re.fullmatch(rf"{number} to {number}", text):
        low, high = float(match[1]), float(match[2])
    elif match := re.fullmatch(rf"{number}(?: (?:on-policy|with|when|in)\b.*)?", text):
        low = high = float(match[1])
    return {"text": _plain(text), "low": low, "high": high}


def _aliases(metric: Metric) -> list[str]:
    return [name for names in metric.aliases.values() for name in names]


def _plain(text: str) -> str:
    return text.replace("`", "")


def _regex(key: str) -> str:
    """Return a pattern for a catalogue key, with a group for each placeholder: ``<k>`` matches a number, others a part
    without slashes."""
    parts = re.split(r"(<\w+>)", key)
    return "".join(
        r"(\d+)" if part == "<k>" else r"([^/]+)" if part.startswith("<") else re.escape(part) for part in parts
    )


_SECTION_OF = {metric.key: section for section, metrics in SECTIONS.items() for metric in metrics}
_ORDER = {section: rank for rank, section in enumerate(SECTIONS)}
_BY_PATTERN = {metric.key: metric for metric in METRICS}
_BY_ALIAS: dict[str, list[Metric]] = {}
for _metric in METRICS:
    for _name in _aliases(_metric):
        _BY_ALIAS.setdefault(_name, []).append(_metric)
_FAMILIES = [(metric.key, re.compile(_regex(metric.key)), metric) for metric in METRICS if "<" in metric.key]
_ALIAS_FAMILIES = [(name, re.compile(_regex(name)), metrics[0]) for name, metrics in _BY_ALIAS.items() if "<" in name]


def _metric_of(key: str) -> tuple[Metric | None, bool]:
    """Return the catalogue's entry of a key, None if unknown, and whether the key is another tool's name for it."""
    if key in _BY_PATTERN:
        return _BY_PATTERN[key], False
    if key in _BY_ALIAS:
        return _BY_ALIAS[key][0], True
    for families, alias in ((_FAMILIES, False), (_ALIAS_FAMILIES, True)):
        matching = [(name, metric) for name, pattern, metric in families if pattern.fullmatch(key)]
        if matching:  # ``reward_<name>_gini_mean`` says more than ``reward_<name>_mean``, which matches too
            return max(matching, key=lambda each: len(re.sub(r"<\w+>", "", each[0])))[1], alias
    return None, False


def _names_of(key: str, metric: Metric) -> Iterator[str]:
    """Yield the metric's key for each of its aliases that ``key`` matches, with placeholders filled from ``key``."""
    for name in _aliases(metric):
        if match := re.fullmatch(_regex(name), key):
            filled = metric.key
            for part in match.groups():
                filled = re.sub(r"<\w+>", lambda _, part=part: part, filled, count=1)
            yield filled


def _repeats(key: str, there: set[str]) -> bool:
    metric, alias = _metric_of(key)
    return metric is not None and alias and any(name in there for name in _names_of(key, metric))


def _is_own(key: str, there: set[str]) -> bool:
    """Return whether a key that is also another tool's alias is retrain's own metric here: other metrics with the same
    requirement, such as a critic, are present."""
    metric = _BY_PATTERN.get(key)
    return metric is not None and any(
        other.requires == metric.requires and other.key in there and other.key not in _BY_ALIAS for other in METRICS
    )


def _statistic(key: str, name: str) -> str | None:
    if key == "mean_reward":
        return f"reward_{name}"
    for pattern, to in ((r"(.*)/mean", r"\1/{}"), (r"(.*)_mean", r"\1_{}"), (r"(.*/)mean_(.*)", r"\1{}_\2")):
        if match := re.fullmatch(pattern, key):
            return match.expand(to.replace("{}", name))
    return None


def _range_of(key: str, ranges: Row) -> JsonObject | None:
    name = "reward" if key in ("mean_reward", "reward_min", "reward_max") or key.endswith("reward/total") else None
    if name is None and (match := re.fullmatch(r"(?:rewards|env)/(?:all/)?([^/]+)(?:/(?:mean|min|max))?", key)):
        name = match[1]
    declared = ranges.get(name) if name else None
    if not isinstance(declared, dict):
        return None
    return {"min": declared.get("min"), "max": declared.get("max"), "invert": bool(declared.get("invert"))}
