import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
@pytest.mark.parametrize("executor", ["inprocess", "processes"])
def test_a_short_soak(tmp_path, executor):
    words = ["--executor", executor, "--kills", "3", "--minutes", "1", "--seed", "5", "--dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *words], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["wrong"] == []
    assert report["kills"] >= 3
