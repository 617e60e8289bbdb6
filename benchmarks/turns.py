"""What several turns cost beside one: four turns of 64 tokens with 16 tokens read between them, and one turn of 256
after a prompt that holds these 48 as well: the same tokens, read and sampled.

    python benchmarks/turns.py [--shapes 256 512 smollm2]

Between the turns keys and values stay in memory, so that only the 16 new tokens are computed (and the last one that was
sampled, which nothing had read). ``read again`` is the same without that: every turn computes its whole history.
The aim, written down before anything was measured: at most 1.2 times one turn.
"""

import argparse
from functools import partial
from typing import Any

import shared
import torch
from ours import cohort
from shared import SHAPES, Setting, bar, median, opened, parser_of, publish, table, with_verdicts

from retrain.types import SampleRequest

TURNS, NEW, READ, AIM = 4, 64, 16, 1.2


def one_turn(engine: Any, ref: Any, prompts: list[list[int]], samples: int, new: int, call: int) -> None:
    """All tokens in one turn, behind a prompt that holds what is read later otherwise."""
    later = list(range(5, 5 + READ)) * (TURNS - 1)
    engine.sample(
        [SampleRequest(ref, (*ids, *later), samples, new, 1.0, ("one", call, i)) for i, ids in enumerate(prompts)]
    )


def turns(engine: Any, ref: Any, prompts: list[list[int]], samples: int, new: int, keep: bool, call: int) -> None:
    """As many tokens in several turns, each of which reads what the ones before have said, and something new."""
    histories = {(i, k): list(ids) for i, ids in enumerate(prompts) for k in range(samples)}
    names = {key: (("turns", call, *key),) if keep else () for key in histories}
    for turn in range(TURNS):
        if turn == 0:
            groups = engine.sample(
                [
                    SampleRequest(
                        ref, tuple(ids), samples, new // TURNS, 1.0, ("turns", call, i),
                        sequences=tuple(name for k in range(samples) for name in names[i, k]),
                    )
                    for i, ids in enumerate(prompts)
                ]
            )  # fmt: skip
            actions = {(i, k): action for i, group in enumerate(groups) for k, action in enumerate(group)}
        else:
            asked = list(histories)
            groups = engine.sample(
                [
                    SampleRequest(
                        ref, tuple(histories[key]), 1, new // TURNS, 1.0, ("turns", call, *key, turn),
                        sequences=names[key],
                    )
                    for key in asked
                ]
            )  # fmt: skip
            actions = {key: action for key, (action,) in zip(asked, groups, strict=True)}
        for key, action in actions.items():
            if len(action) != new // TURNS:
                raise SystemExit(f"a turn of {len(action)} tokens")
            histories[key] += [*action.token_ids, *range(5, 5 + READ)]
    engine.forget_sequences()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of each way, for every shape."""
    found = {}
    new = 16 if options.quick else TURNS * NEW
    for shape in options.shapes:
        setting = Setting(shape, new, prompts=4)
        with cohort(setting, options.models, device=options.device) as made:
            asked = (made.engine, made.runs[0].policy_ref, shared.prompt_ids(setting), setting.samples, new)
            ways = {
                "one": partial(one_turn, *asked),
                "kept": partial(turns, *asked, True),
                "again": partial(turns, *asked, False),
            }
            times: dict[str, list[float]] = {name: [] for name in ways}
            for call in range(options.repeats + 1):
                for name, way in ways.items():  # in turns, so that all see the machine alike
                    laps = shared.Laps()
                    way(call)
                    times[name].append(laps.lap()[0])
            found[shape] = {name: median(own[1:]) for name, own in times.items()}
    return {"shapes": found}


def report(found: dict[str, Any]) -> str:
    """The table, and whether the aim is met."""
    head = ("shape", "one turn, s", f"{TURNS} turns, s", "ratio", "read again, s", "ratio")
    rows, worst = [], 0.0
    for shape, own in found["shapes"].items():
        kept, again = own["kept"] / own["one"], own["again"] / own["one"]
        worst = max(worst, kept)
        rows.append(
            (shape, f"{own['one']:.3g}", f"{own['kept']:.3g}", f"{kept:.2f}×", f"{own['again']:.3g}", f"{again:.2f}×")
        )
    return with_verdicts(table(head, rows), [bar(f"at most {worst:.2f}× one turn (bar ≤ {AIM})", worst <= AIM)])


def main() -> None:
    parser = parser_of(__doc__, "measure on the first GPU")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), help="default 256 512 smollm2")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    options.shapes = options.shapes or (["tiny"] if options.quick else ["256", "512", "smollm2"])
    options.repeats = 1 if options.quick else options.repeats
    torch.set_num_threads(options.threads)
    with opened(options):
        found = measure(options)
    publish(options, "turns", report(found), found)


if __name__ == "__main__":
    main()
