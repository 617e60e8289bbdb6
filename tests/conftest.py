"""What holds for every test: no hub, no tracker service, one torch thread, nothing written outside tmp_path."""

import atexit
import os
import shutil
import signal
import stat
import sys
import tempfile
from types import SimpleNamespace

import pytest
from helpers import check_maths
from hypothesis import settings

# Set before anything imports huggingface_hub, torch or wandb, which read them once.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="retrain-hub-")  # the user's caches and token are not read
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Help texts and tables have the same width and no colours wherever the tests run.
os.environ["COLUMNS"] = "120"
for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "_TYPER_FORCE_DISABLE_TERMINAL"):
    os.environ.pop(name, None)
os.environ["NO_COLOR"] = "1"
check_maths()  # in every test, whatever it trains
# Property tests draw the same examples on every machine, without deadlines that a busy core would miss.
settings.register_profile("retrain", deadline=None, database=None, derandomize=True)
settings.load_profile("retrain")
# A shell's & and nohup start what they start with signals ignored, which retrain rightly leaves so.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def import_path():
    """The interpreter's search path, restored at the end."""
    before = list(sys.path)
    yield sys.path
    sys.path[:] = before


@pytest.fixture
def host_memory(monkeypatch):
    """The memory of this machine as psutil reports it, in bytes; a test sets ``total`` and ``available``."""
    facts = SimpleNamespace(total=1 << 40, available=1 << 39)
    monkeypatch.setattr("psutil.virtual_memory", lambda: facts)
    return facts


@pytest.fixture
def gpus(monkeypatch):
    """The GPUs of this machine as ``torch.cuda`` reports them, all alike; ``limits`` records limits on memory, and
    ``calls`` when the cache is emptied."""
    import torch

    facts = SimpleNamespace(
        count=0, name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80, free=60, has_bfloat16=True, limits=[],
        calls=[],
    )  # fmt: skip
    fakes = {
        "is_available": lambda: facts.count > 0,
        "is_initialized": lambda: facts.count > 0,
        "empty_cache": lambda: facts.calls.append("empty cache"),
        "device_count": lambda: facts.count,
        "get_device_properties": lambda device: facts,
        "is_bf16_supported": lambda including_emulation=True: facts.has_bfloat16 or including_emulation,
        "mem_get_info": lambda device: (facts.free, facts.total_memory),
        "memory_reserved": lambda device: 12,
        "memory_allocated": lambda device: 10,
        "set_device": lambda device: None,
        "set_per_process_memory_fraction": lambda *given: facts.limits.append(given),
    }
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**vars(torch.cuda) | fakes))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return facts


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def reads(monkeypatch):
    """Shapes of the whole prompts (``prefill``) and continuations (``extend``) that decoders read."""
    from retrain.engines.dense import DenseDecoder

    shapes = {"prefill": [], "extend": []}
    for name, function in (("prefill", DenseDecoder.prefill), ("extend", DenseDecoder.extend)):

        def counted(decoder, ids_RT, *rest, name=name, function=function):
            shapes[name].append(tuple(ids_RT.shape))
            return function(decoder, ids_RT, *rest)

        monkeypatch.setattr(DenseDecoder, name, counted)
    return shapes


@pytest.fixture
def fuse_on_cpu(monkeypatch):
    """Return a function that makes new optimizers use the fused AdamW, as on a GPU."""
    return lambda: monkeypatch.setattr("retrain.policy.lora.FUSED", ("cpu",))


@pytest.fixture
def impatient(monkeypatch):
    """Make engines of campaigns and of the doctor wait for servers for tenths of a second."""
    from helpers.servers import IMPATIENT

    monkeypatch.setattr("retrain.engines.server.engine.WAITS", IMPATIENT)


@pytest.fixture
def unchecked():
    """Calls with wrong shapes get through to the function, which has words of its own for them."""
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Qwen3 of random weights in float32, as training loads it."""
    from helpers.models import toy_base

    return toy_base(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of a model that toy campaigns train, with their rewards beside it."""
    from helpers.campaigns import toy_world

    return toy_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def world(model):
    return model.parent


@pytest.fixture
def lanes(base):
    """The lanes of that base, which is left as it was loaded."""
    from retrain.policy.lora import Lanes

    yield Lanes(base)
    base.release()


@pytest.fixture(scope="session")
def toy_home(tmp_path_factory):
    """A model, rewards, and problems that are sorted by subject."""
    from helpers.campaigns import SUBJECT_REWARDS, toy_world

    from retrain.files import append_jsonl

    home = toy_world(tmp_path_factory.mktemp("home")).parent
    (home / "rewards.py").write_text(SUBJECT_REWARDS)
    subjects = [{"prompt": f"{'algebra' if i < 20 else 'counting'} {i}: 2 + {i} = ?", "answer": "x"} for i in range(40)]
    append_jsonl(home / "subjects.jsonl", subjects)
    return home


@pytest.fixture(scope="session")
def mixed_campaign(toy_home, tmp_path_factory):
    """``mixed.toml`` and its campaign ``out``: two conditions that differ in keys of sampling and update."""
    from helpers.campaigns import OTHER, toy_file, train

    folder = tmp_path_factory.mktemp("mixed")
    path = toy_file(toy_home, folder / "mixed.toml", pair=OTHER)
    export, trackers = f'backend.adapter_path="{folder}/export"', 'logging.report_to=["tensorboard"]'
    train(path, folder / "out", "campaign.lanes=4", export, trackers)
    return folder


@pytest.fixture(scope="session")
def silent_campaign(toy_home, tmp_path_factory):
    """``silent.toml`` and its campaign ``out``, in which all completions score the same: no update is made."""
    from helpers.campaigns import toy_file, train

    folder = tmp_path_factory.mktemp("silent")
    path = toy_file(toy_home, folder / "silent.toml", pair="", reward="same")
    train(path, folder / "out", "training.save_every=1", "data.shuffle=false")
    return folder
