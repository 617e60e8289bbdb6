"""The self-check: it passes on what is right, and each check fails on the fault that it is there for, alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from toymodels import qwen3_directory
from typer.testing import CliRunner

from retrain.cli import app
from retrain.commands import selfcheck as command
from retrain.engines import slots
from retrain.engines.dense import DenseDecoder
from retrain.engines.graphs import StepGraphs
from retrain.errors import ModelError, UsageError
from retrain.policy import local
from retrain.policy.local import LocalPolicy
from retrain.policy.protocol import Want
from retrain.selfcheck import gradients, machine, memory, resuming, sampling, speed
from retrain.selfcheck.agreement import agreement
from retrain.selfcheck.examine import CHECKS, Check, examine, report
from retrain.selfcheck.gradients import plain_copy, plain_gradient
from retrain.selfcheck.limits import LIMITS
from retrain.selfcheck.results import Result, Status, judged
from retrain.selfcheck.source import Source, random_base, shapes_of
from retrain.selfcheck.subject import Rates, Subject
from retrain.types import Action

TOML = """\
[model]
model = "{model}"
lora_rank = 4
[training]
max_tokens = 24
[inference]
dtype = "{dtype}"
"""
BY_NAME = {check.name: check for check in CHECKS}
ELSEWHERE = ("resume", "speed")
"""A new process, and clocks: in tests of their own."""


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def opened(model, tmp_path_factory, dtype: str, stack: ExitStack) -> Subject:
    file = tmp_path_factory.mktemp("doctor") / "toy.toml"
    file.write_text(TOML.format(model=model, dtype=dtype))
    return stack.enter_context(Subject.open(Source.of(file, "cpu")))


@pytest.fixture
def quick(monkeypatch):
    """Without the seconds that it takes to measure rates, and with shorter sequences where memory is."""
    monkeypatch.setattr(machine, "measure", lambda subject: Rates(5e9, 5e10))
    monkeypatch.setattr(memory, "LENGTHS", {"cpu": (64, 160)})


@pytest.fixture(scope="module")
def subject(model, tmp_path_factory):
    with ExitStack() as stack:
        yield opened(model, tmp_path_factory, "float32", stack)


def statuses(subject: Subject) -> dict[str, Status]:
    """How the checks end that neither start a process nor read a clock."""
    checks = [check for check in CHECKS if check.name not in ELSEWHERE]
    return {finding.name: finding.result.status for finding in examine(subject, checks)}


def failed(subject: Subject) -> set[str]:
    return {name for name, status in statuses(subject).items() if status is Status.FAIL}


# -- it passes ------------------------------------------------------------------------------------------------------


def test_the_bundled_model_passes_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "judged", without_limits("decode_share", "update_share"))
    done = run("doctor", "--device", "cpu", "--json", tmp_path / "found.json")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("tiny-reasoner, its own weights: 3 layers, ")
    assert [line.split()[0] for line in lines[1:-1]] == [
        "SKIP" if c.name == "graph = eager" else "PASS" for c in CHECKS
    ]
    assert "none failed, 1 skipped" in lines[-1]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [check["name"] for check in found["checks"]] == [check.name for check in CHECKS]
    assert found["failed"] == []
    assert all(check["seconds"] >= 0 for check in found["checks"])
    assert {"torch", "transformers"} <= found["packages"].keys()
    assert not {"argv", "executable"} & found["machine"].keys()
    again = run("doctor", "--device", "nowhere", "--json", tmp_path / "found.json")  # ours: may be written again
    assert (again.exit_code, "--device 'nowhere' is none of" in again.stderr) == (2, True)


def without_limits(*keys: str) -> Callable[..., Result]:
    """``judged`` for numbers that depend on what else the machine does."""
    return lambda kinds, values, *words, **facts: judged(
        kinds, {key: value for key, value in values.items() if key not in keys}, *words, **facts
    )


def test_a_toy_model_passes_in_bfloat16(model, tmp_path_factory, quick):
    with ExitStack() as stack:
        assert failed(opened(model, tmp_path_factory, "bfloat16", stack)) == set()


def test_a_toy_model_passes_in_float32(subject, quick):
    found = statuses(subject)
    assert {name for name, status in found.items() if status is not Status.PASS} == {"graph = eager"}


# -- each check fails on its fault, and no other does ----------------------------------------------------------------


def a_perturbed_engine(subject: Subject, monkeypatch) -> None:
    """The engine's own copy of a weight is not the trainer's."""
    down = subject.engine.decoder.layers[0].down
    monkeypatch.setattr(down, "_joined", down.weight * 1.01)


def mixed_up_lanes(subject: Subject, monkeypatch) -> None:
    """In a batch of more than two the lanes have each other's adapters."""
    blocks = DenseDecoder.blocks
    monkeypatch.setattr(
        DenseDecoder, "blocks", lambda own, given: blocks(own, given[::-1] if len(given) > 2 else given)
    )


def a_scaled_gradient(subject: Subject, monkeypatch) -> None:
    after_update(monkeypatch, lambda gradient: gradient.mul_(1.01))


def a_turned_gradient(subject: Subject, monkeypatch) -> None:
    after_update(monkeypatch, lambda gradient: gradient[: len(gradient) // 9].neg_())


def after_update(monkeypatch, change: Callable[[torch.Tensor], object]) -> None:
    """The gradient that every update leaves, changed."""
    update = LocalPolicy.update

    def changed(policy: LocalPolicy, *given: Any) -> dict[str, Any]:
        found = update(policy, *given)
        change(policy.adapter.flat.grad)
        return found

    monkeypatch.setattr(LocalPolicy, "update", changed)


def no_bandwidth(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(machine, "measure", lambda subject: Rates(0.0, 1e12))


def a_gpu_that_torch_cannot_use(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(machine, "build_fault", lambda devices: "this machine has a GPU (NVIDIA H100)")


def no_dense_decoder(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(subject.engine, "decoder", None)


def a_cache_planned_too_small(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(memory, "cache_bytes", lambda base: 10)


def activations_planned_too_small(subject: Subject, monkeypatch) -> None:
    kept = memory.kept_bytes
    monkeypatch.setattr(memory, "kept_bytes", lambda base: kept(base) // 2)


def shortages_that_nobody_knows(subject: Subject, monkeypatch) -> None:
    for module in ("retrain.engines.local", "retrain.policy.update"):
        monkeypatch.setattr(f"{module}.is_out_of_memory", lambda error: False)


FAULTS = [
    (a_gpu_that_torch_cannot_use, "device and build"),
    (no_bandwidth, "rates"),
    (no_dense_decoder, "paths"),
    (a_perturbed_engine, "sampler = trainer"),
    (mixed_up_lanes, "lane of 5 = alone"),
    (a_scaled_gradient, "gradient"),
    (a_turned_gradient, "gradient"),
    (a_cache_planned_too_small, "memory"),
    (activations_planned_too_small, "memory"),
    (shortages_that_nobody_knows, "out of memory"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_fails_its_check_alone(subject, monkeypatch, quick, fault, name):
    fault(subject, monkeypatch)
    assert failed(subject) == {name}


def replayable(subject: Subject, monkeypatch, replays: Callable[[Callable[[], object]], Callable[[], object]]) -> None:
    """The engine makes graphs, and what a capture gives back is what ``replays`` makes of a step."""
    monkeypatch.setattr(slots, "COLUMNS", {"cpu": 128})
    monkeypatch.setattr(subject.engine, "graphs", StepGraphs(lambda: replays, subject.messages.append))


def test_replayed_steps_equal_eager_ones_or_fail(subject, monkeypatch):
    assert sampling.graph_equals_eager(subject).status is Status.SKIP
    replayable(subject, monkeypatch, lambda step: step)
    right = sampling.replayed(subject)
    assert (right.status, right.words) == (Status.PASS, "32 of 32 sequences equal, bit for bit")
    assert right.measures[0].value > 1  # several captures: rows leave the batch

    def stale(step: Callable[[], object]) -> Callable[[], object]:
        """A replay that reads a buffer which has been filled with something else since."""

        def replay() -> None:
            subject.engine.decoder.frame.norm.data.mul_(1.05)
            step()
            subject.engine.decoder.frame.norm.data.div_(1.05)

        return replay

    replayable(subject, monkeypatch, stale)
    assert sampling.replayed(subject).status is Status.FAIL


def test_a_step_that_cannot_be_captured_fails_with_its_reason(subject, monkeypatch):
    def refused(step: Callable[[], object]) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    replayable(subject, monkeypatch, refused)
    for _ in range(2):  # when it is found out, and when it is known already
        found = sampling.replayed(subject)
        assert found.status is Status.FAIL
        assert "not permitted when stream is capturing" in found.facts["messages"][-1]


def test_a_checkpoint_that_forgets_the_optimizer_fails(subject, monkeypatch):
    known = local.optimizer_tensors
    monkeypatch.setattr(local, "optimizer_tensors", lambda optimizer: {})
    wrong = resuming.resumed_equals_undisturbed(subject)
    assert wrong.status is Status.FAIL
    assert {"lane 0 adapter", "lane 1 exp_avg_sq", "lane 0 step"} <= set(wrong.facts["differing"])
    assert wrong.facts["compared"] == 14
    monkeypatch.setattr(local, "optimizer_tensors", known)
    monkeypatch.setattr(resuming, "_BOOT", "raise SystemExit('cannot begin')")
    ended = resuming.resumed_equals_undisturbed(subject)
    assert (ended.status, ended.words) == (Status.FAIL, "the new process ended with status 1: cannot begin")


def test_a_machine_that_is_far_from_its_roofline_fails(subject, monkeypatch):
    monkeypatch.setattr(subject, "rates", Rates(1e7, 1e8))
    assert speed.speed(subject).status is Status.PASS
    for rates, wrong in ((Rates(1e7, 1e14), "update_share"), (Rates(1e14, 1e14), "decode_share")):
        monkeypatch.setattr(subject, "rates", rates)
        shares = {measure.key: measure.ok for measure in speed.speed(subject).measures}
        assert not shares[wrong]


def test_kernels_that_overlap_count_once():
    assert speed.covered([(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (5.0, 6.0)]) == 4.0
    assert speed.covered([]) == 0.0


def test_results_that_differ_after_a_shortage_fail(subject, monkeypatch):
    """It goes on, with other weights than it had."""
    decode = type(subject.engine)._decode
    calls: list[int] = []

    def damaged(engine: Any, requests: Any, work: Any, weights: Any, rows: int, keep: Any) -> None:
        calls.append(rows)
        weights = weights[::-1] if len(calls) == 2 else weights  # the second is the one made again
        decode(engine, requests, work, weights, rows, keep)

    monkeypatch.setattr(type(subject.engine), "_decode", damaged)
    found = memory.out_of_memory_drills(subject)
    assert found.status is Status.FAIL
    assert [measure.key for measure in found.measures if not measure.ok] == ["drill_parted"]


def test_a_check_that_raises_has_failed_and_the_others_go_on(subject):
    def broken(subject: Subject) -> Result:
        raise ValueError("no such kernel\nand more")

    found = list(examine(subject, [Check("broken", broken), BY_NAME["lane of 5 = alone"]]))
    assert [each.result.status for each in found] == [Status.FAIL, Status.PASS]
    assert command.line_of(found[0]).startswith("FAIL  broken             ValueError: no such kernel → ")
    assert report(subject, found)["failed"] == ["broken"]


def test_the_plain_gradient_is_right_where_it_was_worked_out_otherwise(subject):
    """Against central differences of the loss, along the gradient itself."""
    policy = subject.trained(3)
    requests = subject.requests(subject.publish([policy]))[:1]
    samples = subject.samples(requests, subject.engine.sample(requests))
    model = plain_copy(subject.base, subject.lanes, 2, torch.float64)
    weights = policy.adapter.frozen()
    gradient = plain_gradient(model, weights, samples, torch.float64)
    norm = float(gradient.norm())
    losses = []
    for sign in (1, -1):
        policy.adapter.flat.data.copy_(weights.flat + sign * 1e-2 * (gradient / norm).float())
        scored = policy.score(samples, frozenset({Want.LOGPROBS})).logprobs
        tokens = sum(sample.action_mask.sum() for sample in samples)
        losses.append(
            -sum(float((s.advantages[s.action_mask] * lp).sum()) for s, lp in zip(samples, scored, strict=True))
            / tokens
        )
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(norm, rel=2e-2)


def test_a_deep_model_is_compared_on_its_first_layers(tmp_path, monkeypatch):
    model = qwen3_directory(tmp_path / "deep", ["12+34=? the answer is 46"], layers=6)
    with Subject.open(Source.of(write(tmp_path, TOML.format(model=model, dtype="bfloat16")), "cpu")) as subject:
        right = gradients.against_higher_precision(subject)
        assert (right.status, right.words) == (Status.PASS, "against float32, first 4 of 6 layers")
        a_turned_gradient(subject, monkeypatch)
        assert gradients.against_higher_precision(subject).status is Status.FAIL


def test_what_there_is_no_memory_for_is_skipped(subject, monkeypatch):
    for module in (memory, gradients, resuming):
        monkeypatch.setattr(module, "available_memory", lambda device: 1000)
    assert memory.predicted_against_measured(subject).status is Status.SKIP
    assert gradients.against_higher_precision(subject).status is Status.SKIP
    assert resuming.resumed_equals_undisturbed(subject).status is Status.SKIP


# -- numbers and limits ---------------------------------------------------------------------------------------------


def test_what_is_not_a_number_is_beyond_every_limit():
    for key in LIMITS:
        assert judged(("float32", "cpu"), {key: float("nan")}).status is Status.FAIL, key


def test_a_number_format_goes_before_a_device():
    assert LIMITS["k3"].ends(("bfloat16", "cuda"))[1] > LIMITS["k3"].ends(("float32", "cuda"))[1]
    assert LIMITS["bandwidth"].ends(("float32", "cpu"))[0] < LIMITS["bandwidth"].ends(("float32", "cuda"))[0]


def action(ids: list[int], logprobs: list[float]) -> Action:
    return Action(ids, "", np.array(logprobs), None, "stop")


def test_agreement_compares_up_to_where_sequences_part():
    ours = [[action([1, 2, 3], [-1, -2, -3]), action([4], [-1])], [action([5, 6], [-1, -1])]]
    theirs = [[action([1, 9, 3], [-1.5, 0, 0]), action([4, 4], [-1, -1])], [action([5, 6], [-1, -1])]]
    found = agreement(ours, theirs)
    assert (found.sequences, found.parted, found.tokens, found.largest) == (3, 2, 4, 0.5)
    assert found.words == "1 of 3 sequences equal"
    assert agreement(ours, ours).words == "3 of 3 sequences equal, bit for bit"
    nothing = agreement([[action([1], [0])]], [[action([2], [0])]])
    assert (nothing.p99, nothing.parted_per_token) == (float("inf"), 1.0)


# -- which model ----------------------------------------------------------------------------------------------------


def write(tmp_path, text: str):
    file = tmp_path / "a.toml"
    file.write_text(text)
    return file


def test_a_model_without_weights_here_is_checked_at_its_shapes(tmp_path):
    source = Source.of(write(tmp_path, '[model]\nmodel = "Qwen/Qwen3-0.6B"\nlora_rank = 8'), "cpu")
    assert source.shapes is not None
    assert (source.shapes["num_hidden_layers"], source.shapes["hidden_size"]) == (4, 1024)
    again = Source.from_json(json.loads(json.dumps(source.to_json())))
    assert again == source
    small = dict(source.shapes, hidden_size=64, intermediate_size=96, vocab_size=300, head_dim=16, num_hidden_layers=2)
    bases = [random_base(small, source.config) for _ in range(2)]
    for one, other in zip(*(base.model.parameters() for base in bases), strict=True):
        assert torch.equal(one, other)
    assert bases[0].eos_ids == (151935,)


def test_random_weights_pass_too(tmp_path, quick):
    source = Source.of(write(tmp_path, '[model]\nmodel = "Qwen/Qwen3-0.6B"\nlora_rank = 4'), "cpu")
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 400, "head_dim": 16, "num_attention_heads": 4}
    shapes = shapes_of(source.config) | sizes | {"num_key_value_heads": 2, "eos_token_id": 399}
    with Subject.open(Source(source.config, shapes, "cpu")) as subject:
        assert failed(subject) == set()
        assert resuming.resumed_equals_undisturbed(subject).status is Status.PASS


def test_a_model_of_which_nothing_is_known_or_that_does_not_fit_is_one_line(tmp_path):
    file = write(tmp_path, '[model]\nmodel = "somebody/unheard-of"')
    with pytest.raises(ModelError, match="nothing is downloaded"):
        Source.of(file, "cpu")
    huge = Source.of(write(tmp_path, '[model]\nmodel = "Qwen/Qwen3-32B"'), "cpu")
    with pytest.raises(ModelError, match=r"take [\d.]+ GiB of"):
        random_base(dict(huge.shapes or {}, hidden_size=1 << 16), huge.config)
    with pytest.raises(ModelError, match="no random weights can be made"):
        random_base({"model_type": "no-such-type", "vocab_size": 3}, huge.config)


def test_a_backend_of_the_users_own_has_nothing_to_check(tmp_path):
    with pytest.raises(UsageError, match=r"trains with mine:Backend"):
        Source.of(write(tmp_path, '[backend]\nbackend = "mine:Backend"'), "cpu")


# -- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file", "a.toml"], "--file belongs to the self-check; type: retrain doctor --device auto --file a.toml"),
        (["--json", "a.json"], "--json belongs to the self-check"),
        (["--device", "gpu"], "--device 'gpu' is none of auto, cpu, gpu:0"),
        (["--device", "gpu:seven"], "is none of auto, cpu"),
        (["--device", "gpu:99"], 'type devices = "auto" or "cpu"'),
        (["--device", "cpu", "--file", "missing.toml"], "missing.toml: no such file or directory"),
        (["--device", "cpu", "--json", "."], "is a directory"),
        (["--device", "cpu", "--json", "not/there.json"], "is no directory that can be written to"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("doctor", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_does_not_parse_lists_its_mistakes(tmp_path):
    done = run("doctor", "--device", "cpu", "--file", write(tmp_path, "[model]\nlora_rnk = 8"))
    assert done.exit_code == 2
    assert "a.toml:2" in done.stderr


def test_a_file_that_is_no_report_is_not_overwritten(tmp_path):
    target = tmp_path / "mine.json"
    for text in ('{"kind": "something else"}', "[1]", "no JSON"):
        target.write_text(text)
        done = run("doctor", "--device", "cpu", "--json", target)
        assert done.exit_code == 2
        assert "is no report of retrain doctor" in done.stderr
        assert target.read_text() == text


def test_a_failed_check_is_exit_status_1(tmp_path, monkeypatch):
    def wrong(subject: Subject) -> Result:
        return judged(subject.kinds, {"k3": 0.5})

    monkeypatch.setattr("retrain.selfcheck.examine.examine.__defaults__", ((Check("wrong", wrong),), lambda name: None))
    done = run("doctor", "--device", "cpu")
    assert done.exit_code == 1
    assert (
        "FAIL  wrong              k3 0.5 (at most 1e-08) → sampler and trainer compute different things" in done.stdout
    )
    assert done.stdout.splitlines()[-1].endswith("1 failed, none skipped")
