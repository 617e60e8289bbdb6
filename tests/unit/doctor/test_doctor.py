import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.campaigns import run_cli

from retrain.doctor import machine, memory, results, training
from retrain.doctor.checks import CHECKS, run_checks
from retrain.doctor.results import FAIL, LIMITS, PASS, SKIP, Result, judged
from retrain.doctor.sampling import agreement
from retrain.doctor.subject import DoctorModel, ModelSource, Sizes, random_base, shapes_of
from retrain.engines.dense import DenseDecoder
from retrain.engines.graphs import StepGraphs
from retrain.engines.local import LocalEngine
from retrain.engines.step import CPU_DECODING
from retrain.errors import ModelError, UsageError
from retrain.policy import local
from retrain.policy.local import LocalPolicy
from retrain.types import Action, Want

TOML = '[model]\nmodel = "{model}"\nlora_rank = 4\n[training]\nmax_tokens = 24\n[inference]\ndtype = "{dtype}"\n'
run = partial(run_cli, "doctor")


def write(folder, text: str):
    file = folder / "a.toml"
    file.write_text(text)
    return file


@contextmanager
def opened(folder, model, dtype: str):
    with DoctorModel.open(ModelSource.of(write(folder, TOML.format(model=model, dtype=dtype)), "cpu")) as subject:
        yield subject


@pytest.fixture(scope="module")
def subject(model, tmp_path_factory):
    with opened(tmp_path_factory.mktemp("doctor"), model, "float32") as subject:
        yield subject


def test_the_bundled_model_passes_every_check_from_the_command_line(tmp_path, monkeypatch):
    for key in ("decode_share", "update_share"):  # they depend on what else the machine does
        monkeypatch.setitem(LIMITS, key, results.Limit(key, ""))
    monkeypatch.setitem(CHECKS, "resume", lambda subject: Result(PASS))  # starts a process; has tests of its own
    done = run("--device", "cpu", "--json", tmp_path / "report.json")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("tiny-reasoner, its own weights: 3 layers, ")
    assert [line[:24].split(None, 1) for line in lines[1:-1]] == [
        ["SKIP" if name == "graph = eager" else "PASS", name.ljust(18)] for name in CHECKS
    ]
    assert "none failed, 1 skipped, everything in " in lines[-1]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [check["name"] for check in report["checks"]] == list(CHECKS)
    assert report["failed"] == []
    k3 = next(measure for check in report["checks"] for measure in check["measures"] if measure["name"] == "k3")
    assert (k3["most"], k3["ok"]) == (1e-8, True)
    assert {"torch", "transformers"} <= report["packages"].keys()
    assert not {"argv", "executable"} & report["machine"].keys()
    again = run("--device", "nowhere", "--json", tmp_path / "report.json")  # an earlier report may be replaced
    assert (again.exit_code, "--device 'nowhere' is none of" in again.stderr) == (2, True)


def test_a_toy_model_passes_in_bfloat16(model, tmp_path):
    with opened(tmp_path, model, "bfloat16") as subject:
        for name in ("sampler = trainer", "gradient", "out of memory"):
            assert CHECKS[name](subject).status == PASS, name


def an_engine_weight_that_is_not_the_trainers(subject: DoctorModel, monkeypatch) -> None:
    down = subject.engine.decoder.layers[0].down
    monkeypatch.setattr(down, "_joined", down.weight * 1.01)


def mixed_up_lanes(subject: DoctorModel, monkeypatch) -> None:
    """In a batch of more than two lanes."""
    blocks = DenseDecoder.blocks

    def mixed_up(self, lanes):
        return blocks(self, lanes[::-1] if len(lanes) > 2 else lanes)

    monkeypatch.setattr(DenseDecoder, "blocks", mixed_up)


def after_update(change: Callable[[torch.Tensor], object]) -> Callable[[DoctorModel, Any], None]:
    """Return a fault that changes the gradient after every update."""

    def fault(subject: DoctorModel, monkeypatch) -> None:
        update = LocalPolicy.update

        def changed(policy: LocalPolicy, *arguments: Any) -> dict[str, Any]:
            metrics = update(policy, *arguments)
            change(policy.adapter.flat.grad)
            return metrics

        monkeypatch.setattr(LocalPolicy, "update", changed)

    return fault


a_scaled_gradient = after_update(lambda gradient: gradient.mul_(1.01))
a_turned_gradient = after_update(lambda gradient: gradient[: len(gradient) // 9].neg_())


def sizes_planned_too_small(subject: DoctorModel, monkeypatch) -> None:
    kept = memory.kept_bytes
    monkeypatch.setattr(memory, "cache_bytes", lambda base: 10)
    monkeypatch.setattr(memory, "kept_bytes", lambda base: kept(base) // 2)


def unnoticed_shortages(subject: DoctorModel, monkeypatch) -> None:
    for module in ("retrain.engines.local", "retrain.policy.packing"):
        monkeypatch.setattr(f"{module}.is_out_of_memory", lambda error: False)


FAULTS = [
    (an_engine_weight_that_is_not_the_trainers, "sampler = trainer", ("k3", "p99")),
    (mixed_up_lanes, "lane of 5 = alone", ("lane_parted",)),
    (a_scaled_gradient, "gradient", ("gradient_norm",)),
    (a_turned_gradient, "gradient", ("gradient_angle",)),
    (sizes_planned_too_small, "memory", ("cache_growth", "kept_growth")),
    (unnoticed_shortages, "out of memory", ()),
]


@pytest.mark.parametrize(("fault", "name", "exceeded"), FAULTS)
def test_a_check_fails_on_its_fault(subject, monkeypatch, fault, name, exceeded):
    fault(subject, monkeypatch)
    (result,) = run_checks(subject, lambda name: None, {name: CHECKS[name]})
    assert (result.name, result.status, result.todo != "") == (name, FAIL, True), result.line
    assert set(exceeded) <= {measure["name"] for measure in result.measures if not measure["ok"]}, result.line


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for GPUs")
def test_a_gpu_that_torch_cannot_use_fails(subject, nvidia_smi):
    found = CHECKS["device and build"](replace(subject, source=replace(subject.source, requested_device="auto")))
    assert (found.status, found.todo != "") == (FAIL, True), found.line


def test_an_engine_without_the_dense_decoder_fails(subject):
    found = CHECKS["paths"](replace(subject, engine=LocalEngine(subject.base, subject.lanes, dense=False)))
    assert (found.status, found.todo != "") == (FAIL, True), found.line


def test_replayed_steps_equal_eager_ones_or_fail(subject):
    check = CHECKS["graph = eager"]

    def with_capture(capture: Callable[[Callable[[], object]], Callable[[], object]]) -> DoctorModel:
        engine = LocalEngine(subject.base, subject.lanes, settings=CPU_DECODING._replace(columns=128))
        engine.graphs = StepGraphs(lambda: capture, subject.messages.append)
        return replace(subject, engine=engine)

    assert check(subject).status == SKIP
    right = check(with_capture(lambda step: step))
    assert (right.status, right.words) == (PASS, "32 of 32 sequences equal, bit for bit")
    assert right.measures[0]["value"] > 1  # several captures: rows leave the batch

    def stale(step: Callable[[], object]) -> Callable[[], object]:
        """Return a replay that reads a buffer whose content has changed since the capture."""
        norm = subject.base.model.model.norm.weight.data

        def replay() -> None:
            norm.mul_(1.05)
            step()
            norm.div_(1.05)

        return replay

    assert check(with_capture(stale)).status == FAIL


def test_updates_that_keep_the_version_and_a_checkpoint_without_the_optimizer_fail(subject, monkeypatch):
    update = LocalPolicy.update

    def keep_version(policy, *arguments):
        version, result = policy.version, update(policy, *arguments)
        policy.version = version
        return result

    monkeypatch.setattr(LocalPolicy, "update", keep_version)
    monkeypatch.setattr(local, "optimizer_tensors", lambda optimizer: {})
    wrong = CHECKS["resume"](subject)
    assert wrong.status == FAIL
    assert "sample with old weights" in wrong.todo
    assert {"lane 0 adapter", "lane 1 exp_avg_sq", "lane 0 step"} <= set(wrong.facts["differing"])
    assert wrong.facts["compared"] == 14


def test_a_machine_far_from_its_roofline_fails(subject):
    """On a machine with fast products the update is too slow, with fast copies also decoding."""
    slow = {"bandwidth": 1e7, "matrix": 1e8}
    fast = {"bandwidth": 1e14, "matrix": 1e14}
    for rates, too_slow in ((slow, None), (slow | {"matrix": 1e14}, "update_share"), (fast, "decode_share")):
        measures = CHECKS["speed"](replace(subject, rates=rates)).measures
        exceeded = {measure["name"] for measure in measures if not measure["ok"]}
        assert too_slow in exceeded if too_slow else not exceeded
    assert machine.union_length([(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (5.0, 6.0)]) == 4.0


def test_a_check_that_raises_has_failed_and_the_others_run(monkeypatch, tmp_path):
    def broken(subject: DoctorModel) -> Result:
        raise ValueError("no such kernel\nand more")

    for name in list(CHECKS):
        monkeypatch.delitem(CHECKS, name)
    monkeypatch.setitem(CHECKS, "broken", broken)
    monkeypatch.setitem(CHECKS, "wrong", lambda subject: judged(subject.kinds, {"k3": 0.5}))
    monkeypatch.setitem(CHECKS, "right", lambda subject: Result(PASS))
    done = run("--device", "cpu", "--json", tmp_path / "report.json")
    assert done.exit_code == 1
    assert "FAIL  broken             ValueError: no such kernel → report it with --json" in done.stdout
    assert "FAIL  wrong              k3 0.5 (at most 1e-08) → sampler and trainer compute different" in done.stdout
    assert "PASS  right" in done.stdout
    assert "2 failed, none skipped" in done.stdout.splitlines()[-1]
    assert json.loads((tmp_path / "report.json").read_text())["failed"] == ["broken", "wrong"]


def test_the_reference_gradient_equals_central_differences(subject):
    """Of the loss, along the gradient itself."""
    policy = subject.trained(3)
    samples = subject.sampled(policy, Sizes(1, 4, 24))
    model = training.plain_copy(subject.base, subject.lanes, 2, torch.float64)
    weights = policy.adapter.frozen()
    gradient = training.plain_gradient(model, weights, samples, torch.float64)
    norm = float(gradient.norm())
    tokens = sum(sample.action_mask.sum() for sample in samples)
    losses = []
    for sign in (1, -1):
        policy.adapter.flat.data.copy_(weights.flat + sign * 1e-2 * (gradient / norm).float())
        scored = policy.score(samples, frozenset({Want.LOGPROBS})).logprobs
        parts = [float((s.advantages[s.action_mask] * lp).sum()) for s, lp in zip(samples, scored, strict=True)]
        losses.append(-sum(parts) / tokens)
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(norm, rel=2e-2)


def test_checks_that_do_not_fit_in_memory_are_skipped(subject, host_memory):
    host_memory.available = 1000
    assert [CHECKS[name](subject).status for name in ("memory", "gradient", "resume")] == [SKIP, SKIP, SKIP]


def test_limits_depend_on_number_format_before_device_and_exclude_nan():
    for key in LIMITS:
        assert judged(("float32", "cpu"), {key: float("nan")}).status == FAIL, key
    assert judged(("bfloat16", "cuda"), {"k3": 1e-3}).status == PASS
    assert judged(("float32", "cuda"), {"k3": 1e-3}).status == FAIL
    assert judged(("float32", "cpu"), {"bandwidth": 5}).status == PASS
    assert judged(("float32", "cuda"), {"bandwidth": 5}).status == FAIL


def test_agreement_compares_up_to_where_sequences_part():
    def action(ids: list[int], logprobs: list[float]) -> Action:
        return Action(ids, "", np.array(logprobs), None, "stop")

    ours = [[action([1, 2, 3], [-1, -2, -3]), action([4], [-1])], [action([5, 6], [-1, -1])]]
    theirs = [[action([1, 9, 3], [-1.5, 0, 0]), action([4, 4], [-1, -1])], [action([5, 6], [-1, -1])]]
    found = agreement(ours, theirs)
    assert (found.summary, found.parted, found.tokens, found.largest) == ("1 of 3 sequences equal", 2, 4, 0.5)
    assert agreement(ours, ours).summary == "3 of 3 sequences equal, bit for bit"
    nothing = agreement([[action([1], [0])]], [[action([2], [0])]])
    assert (nothing.p99, nothing.parted_per_token) == (float("inf"), 1.0)


def test_a_model_without_weights_is_checked_at_its_shapes(tmp_path):
    source = ModelSource.of(write(tmp_path, '[model]\nmodel = "Qwen/Qwen3-0.6B"\nlora_rank = 4'), "cpu")
    assert source.shapes is not None
    assert (source.shapes["num_hidden_layers"], source.shapes["hidden_size"]) == (4, 1024)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 400, "head_dim": 16, "num_attention_heads": 4}
    shapes = shapes_of(source.config) | sizes | {"num_key_value_heads": 2, "eos_token_id": 399}
    with DoctorModel.open(ModelSource(source.config, shapes, "cpu")) as subject:
        assert subject.base.eos_ids == (399,)
        for name in ("sampler = trainer", "gradient", "resume"):  # the new process makes the same weights
            assert CHECKS[name](subject).status == PASS, name


def test_a_model_that_is_unknown_or_does_not_fit_is_one_line(tmp_path):
    with pytest.raises(ModelError, match="nothing is downloaded"):
        ModelSource.of(write(tmp_path, '[model]\nmodel = "somebody/unheard-of"'), "cpu")
    with pytest.raises(UsageError, match=r"trains with mine:Backend"):
        ModelSource.of(write(tmp_path, '[backend]\nbackend = "mine:Backend"'), "cpu")
    huge = ModelSource.of(write(tmp_path, '[model]\nmodel = "Qwen/Qwen3-32B"'), "cpu")
    with pytest.raises(ModelError, match=r"take [\d.]+ GiB of"):
        random_base(dict(huge.shapes or {}, hidden_size=1 << 16), huge.config)
    with pytest.raises(ModelError, match="no random weights can be made"):
        random_base({"model_type": "no-such-type", "vocab_size": 3}, huge.config)


@pytest.mark.parametrize(("arguments", "words"), [
    (["--file", "a.toml"], "--file belongs to the self-check; type: retrain doctor --device auto --file a.toml"),
    (["--device", "gpu:99"], 'type devices = "auto" or "cpu"'),
    (["--device", "cpu", "--file", "missing.toml"], "missing.toml: no such file or directory"),
    (["--device", "cpu", "--file", "faulty.toml"], "faulty.toml:2"),
    (["--device", "cpu", "--json", "."], "is a directory"),
    (["--device", "cpu", "--json", "other.json"], "is no report of retrain doctor"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    contents = {"faulty.toml": "[model]\nlora_rnk = 8", "other.json": '{"kind": "something else"}'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert {name: (tmp_path / name).read_text() for name in contents} == contents
