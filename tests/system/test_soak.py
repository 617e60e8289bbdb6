import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
@pytest.mark.parametrize("executor", ["inprocess", "processes", "ray", "slurm"])
def test_training_that_is_killed_ten_times_ends_as_if_it_had_not_been(tmp_path, executor):
    words = ["--executor", executor, "--kills", "10", "--minutes", "10", "--seed", "5", "--dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *words], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["wrong"] == []
    assert report["kills"] >= 10
