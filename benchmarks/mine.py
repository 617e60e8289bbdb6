"""What `retrain mine` takes: processor time and peak memory over made-up completions of random words.

    python benchmarks/mine.py [--completions 1500 6000] [--words 3000]

Words are drawn from 20,000 by Zipf's law, 15 to a sentence, with one phrase planted ten times in every completion: more
different grams than people or models write. Each number of completions is mined in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

VOCABULARY = 20_000
SENTENCE = 15
PLANTED = ["let", "me", "check"]


def write_run(directory: Path, completions: int, words: int) -> None:
    """A run's directory with these many completions of these many words."""
    rng = Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(VOCABULARY)]
    weights = [1 / (rank + 1) for rank in range(VOCABULARY)]
    (directory / "emergence").mkdir()
    facts = {"run_id": "made_s1", "model": {"model": "tiny-reasoner"}, "backend": {"backend": "local"}}
    (directory / "config.json").write_text(json.dumps(facts))
    with open(directory / "emergence" / "generations.jsonl", "w") as file:
        for number in range(completions):
            text = rng.choices(vocabulary, weights, k=words)
            for at in range(SENTENCE - 1, words, SENTENCE):
                text[at] += "."
            for at in range(0, words - len(PLANTED), words // 10):
                text[at : at + len(PLANTED)] = PLANTED
            row = {"step": number // 64, "completion": " ".join(text), "correct": True}
            file.write(json.dumps(row) + "\n")


def measure(directory: Path) -> None:
    """Mine the run in this process and print what it took."""
    from retrain.mining.corpus import completions_of
    from retrain.mining.embedding import BASE, embedder_of
    from retrain.mining.mine import Wanted, mine

    begin, completions = time.process_time(), completions_of(directory)
    found = mine(completions, embedder_of(BASE, completions.facts)[1], Wanted())
    seconds, peak = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{found.completions:,} completions: {seconds:.0f} s, {peak:.0f} MB at most, {found.candidates:,} grams")


def main() -> None:
    """Measure every number of completions that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, nargs="+", default=[1500, 6000])
    parser.add_argument("--words", type=int, default=3000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure)
        return
    for completions in options.completions:
        with tempfile.TemporaryDirectory() as folder:
            write_run(Path(folder), completions, options.words)
            subprocess.run([sys.executable, __file__, "--measure", folder], check=True)


if __name__ == "__main__":
    main()
