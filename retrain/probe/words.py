"""What a probe comes to, in sentences: the same, longer, better or worse aligned, and what to do about it.

A length is looked at after AdamW, whose division by the root of the second moments takes a factor out of the gradient:
what is left of a difference in length there is what a learning rate would have to make up for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.config.campaign import condition_name

SAME_DIRECTION = 0.99
"""A cosine at least this high is the same direction."""
LONG = 1.5
"""A length ratio above this, or below its inverse, is told."""
RATE = 1.25
"""A ratio of AdamW's steps within this factor needs no other learning rate."""
LEAST_GAIN = 1e-4
"""A difference in gain, of a step, that is told: a hundredth of a point."""
TELLING = ("worse", "better", "length", "direction", "same", "noise", "different", "unclear")
"""Kinds of lines, the most telling first."""
EQUAL = ("same", "noise")
"""Those that expect no difference."""

Numbers = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A sentence about one condition at one point. ``equal``: it expects no difference, and is told together with what
    the campaign could show at all (``judging.probed.whole_line``), once for a condition."""

    kind: str
    condition: str
    at: str
    text: str
    equal: bool = False


def lines_of(report: Numbers) -> list[Line]:
    """All sentences of a probe, the most telling first."""
    found = [line for point in report["points"] for line in point_lines(report, point)]
    return sorted(found, key=lambda line: TELLING.index(line.kind))


def point_lines(report: Numbers, point: Numbers) -> list[Line]:
    """The sentences of one point, in the order of the conditions."""
    untrained = point["at"] == "base" == report.get("begins", "base")
    where = "" if untrained and len(report["points"]) == 1 else f" at {place_of(point)}"
    where += "" if point.get("recorded") is None else " on recorded rollouts"
    found = []
    for number, condition in enumerate(point["conditions"]):
        if number == 0:
            continue
        for kind, text in _about(point, number):
            equal = kind in EQUAL and point is report["points"][0]
            sentence = f"{condition_name(condition['label'])}{where}: {text}"
            found.append(Line(kind, condition["label"], point["at"], sentence, equal))
    return found


def place_of(point: Numbers) -> str:
    """The point in a word or two."""
    if not point["step"]:  # the base, or weights of which no step is known
        return point["at"]
    return f"step {point['step']}"


def recorded_words(report: Numbers, point: Numbers) -> str:
    """Which recorded rollouts are looked at by which weights, and how far these are from those that sampled them."""
    found = point["recorded"]
    steps, away = found["steps"], found["updates_away"]
    told = f"{len(steps)} recorded steps of {report['recorded']['run']}, {steps[0]} to {steps[-1]}"
    if away is not None:
        least, most = away
        told += f", {most if least == most else f'{least} to {most}'} updates from these weights"
    k3, largest = (f"{found[key]:.2g}" for key in ("k3", "k3_most"))
    return (
        f"{told}; k3 from the weights that sampled them {k3} nats a token, in no step above {largest}; mean ratio "
        f"{found['ratio']:.3f}"
    )


def _about(point: Numbers, number: int) -> list[tuple[str, str]]:
    condition, cosine = point["conditions"][number], point["cosines"][0][number]
    if condition["same_rollouts"] and cosine is None:
        return [("different", "no batch has a gradient under both this condition and the baseline")]
    found = [_direction(point, number) if condition["same_rollouts"] else _expected_direction(condition)]
    length, adamw = condition["length"]["gradient"], condition["length"]["adamw"]
    if length is not None and not 1 / LONG <= length["estimate"] <= LONG:
        found.append(("length", _length(length["estimate"], adamw, condition)))
    elif adamw is not None and not 1 / LONG <= adamw["estimate"] <= LONG:
        found.append(("length", _rate(adamw["estimate"], condition)))
    if _apart(condition):
        versus = condition["alignment"]["versus_baseline"]
        kind, how = ("better", "more") if versus["estimate"] > 0 else ("worse", "less")
        found.append((kind, f"aligned {how} with held-out success than the baseline ({gain_words(versus)}): "
                      f"if there is a difference, expect {kind}"))  # fmt: skip
    return found


def _direction(point: Numbers, number: int) -> tuple[str, str]:
    """On the baseline's own rollouts."""
    cosine, expected = point["cosines"][0][number], point["conditions"][number]["expected_cosine"]
    floor = point["cosines"][0][0]
    told = f"cosine {cosine['estimate']:.3f}{_ends(cosine)}"
    least = cosine["estimate"] if cosine["low"] is None else cosine["low"]
    if least >= SAME_DIRECTION:
        return _same(point["conditions"][number], told)
    apart = _apart(point["conditions"][number])
    beyond = expected is not None and expected["high"] is not None and expected["high"] < SAME_DIRECTION
    floor_words = "" if floor is None else f"; two batches of the baseline alone have {floor['estimate']:.3f}"
    if not apart and not beyond and floor is not None and least > floor["estimate"]:
        if _other_steps(point["conditions"][number]):
            return _same(point["conditions"][number], f"up to noise: {told}{floor_words}")
        return "noise", f"the same update up to noise ({told}{floor_words}): expect no difference"
    return "different", f"another update than the baseline's ({told}{floor_words})"


def _expected_direction(condition: Numbers) -> tuple[str, str]:
    """On rollouts of its own there is no batch in common: the noise of both would pass for a difference, so that the
    cosine of expectations alone tells something."""
    expected = condition["expected_cosine"]
    if expected is None or expected["low"] is None or expected["high"] is None:
        return "unclear", "has rollouts of its own, too noisy for its direction to be told: type more --batches"
    told = f"on rollouts of its own; cosine of expectations {expected['estimate']:.3f}{_ends(expected)}"
    if expected["low"] >= SAME_DIRECTION:
        return _same(condition, told)
    if expected["high"] < SAME_DIRECTION or _apart(condition):
        return "different", f"another update than the baseline's ({told})"
    return "unclear", f"an update that is not told from the baseline's ({told}): type more --batches"


def _same(condition: Numbers, told: str) -> tuple[str, str]:
    """The baseline's direction: no difference is expected, unless its steps have another length."""
    if ratio := _other_steps(condition):
        return "direction", (
            f"the same direction as the baseline ({told}), in AdamW steps {ratio:.2g} times as long: a difference "
            "would be one of learning rates, which a probe does not foresee"
        )
    return "same", f"the same direction as the baseline ({told}): expect no difference from it"


def _other_steps(condition: Numbers) -> float | None:
    """How much longer AdamW's steps are than the baseline's, where that is a matter of learning rates."""
    adamw = condition["length"]["adamw"]
    return None if adamw is None or 1 / RATE <= adamw["estimate"] <= RATE else adamw["estimate"]


def _apart(condition: Numbers) -> bool:
    """Whether it is aligned with held-out success better or worse than the baseline: by more than its interval, and by
    more than nothing."""
    versus = (condition["alignment"] or {}).get("versus_baseline")
    if versus is None or versus["low"] is None or abs(versus["estimate"]) < LEAST_GAIN:
        return False
    return not versus["low"] <= 0 <= versus["high"]


def _length(ratio: float, adamw: Numbers | None, condition: Numbers) -> str:
    told = f"its gradient is {ratio:.2g} times as long"
    if adamw is None:
        return told
    if 1 / RATE <= adamw["estimate"] <= RATE:
        return f"{told}, which AdamW scales away ({adamw['estimate']:.2f} times as long a step): no other lr is needed"
    return f"{told}; {_rate(adamw['estimate'], condition)}"


def _rate(ratio: float, condition: Numbers) -> str:
    return (
        f"its AdamW steps are {ratio:.2g} times as long: set lr = {condition['equal_lr']:.2g} in it, or compare "
        "learning rates"
    )


def gain_words(interval: Numbers) -> str:
    """A first-order gain of one step, in points."""
    ends = "" if interval["low"] is None else f" [{100 * interval['low']:+.2f}, {100 * interval['high']:+.2f}]"
    return f"{100 * interval['estimate']:+.2f}{ends} points a step at equal length".replace("-", "−")


def _ends(interval: Numbers) -> str:
    return "" if interval["low"] is None else f" [{interval['low']:.3f}, {interval['high']:.3f}]"
