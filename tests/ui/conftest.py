"""A browser, and a real ``retrain ui`` over a campaign that was trained, a hostile one, and those of other tools.

``make test-ui`` makes an environment with playwright. RETRAIN_CHROMIUM is the browser, RETRAIN_UI_LOGS a directory of
campaigns (with a ``quickstart``) to look at instead of training one.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.pages import cookbook_run, trainer_state

from tests.ui.hostile import ALONE, hostile_campaign
from tests.ui.watch import CHROMIUM, Watched, browser_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = 12
NEEDED = {"chromium": CHROMIUM, "playwright": importlib.util.find_spec("playwright")}
MISSING = [name for name, there in NEEDED.items() if not there]
WINDOW = {"width": 1280, "height": 900}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if MISSING else ():
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"no {MISSING[0]} here: make test-ui"))


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with the repository to import from."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


def retrain(*arguments: str, **more: str) -> None:
    command = [sys.executable, "-m", "retrain", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@contextlib.contextmanager
def serving(directories: Sequence[Path], cache: Path, port: str = "0") -> Iterator[str]:
    command = [sys.executable, "-m", "retrain", "ui", *map(str, directories), "--port", port]
    log_path = cache.with_suffix(".log")
    with open(log_path, "w") as log:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
            env=environment(XDG_CACHE_HOME=str(cache)),
        )  # fmt: skip
    with server:
        try:
            line = server.stdout.readline()
            assert "http://" in line, log_path.read_text()[-3000:]
            yield line.split()[-1].rstrip("/")
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
    assert "Traceback" not in log_path.read_text(), log_path.read_text()[-3000:]


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart, trained for a few steps: two conditions, a seed each."""
    if given := os.environ.get("RETRAIN_UI_LOGS"):
        return Path(given)
    out = tmp_path_factory.mktemp("trained") / "logs"
    retrain("train", "campaigns/quickstart.toml", "--out", str(out / "quickstart"),
            "--set", f"training.max_steps={STEPS}",
            "--set", "campaign.seeds=[1]", OMP_NUM_THREADS="1")  # fmt: skip
    return out


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_campaign(tmp_path_factory.mktemp("hostile") / "hostile")


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("others")
    trainer_state(home / "grpo_out/checkpoint-10", 10)
    return cookbook_run(home / "math_rl"), home / "grpo_out"


@pytest.fixture(scope="session")
def server(
    logs: Path, hostile: Path, others: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with serving([logs, hostile, hostile.parent / ALONE, *others], tmp_path_factory.mktemp("cache") / "c") as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, browser_of(playwright) as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser: Any) -> Iterator[Any]:
    """One context for all tests of a module, which may use the clipboard."""
    context = browser.new_context(viewport=WINDOW, permissions=["clipboard-read", "clipboard-write"])
    yield context
    context.close()


@pytest.fixture(scope="session")
def url(server: str) -> str:
    """The address that ``page`` is of; a module may have a fixture of this name for a server of its own."""
    return server


@pytest.fixture
def page(context: Any, url: str) -> Iterator[Watched]:
    """A page of its own, which nothing may have gone wrong on."""
    watched = Watched(context.new_page(), url)
    yield watched
    watched.fine().page.close()
