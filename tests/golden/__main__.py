"""Compare what a user sees of two versions of retrain: files, numbers, output and exit statuses.

    python -m tests.golden COMMIT              this tree against that commit
    python -m tests.golden COMMIT --only campaign killed
    python -m tests.golden --prove             show that the comparison notices three deliberate faults

Both versions run the scenarios of ``scenarios.py`` on this machine. Results of a commit are kept under
``build/golden/`` and used again. What may differ is in ``excluded.toml``; a change that is meant is written, with its
reason, into ``intended.toml`` and removed from there once it has landed. The last line has the number of values that
were compared; exit status 1 when one differs.
"""

import argparse
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "golden"
EXAMPLES = 40
"""Differences that are printed; those of the same kind are counted."""

sys.path.insert(0, str(HERE))
from observe import Excluded, observed  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402


@dataclass(frozen=True)
class Difference:
    scenario: str
    name: str
    base: Any
    new: Any

    @property
    def kind(self) -> str:
        return re.sub(r"\[\d+\]", "[]", self.name)


def tree_of_commit(commit: str) -> Path:
    """Return a checkout of a commit, made once."""
    digest = subprocess.check_output(["git", "rev-parse", f"{commit}^{{commit}}"], cwd=ROOT, text=True).strip()
    tree = BUILD / digest[:12] / "tree"
    if not tree.is_dir():
        subprocess.check_call(["git", "worktree", "prune"], cwd=ROOT)
        subprocess.check_call(["git", "worktree", "add", "--quiet", "--force", "--detach", tree, digest], cwd=ROOT)
    return tree


def tree_as_it_is() -> Path:
    """Return a copy of the present package, which stays as it is while the scenarios run."""
    tree = BUILD / "new" / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "retrain", "campaigns", "pyproject.toml"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def digest_of(*names: str) -> str:
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in names)).hexdigest()[:12]


def world() -> Path:
    """Return the folder of the shared model and problems, made once."""
    folder = BUILD / f"world-{digest_of('world.py', '../helpers/models.py')}"
    if not folder.is_dir():
        aside = folder.with_suffix(".part")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        subprocess.check_call([sys.executable, HERE / "world.py", aside], stderr=subprocess.DEVNULL)
        aside.rename(folder)
    return folder


def run(tree: Path, results: Path, names: Sequence[str]) -> None:
    """Run scenarios with the package in ``tree``; their folders move to ``results``."""
    environment = {
        **os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
        "COLUMNS": "120", "TOKENIZERS_PARALLELISM": "false", "WANDB_SILENT": "true",
    }  # fmt: skip
    shutil.rmtree(BUILD / "work", ignore_errors=True)
    arguments = [HERE / "driver.py", world(), BUILD / "work", results, *names]
    done = subprocess.run([sys.executable, "-W", "ignore", *arguments], env=environment, cwd=BUILD, check=False)
    if done.returncode:
        sys.exit(f"a scenario could not be run with {tree}")


def intended(path: Path = HERE / "intended.toml") -> list[tuple[str, str]]:
    """Return (pattern of scenarios, pattern of names) of the changes that are meant."""
    changes = tomllib.loads(path.read_text()).get("change", []) if path.exists() else []
    return [(change.get("scenario", "*"), name) for change in changes for name in change["names"]]


def compare(base: Path, new: Path, names: Sequence[str]) -> tuple[list[Difference], int]:
    """Return the differences between two folders of results, and how many values were compared."""
    excluded, count, differences = Excluded.read(), 0, []
    for scenario in names:
        before, after = observed(base / scenario, excluded), observed(new / scenario, excluded)
        count += len({*before, *after})
        for name in sorted({*before, *after}):
            pair = before.get(name, "(not there)"), after.get(name, "(not there)")
            if pair[0] != pair[1]:
                differences.append(Difference(scenario, name, *pair))
    return differences, count


def without_intended(differences: Sequence[Difference]) -> Iterator[Difference]:
    """Yield the differences that no entry of ``intended.toml`` allows."""
    allowed = [(scenario, name.replace("[]", "[[]]")) for scenario, name in intended()]
    for difference in differences:
        if not any(
            fnmatch.fnmatchcase(difference.scenario, scenario) and fnmatch.fnmatchcase(difference.kind, name)
            for scenario, name in allowed
        ):
            yield difference


def show(differences: Sequence[Difference]) -> None:
    kinds: dict[str, list[Difference]] = {}
    for difference in differences:
        kinds.setdefault(re.sub(r"runs/[^/]+/", "runs/*/", difference.kind), []).append(difference)
    for kind, found in list(kinds.items())[:EXAMPLES]:
        first = found[0]
        print(f"{len(found)} × {kind}\n    {first.scenario}: {first.base!s:.300} → {first.new!s:.300}")
    if len(kinds) > EXAMPLES:
        print(f"… and {len(kinds) - EXAMPLES} more kinds of differences")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="the version to compare this tree with")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS), metavar="SCENARIO")
    parser.add_argument("--prove", action="store_true", help="show that three deliberate faults are noticed")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.prove:
        return prove()
    if options.commit is None:
        parser.error("name the commit to compare with, such as HEAD~1")
    begin = time.monotonic()
    tree = tree_of_commit(options.commit)
    base = tree.parent / f"results-{digest_of('driver.py', 'scenarios.py', 'world.py', '../helpers/models.py')}"
    if missing := [name for name in options.only if not (base / name).is_dir()]:
        print(f"the base, {options.commit}:", flush=True)
        run(tree, base, missing)
    print("this tree:", flush=True)
    new = BUILD / "new" / "results"
    run(tree_as_it_is(), new, options.only)
    differences, count = compare(base, new, options.only)
    left = list(without_intended(differences))
    show(left)
    meant = f", {len(differences) - len(left):,} intended changes" if len(differences) > len(left) else ""
    took = (time.monotonic() - begin) / 60
    print(f"{count:,} values of {len(options.only)} scenarios compared, {len(left):,} differ{meant} ({took:.1f} min)")
    return 1 if left else 0


def prove() -> int:
    """Run one scenario with each fault of ``faults.toml`` and see that the comparison reports it."""
    tree, right, names = tree_as_it_is(), BUILD / "prove" / "right", ["advantages"]
    run(tree, right, names)
    noticed = []
    for fault in tomllib.loads((HERE / "faults.toml").read_text())["fault"]:
        wrong = BUILD / "prove" / "tree"
        shutil.rmtree(wrong, ignore_errors=True)
        shutil.copytree(tree, wrong)
        file = wrong / fault["file"]
        before, found, after = file.read_text().partition(fault["find"])
        if not found:
            sys.exit(f"{fault['name']}: {fault['find']!r} is not in {fault['file']}; mend faults.toml")
        file.write_text(before + fault["replace"] + after)
        run(wrong, BUILD / "prove" / "wrong", names)
        differences, count = compare(right, BUILD / "prove" / "wrong", names)
        show(differences[:3])
        noticed.append(bool(differences))
        print(f"{fault['name']}: {len(differences):,} of {count:,} values differ")
    print(f"{sum(noticed)} of {len(noticed)} faults noticed")
    return 0 if all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())
