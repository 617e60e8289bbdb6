"""Rollouts, problems and the same prompt twice, out of the files that a recorder writes."""

from __future__ import annotations

import pytest
from record_cases import context, evaluation, group
from sampled_cases import record, written

from retrain.errors import UsageError
from retrain.files import append_jsonl, dumps, read_jsonl
from retrain.record.recorder import RunRecorder
from retrain.record.tokens import TokenFile
from retrain.ui.histograms import rewards
from retrain.ui.iterations import Index, rollouts_of
from retrain.ui.problems import SORTS, Matrices, evolution, matrix, twice
from retrain.ui.rollouts import Filter, table, whole


def test_a_recorded_iteration_and_one_that_is_not_say_the_same_but_for_whole_texts(tmp_path):
    index = Index(record(tmp_path))
    recorded, plain = index.get("train", 0), index.get("train", 1)
    assert (recorded.tokens, plain.tokens) == ("tokens_000000.safetensors", None)
    assert index.get("train", None) is recorded  # the newest with tokens
    rows, others = rollouts_of(index, recorded), rollouts_of(index, plain)
    assert [row["length"] for row in rows] == [3, 5, 2, 2, 7]
    for row, other in zip(rows, others, strict=True):
        assert (row["whole"], other["whole"]) == (True, False)
        assert {k: v for k, v in row.items() if k not in ("whole", "text")} == {
            k: v for k, v in other.items() if k not in ("whole", "text")
        }
    assert rows[2]["error"] == "timed out"
    assert rows[1]["tool_errors"] == 2
    assert others[0]["text"] == "so \\boxed{4}"


def test_a_run_without_an_index_is_listed(tmp_path):
    index = Index(record(tmp_path))
    known = list(index.refresh())
    (tmp_path / "iterations.jsonl").unlink()
    bare = Index(tmp_path)
    assert sorted(bare.refresh()) == sorted(known)
    assert len(rollouts_of(bare, bare.get("eval/heldout", 0))) == 2
    with pytest.raises(UsageError, match="no iteration 9 of train; the last is 2"):
        bare.get("train", 9)
    with pytest.raises(UsageError, match="has sampled nothing as eval/other"):
        bare.get("eval/other", None)


def test_lines_of_an_index_that_name_what_lies_elsewhere_are_not_followed(tmp_path):
    record(tmp_path)
    with open(tmp_path / "iterations.jsonl", "a") as file:
        for name, tokens in (("../secret", "null"), ("x", '"../../etc/passwd"'), ("/etc/x", "null"), (".x", "null")):
            file.write(f'{{"split": "train", "iteration": 50, "name": "{name}", "tokens": {tokens}}}\n')
        file.write('[1]\n{"split": "train"}\n{"split": "train", "iteration": "x", "name": "a"}\n')
    assert max(number for _, number in Index(tmp_path).refresh()) == 3


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [
        (Filter(reward=(0.5, None)), [0]),
        (Filter(reward=(None, 0.0)), [1, 3, 4]),
        (Filter(length=(3, 5)), [0, 1]),
        (Filter(group=1), [3, 4]),
        (Filter(kept="discarded"), [3, 4]),
        (Filter(kept="trained"), [0, 1, 2]),
        (Filter(errors=True), [1, 2]),
        (Filter(text="FIVE"), [1, 2, 3, 4]),
        (Filter(stop="length"), []),
        (Filter(tag="nowhere"), []),
    ],
)
def test_rollouts_are_filtered(tmp_path, chosen, indices):
    one = (index := Index(record(tmp_path))).get("train", 0)
    found = table(index, one, chosen)
    assert [row["index"] for row in found["rollouts"]] == indices
    assert (found["total"], found["passing"]) == (5, len(indices))
    assert found["histogram"] == {"ends": [], "counts": [3, 1], "at": [0.0, 1.0], "absent": 1}  # of all of them
    assert [len(own["samples"]) for own in found["groups"]] == [3, 2]


def test_rollouts_are_sorted_those_without_a_number_last(tmp_path):
    one = (index := Index(record(tmp_path))).get("train", 0)
    assert [row["index"] for row in table(index, one, Filter(), "reward", down=True)["rollouts"]] == [0, 1, 3, 4, 2]
    assert [row["index"] for row in table(index, one, Filter(), "length")["rollouts"]] == [2, 3, 0, 1, 4]
    page = table(index, one, Filter(), "length", first=1, count=2)["rollouts"]
    assert [row["index"] for row in page] == [3, 0]
    with pytest.raises(UsageError, match="is none of index, reward"):
        table(index, one, Filter(), "colour")


def test_a_rollout_is_shown_token_by_token_with_what_credit_changed(tmp_path):
    index = Index(record(tmp_path))
    found = whole(index, index.get("train", 0), 1)
    assert found["pieces"] == [["so ", "five ", "", "", ""]]
    assert found["numbers"]["surprisal"] == [1.0] * 5
    assert found["numbers"]["credit"] == [1.0] * 5
    assert found["numbers"]["trained"] == [1] * 5
    assert "mismatch" not in found["numbers"]  # no trainer has scored these
    assert [each["index"] for each in found["siblings"]] == [0, 1, 2]
    assert whole(index, index.get("train", 0), 2)["numbers"]["advantage"] is None  # it had no reward
    plain = whole(index, index.get("train", 1), 1)
    assert (plain["pieces"], plain["line"]["turns"][0]["text"]) == (None, "so \\boxed{4}")
    for number in (0, 1):
        with pytest.raises(UsageError, match="there is no 5"):
            whole(index, index.get("train", number), 5)


@pytest.fixture
def wide(tmp_path):
    """An evaluation of 60 problems with four answers each; a later one on each is recorded too."""
    with RunRecorder(tmp_path, context(max_steps=20), {}, token_text=lambda ids: written(ids, ("so 4", "five"))) as one:
        for number in (0, 3):
            groups = [group([1.0] * 4, [3] * 4, problem_id=f"p{n}") for n in range(60)]
            one.record_eval(evaluation(groups, number))
    return Index(tmp_path)


def test_a_rollout_reads_its_group_and_not_the_whole_iteration(wide, monkeypatch):
    one, read, lines = wide.get("eval/heldout", 0), [], TokenFile._line
    monkeypatch.setattr(TokenFile, "_line", lambda self, kind, i: read.append(kind) or lines(self, kind, i))
    assert [each["index"] for each in whole(wide, one, 121)["siblings"]] == [120, 121, 122, 123]
    assert len(read) < 20
    found = twice((wide, one), (wide, one), "p7")  # the problems of a file are looked through once
    read.clear()
    for problem in range(60):
        found = twice((wide, one), (wide, one), f"p{problem}", sample=2)
        assert (found["a"]["index"], found["a"]["samples"]) == (4 * problem + 2, 4)
    assert len(read) < 60 * 2 * 20


def test_groups_of_a_file_are_found_where_they_stand(wide):
    with wide.tokens(wide.get("eval/heldout", 0)) as file:
        assert [file.of_group(group) for group in (0, 7, 59)] == [range(4), range(28, 32), range(236, 240)]
        assert not file.of_group(60)


def test_a_matrix_is_made_once_for_all_orders(wide, tmp_path, monkeypatch):
    made, lines = [], Index.completions
    monkeypatch.setattr(Index, "completions", lambda self, *given: made.append(given) or lines(self, *given))
    kept, runs = Matrices(), {"a": [wide]}
    shown = [kept.of("camp", runs, "heldout").shown(sort, first=5, count=2) for sort in SORTS]
    assert [[row["id"] for row in each["problems"]] for each in shown] == [["p5", "p6"]] * len(SORTS)
    assert len(made) == 2  # the evaluation before, and that after
    assert kept.of("camp", runs, "heldout", {tmp_path}).ends["a"].of == "all"  # it goes on after all
    append_jsonl(tmp_path / "emergence/evaluations.jsonl", [{"name": "heldout", "step": 9, "problem_id": "p0"}])
    assert len(made) == 4
    kept.of("camp", runs, "heldout", {tmp_path})
    assert len(made) == 6
    for name in "bcd":
        kept.of(name, runs, "heldout")
    assert len(kept._kept) == 2


def test_what_is_after_training_is_another_evaluation_than_what_is_before(tmp_path):
    with RunRecorder(tmp_path / "a", context(max_steps=20), {}) as one:
        one.record_eval(evaluation([group([1.0], [3], problem_id="p0")], 0))
    found = matrix({"a": [Index(tmp_path / "a")]}, "heldout").shown()
    assert found["problems"][0]["rates"]["a"] == {"before": 1.0, "after": None, "answers": 0}
    assert found["taken"]["a"] == {"runs": 1, "of": "finished", "before": [0], "after": []}
    assert found["steps"]["a"] == [0, 0]


def evaluated(folder, rates):
    """A run whose one problem was solved so at these steps."""
    with RunRecorder(folder, context(max_steps=20), {}) as one:
        for number, rate in rates.items():
            one.record_eval(evaluation([group([rate], [3], problem_id="p0")], number))
    return Index(folder)


def test_conditions_that_go_on_are_compared_at_a_step_that_all_have(tmp_path):
    done = evaluated(tmp_path / "done", {0: 0.0, 5: 1.0, 10: 0.0})
    runs = {
        "a": [done, evaluated(tmp_path / "a2", {0: 1.0, 5: 1.0})],
        "b": [
            evaluated(tmp_path / "b1", {0: 0.0, 5: 1.0, 7: 0.0}),
            evaluated(tmp_path / "b2", {0: 0.0, 5: 1.0}),
            evaluated(tmp_path / "b3", {0: 1.0}),
        ],
    }
    going = {index.run for own in runs.values() for index in own} - {done.run}
    found = matrix(runs, "heldout", going).shown()
    assert found["common"] == 5
    assert found["taken"] == {
        "a": {"runs": 1, "of": "finished", "before": [0], "after": [5]},
        "b": {"runs": 2, "of": "all", "before": [0], "after": [5]},  # not the one that has begun just now
    }
    assert found["problems"][0]["rates"] == {
        "a": {"before": 0.0, "after": 1.0, "answers": 1},
        "b": {"before": 0.0, "after": 1.0, "answers": 2},
    }
    ended = matrix(runs, "heldout", going - {runs["b"][0].run}).shown()
    assert (ended["common"], ended["steps"]) == (None, {"a": [0, 10], "b": [0, 7]})
    assert [each["runs"] for each in ended["taken"].values()] == [1, 1]
    early = {"a": [runs["b"][2]], "b": [runs["b"][0]]}
    assert matrix(early, "heldout", going).shown()["taken"]["a"]["after"] == []


def test_an_index_is_the_same_table_until_it_grows(wide, tmp_path):
    known = wide.refresh()
    assert wide.refresh() is known
    line = dumps(read_jsonl(tmp_path / "iterations.jsonl")[-1] | {"iteration": 6})
    with open(tmp_path / "iterations.jsonl", "a") as file:
        file.write(line + "\n")
    assert (len(known), len(wide.refresh())) == (2, 3)  # whoever goes through the first is not disturbed
    (tmp_path / "iterations.jsonl").unlink()
    assert sorted(number for _, number in wide.refresh()) == [0, 3]  # by the names of files
    (tmp_path / "iterations.jsonl").write_text(line + "\n")
    assert sorted(number for _, number in wide.refresh()) == [6]


def test_histograms():
    many = rewards([float(n) for n in range(100)] + [None])
    assert (sum(many["counts"]), many["absent"], len(many["ends"])) == (100, 1, len(many["counts"]) + 1)
    assert rewards([]) == {"ends": [], "counts": [], "at": None, "absent": 0}


def test_problems_show_who_solves_what_and_how_that_has_changed(tmp_path):
    folders = {
        "a": [record(tmp_path / "a1", (0.0, 1.0)), record(tmp_path / "a2", (0.0, 0.0))],
        "b": [record(tmp_path / "b1", (1.0, 0.0)), record(tmp_path / "b2", (1.0, 0.0))],
    }
    runs = {label: [Index(folder) for folder in own] for label, own in folders.items()}
    found = matrix(runs, "heldout").shown()
    assert (found["conditions"], found["steps"]) == (["a", "b"], {"a": [0, 3], "b": [0, 3]})
    assert [row["id"] for row in found["problems"]] == ["p1", "p0"]  # differ most first
    assert found["problems"][0]["rates"] == {
        "a": {"before": 0.0, "after": 0.5, "answers": 2},
        "b": {"before": 1.0, "after": 0.0, "answers": 2},
    }
    assert [row["id"] for row in matrix(runs, "heldout").shown(sort="worse")["problems"]] == ["p1", "p0"]
    assert [row["id"] for row in matrix(runs, "heldout").shown(tag="hard")["problems"]] == ["p1"]
    assert [row["id"] for row in matrix(runs, "heldout").shown(text="IS P0")["problems"]] == ["p0"]
    assert matrix(runs, "nowhere").shown()["problems"] == []
    with pytest.raises(UsageError, match="is none of differ"):
        matrix(runs, "heldout").shown(sort="x")
    one = evolution(runs, "heldout", "p1")["conditions"]
    evolved = [{"step": 0, "rate": 1.0, "answers": 2}, {"step": 3, "rate": 0.0, "answers": 2}]
    assert one["a"] == [{"step": 0, "rate": 0.0, "answers": 2}, {"step": 3, "rate": 0.5, "answers": 2}]
    with pytest.raises(UsageError, match="has a problem 'p9'"):
        evolution(runs, "heldout", "p9")
    for folder in (folder for own in folders.values() for folder in own):
        (folder / "iterations.jsonl").unlink()
    runs = {label: [Index(folder) for folder in own] for label, own in folders.items()}
    assert matrix(runs, "heldout").shown() == found  # a run of an earlier release has no index
    assert evolution(runs, "heldout", "p1")["conditions"] == one | {"b": evolved}


def test_the_same_prompt_twice_names_the_words_and_the_first_token_that_differ(tmp_path):
    left = record(tmp_path / "a", texts=("so 4", "it is five"))
    right = record(tmp_path / "b", texts=("so 4", "it was five"))
    left, right = Index(left), Index(right)
    one, other = (index.get("eval/heldout", 0) for index in (left, right))
    found = twice((left, one), (right, other), "p1")
    assert found["diverge"] == [0, 1]
    assert found["a"]["pieces"][0][:3] == ["it ", "is ", "five "]
    changed = [(tag, found["words"][0][a:b], found["words"][1][c:d]) for tag, a, b, c, d in found["changes"]]
    assert [each for each in changed if each[0] != "equal"] == [("replace", ["is "], ["was "])]
    assert "".join(found["words"][0]) == "it is five "
    assert twice((left, one), (right, other), "p0")["diverge"] is None
    train = left.get("train", 1)
    assert twice((left, train), (right, other), "p0")["diverge"] is None  # no tokens on one side
    with pytest.raises(UsageError, match="has no sample 1 of problem 'p1'"):
        twice((left, one), (right, other), "p1", sample=1)
