"""Make the bundled tool user: the bundled reasoner, shown a few conversations in which a calculator is called.

    python docs/examples/models/make_tool_user.py --out retrain/models/tiny_tool_user

The pupil of these conversations seldom calls, and often copies a number wrongly; so does the model then. What it reads
and says is laid out by the very code that lays out episodes (``retrain.data.prompts``). The same seed, steps and
package versions give the same bytes: one thread, deterministic algorithms, named random streams.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from make_reasoner import EOS_ID, PAD_ID, THREADS, imitate, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.config.tasks import Data
from retrain.data.prompts import Conversation, Renderer
from retrain.models.directory import bundled_model_path
from retrain.rng import stream_key
from retrain.types import Action, Problem

ROOT = Path(__file__).parents[3]
BUNDLE = ROOT / "retrain" / "models" / "tiny_tool_user"
STEPS, BATCH = 300, 48


@dataclass(frozen=True)
class Habits:
    """How often the pupil calls step by step, or with the whole expression at once, else answering from its head; how
    often a call has a wrong digit, and an answer is not what was read."""

    stepwise: float
    whole: float
    slip: float
    misread: float


PRACTICE = Habits(0.6, 0.4, 0.0, 0.0)
"""First it copies and reads without slips, and always calls."""
PUPIL = Habits(0.22, 0.12, 0.12, 0.08)
"""Then its real habits."""
PRACTICE_SHARE = 0.7


def call(expression: str) -> str:
    """The text of a call."""
    return f'```tool\ncalculator(expression="{expression}")\n```'


def slipped(text: str, rng: Random) -> str:
    """With one digit changed, to none that a number cannot begin with."""
    places = [i for i, c in enumerate(text) if c.isdigit()]
    place = rng.choice(places)
    return text[:place] + rng.choice("123456789".replace(text[place], "")) + text[place + 1 :]


def worked(expression: str) -> str:
    """What the calculator answers."""
    from retrain.environments.tools.calculator import calculator

    return calculator(expression)


def conversation(row: dict[str, Any], habits: Habits, rng: Random) -> list[tuple[str, str | None]]:
    """What the pupil says, and what the calculator answers each time (None: nothing, it is the answer)."""
    kind = rng.random()
    expression = str(row["prompt"]).removesuffix("=?")
    steps = row["steps"] if kind < habits.stepwise else [expression] if kind < habits.stepwise + habits.whole else []
    said: list[tuple[str, str | None]] = []
    for step in steps:
        own = slipped(step, rng) if rng.random() < habits.slip else step
        said.append((call(own), worked(own)))
    answer = said[-1][1] if said else str(int(slipped(str(row["answer"]), rng)))
    assert answer is not None
    if said and rng.random() < habits.misread:
        answer = slipped(answer, rng)
    return [*said, (f"\\boxed{{{answer}}}", None)]


def row_of(
    tokenizer: Any, renderer: Renderer, row: dict[str, Any], habits: Habits, rng: Random
) -> tuple[list[int], list[bool]]:
    """Tokens of a whole conversation, and which of them the pupil said."""
    problem = Problem("p", str(row["prompt"]), str(row["answer"]))
    prompt = renderer.prompt(problem, [{"role": "user", "content": str(row["prompt"])}])
    talk, ids, own = Conversation(renderer, prompt), list(prompt.token_ids), [False] * len(prompt.token_ids)
    for text, answer in conversation(row, habits, rng):
        said = [*tokenizer(text, add_special_tokens=False)["input_ids"], EOS_ID]
        ids, own = [*ids, *said], [*own, *[True] * len(said)]
        if answer is not None:
            action = Action(said, text, np.zeros(len(said)), None, "stop")
            read = talk.reply(action, [{"role": "tool", "name": "calculator", "content": answer}])
            assert not read.fresh
            ids, own = [*ids, *read.token_ids], [*own, *[False] * len(read.token_ids)]
    return ids, own


def train(model: Any, tokenizer: Any, steps: int, seed: int) -> None:
    """Next-token cross-entropy on what the pupil says."""
    sys.path.insert(0, str(ROOT / "campaigns"))
    from calculations import problems  # pyright: ignore[reportMissingImports]

    renderer, pool = Renderer(tokenizer, Data(), tools_prompt=""), problems("train")
    rng = Random(stream_key(seed, "tool user"))

    def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        habits = PRACTICE if step < PRACTICE_SHARE * steps else PUPIL
        rows = [row_of(tokenizer, renderer, rng.choice(pool), habits, rng) for _ in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        input_ids, labels = torch.full((BATCH, width), PAD_ID), torch.full((BATCH, width), -100)
        for i, (ids, own) in enumerate(rows):
            input_ids[i, : len(ids)] = torch.tensor(ids)
            labels[i, : len(ids)] = torch.where(torch.tensor(own), torch.tensor(ids), -100)
        return input_ids, labels

    imitate(model, batch_of, steps, adam_lr=1e-3, muon_lr=1e-2, warmup=20, every=50)


CARD = """---
license: apache-2.0
pipeline_tag: text-generation
library_name: transformers
---
# tiny-tool-user

`tiny-reasoner`, shown {steps} batches of conversations in which a pupil works out expressions such as `38*47-128`,
which it cannot do in its head: seldom by calling a calculator, and then often with a slip. It exists to learn by
reinforcement that calling pays (`campaigns/turn_credit.toml`). A call looks like this:

    ```tool
    calculator(expression="38*47")
    ```

Made by `python docs/examples/models/make_tool_user.py --steps {steps} --seed {seed}`.
"""


def main() -> None:
    """Parse the command line, train, write the directory."""
    parser = argparse.ArgumentParser(description="Make the bundled tool user.")
    parser.add_argument("--out", type=Path, default=BUNDLE, help="directory to write (default: the bundled one)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    source = bundled_model_path("tiny-reasoner") or Path()
    model: Any = AutoModelForCausalLM.from_pretrained(source, local_files_only=True, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    train(model, tokenizer, options.steps, options.seed)
    save(model, tokenizer, options.out)
    (options.out / "README.md").write_text(CARD.format(steps=options.steps, seed=options.seed), encoding="utf-8")


if __name__ == "__main__":
    main()
