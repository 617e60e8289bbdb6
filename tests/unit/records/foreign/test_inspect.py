"""Logs of inspect-ai 0.3.285 (log/_log.py, log/_recorders/eval.py; grades: scorer/_metric.py, ``value_to_float``).

The fixtures were written by the package (test_written_evaluations.py); messages and events were cut out.
"""

import json
import sys
from pathlib import Path

import pytest

from retrain.errors import MissingExtra, UsageError
from retrain.records.foreign.inspect_log import FORMAT
from retrain.records.foreign.table import ReadRequest

if sys.version_info >= (3, 14):
    import zipfile
else:
    from backports.zstd import zipfile

DATA = Path(__file__).parents[3] / "data" / "foreign" / "inspect_log"
LOGS = [DATA / "sums.eval", DATA / "sums.json"]
both = pytest.mark.parametrize("path", LOGS, ids=["eval", "json"])


def changed(tmp_path: Path, change) -> Path:
    """Return a copy of the JSON log after ``change(content)``."""
    content = json.loads((DATA / "sums.json").read_text())
    change(content)
    path = tmp_path / "log.json"
    path.write_text(json.dumps(content))
    return path


def answers(path: Path, metric: str) -> list[float | None]:
    return [row.value for row in FORMAT.rows(path, ReadRequest(metric)) if row.problem is not None]


@both
def test_answers_and_numbers_of_the_run_have_one_name(path):
    rows = list(FORMAT.rows(path, ReadRequest()))

    assert {row.metric for row in rows} == {"match/accuracy", "length/mean", "digits/mean"}
    for metric in ("match/accuracy", "length/mean", "digits/mean"):
        (of_run,) = [row.value for row in rows if row.metric == metric and row.problem is None]
        of_answers = [row.value for row in rows if row.metric == metric and row.problem is not None]
        assert of_run == pytest.approx(sum(of_answers) / 6)
    assert {(row.set, row.condition, row.seed, row.state) for row in rows} == {("sums", "grpo", 3, "done")}
    assert {row.time for row in rows} <= {1795864032.0, 1795864038.0}


@both
def test_epochs_are_answers_to_one_problem_and_no_seeds(path):
    rows = [row for row in FORMAT.rows(path, ReadRequest("match/accuracy")) if row.problem is not None]
    assert sorted(row.sample for row in rows) == [0, 0, 0, 1, 1, 1]
    assert len({row.problem for row in rows}) == 3
    assert {row.seed for row in rows} == {3}


def test_problems_are_the_same_in_both_kinds_of_log():
    of_archive, of_document = (
        {row.problem for row in FORMAT.rows(path, ReadRequest("match/accuracy"))} for path in LOGS
    )
    assert of_archive == of_document


def test_ids_of_messages_do_not_belong_to_the_problem(tmp_path):
    """inspect makes the ids of messages anew for every evaluation (model/_chat_message.py)."""

    def problems(identity, text="2+3=?"):
        message = {"id": identity, "role": "user", "content": text}
        path = changed(tmp_path, lambda content: [sample.update(input=[message]) for sample in content["samples"]])
        return {row.problem for row in FORMAT.rows(path, ReadRequest("match/accuracy"))}

    assert problems("x") == problems("y") != problems("x", "4+4=?")


@pytest.mark.parametrize(
    ("value", "grade"),
    [
        ("C", 1), ("P", 0.5), ("I", 0), ("N", 0), ("yes", 1), ("2.5", 2.5), (True, 1), (0.25, 0.25), (None, None),
        ("A", None),
    ],
)  # fmt: skip
def test_grades(tmp_path, value, grade):
    def give(content):
        for sample in content["samples"]:
            sample["scores"]["match"]["value"] = value

    assert answers(changed(tmp_path, give), "match/accuracy") == [grade] * 6


def test_failed_evaluation_has_its_answers_and_its_state():
    path = DATA / "failed.json"
    assert answers(path, "match/accuracy") == [1, None, None]
    assert {row.state for row in FORMAT.rows(path, ReadRequest())} == {"failed"}


@pytest.mark.parametrize("status", ["started", "cancelled"])
def test_interrupted_evaluation_is_unfinished(tmp_path, status):
    path = changed(tmp_path, lambda content: content.update(status=status, results=None))
    assert {row.state for row in FORMAT.rows(path, ReadRequest())} == {"unfinished"}
    assert len(answers(path, "match/accuracy")) == 6


def test_archive_that_was_not_completed(tmp_path):
    """Its header and the first samples are in the journal alone."""
    with zipfile.ZipFile(DATA / "sums.eval") as source, zipfile.ZipFile(tmp_path / "cut.eval", "w") as copy:
        for name in ("_journal/start.json", "_journal/summaries/1.json"):
            copy.writestr(name, source.read(name))

    rows = list(FORMAT.rows(tmp_path / "cut.eval", ReadRequest("match/accuracy")))
    assert [row.value for row in rows] == [1, 1]
    assert {(row.condition, row.state) for row in rows} == {("grpo", "unfinished")}


def test_retried_evaluation_is_read_once(tmp_path):
    names = ["2026-11-28T11-07-12-00-00_sums_F9H.eval", "2026-11-28T12-07-12-00-00_sums_F9H.eval", "grpo_s1.json"]
    files = [tmp_path / name for name in [*names, "rloo_s1.json"]]
    assert sorted(FORMAT.choose(files)) == sorted(files[1:])


def test_condition_is_the_model_unless_metadata_or_tags_name_it(tmp_path):
    def give(metadata, tags, model="mockllm/model"):
        path = changed(tmp_path, lambda content: content["eval"].update(metadata=metadata, tags=tags, model=model))
        return {(row.condition, row.seed) for row in FORMAT.rows(path, ReadRequest())}

    assert give({}, []) == {("mockllm/model", None)}
    assert give({}, ["condition=rloo", "seed=2", "long"]) == {("rloo", 2)}
    assert give({"seed": "4"}, []) == {("mockllm/model", 4)}
    assert give({}, [], "org/grpo-s2") == {("org/grpo", 2)}
    with pytest.raises(UsageError, match="seed 'first'"):
        give({"seed": "first"}, [])


def test_recognises_its_logs_alone(tmp_path):
    (tmp_path / "other.json").write_text('{"version": 2, "entries": {}}')
    (tmp_path / "other.eval").write_text("no archive")
    assert all(FORMAT.recognises(path) for path in LOGS)
    assert not FORMAT.recognises(tmp_path / "other.json")
    assert not FORMAT.recognises(tmp_path / "other.eval")


@pytest.mark.parametrize(("begin", "end"), [(500, 10_000), (2200, 2208)], ids=["cut", "zeros"])
def test_damaged_archive_is_named(tmp_path, begin, end):
    data = (DATA / "sums.eval").read_bytes()
    (tmp_path / "log.eval").write_bytes(data[:begin] + bytes(8) + data[end:])
    with pytest.raises(UsageError, match=r"log\.eval is not a log of inspect, or it is damaged"):
        list(FORMAT.rows(tmp_path / "log.eval", ReadRequest()))


@pytest.mark.parametrize(
    ("content", "offset", "value", "message"),
    [
        ('{"eval": 1}', 24, 0xFFFF_FFF0, r"has more than 1,024 MiB of summaries"),  # the size after decompression
        ('{"eval": 1}', 8, 1, r"is not a log of inspect"),  # encrypted
        ('{"eval": 1}', 10, 77, r"is not a log of inspect"),  # another compression
        ("[]", 24, 2, r"is not a log of inspect"),
    ],
)
def test_archive_that_inspect_did_not_write(tmp_path, content, offset, value, message):
    """Change a field of the entry in the archive's directory (APPNOTE of PKWARE, 4.3.12)."""
    with zipfile.ZipFile(tmp_path / "log.eval", "w") as archive:
        archive.writestr("header.json", content)
    data = bytearray((tmp_path / "log.eval").read_bytes())
    begin = data.index(b"PK\x01\x02") + offset
    data[begin : begin + 4] = value.to_bytes(4, "little")
    (tmp_path / "log.eval").write_bytes(data)
    with pytest.raises(UsageError, match=rf"log\.eval {message}"):
        list(FORMAT.rows(tmp_path / "log.eval", ReadRequest()))


def test_log_without_a_task_is_named(tmp_path):
    path = changed(tmp_path, lambda content: content["eval"].pop("task"))
    with pytest.raises(UsageError, match=r"log\.json is not a log of inspect"):
        list(FORMAT.rows(path, ReadRequest()))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="zipfile of Python 3.14 reads Zstandard")
def test_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    with pytest.raises(MissingExtra, match=r"backports-zstd: pip install '\.\[inspect\]'"):
        list(FORMAT.rows(DATA / "sums.eval", ReadRequest()))
