"""Apply each patch of this directory to a copy of the repository and check that the tests it names fail.

    python -m tests.mutants
    python -m tests.mutants --only update_ critic_

Each patch is a mistake that once passed all tests. Its first line names the tests that must fail with it, separated by
blanks; the second says what goes wrong for the user:

    tests: tests/unit/policy/test_update.py::test_clipping_and_the_first_adamw_step

Prints one line per patch; the exit status is 1 if a patch does not apply or its tests pass.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DIRECTORY = Path(__file__).parent
ROOT = DIRECTORY.parents[1]
TIMEOUT_S = 1200


def named_tests(patch: Path) -> list[str]:
    """Return the tests in the patch's first line. Raises ValueError if it names none."""
    first = patch.read_text().partition("\n")[0]
    tests = re.findall(r"tests/\S+", first)
    if not tests:
        raise ValueError(f"{patch.name}:1: names no test; write tests: tests/FILE.py::NAME")
    return tests


def copy_repository(tree: Path) -> Path:
    """Copy the files that git tracks or would track to ``tree``."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def run_tests(tree: Path, tests: list[str]) -> tuple[int, str]:
    """Return pytest's exit status and output. A mutant may loop for ever: a timeout counts as a failure."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=120", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "timeout"
    return done.returncode, done.stdout + done.stderr


def try_patch(patch: Path, tree: Path) -> str:
    """Apply the patch to the tree, run its tests, revert it; return ``caught``, ``SURVIVED`` or ``BROKEN: …``."""
    # Without the ceiling git would look for a repository above the copy and skip the files.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    apply = ["git", "apply", str(patch)]
    done = subprocess.run(apply, cwd=tree, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return f"BROKEN: {' '.join(done.stderr.split())}"
    try:
        status, output = run_tests(tree, named_tests(patch))
    finally:
        subprocess.run([*apply, "--reverse"], cwd=tree, env=environment, check=True)
    if status == 1:
        return "caught"
    return "SURVIVED" if status == 0 else f"BROKEN: pytest ended with status {status}: {output[-500:]}"


def main() -> int:
    """Try the chosen patches, after their tests have passed without them."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="patches whose names have one of these")
    only = parser.parse_args().only
    patches = [path for path in sorted(DIRECTORY.glob("*.patch")) if any(name in path.name for name in only)]
    with tempfile.TemporaryDirectory(prefix="mutants_") as place:
        tree = copy_repository(Path(place) / "tree")
        tests = sorted({test for patch in patches for test in named_tests(patch)})
        status, output = run_tests(tree, tests)
        if status:
            print(f"tests fail without any patch:\n{output[-2000:]}")
            return 1
        caught = 0
        for patch in patches:
            result = try_patch(patch, tree)
            caught += result == "caught"
            print(f"{patch.stem}: {result}", flush=True)
    print(f"{caught} of {len(patches)} mutants caught")
    return 0 if patches and caught == len(patches) else 1


if __name__ == "__main__":
    sys.exit(main())
