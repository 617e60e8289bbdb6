import json

import pytest

from retrain.config.comparing import ComparisonFile
from retrain.errors import UsageError
from retrain.records.foreign.table import MetricFacts, RunTable
from retrain.verdicts.lock import declare, lock_note, lock_path, read_lock, standing_of

DECLARED = {
    "metric": "style",
    "conditions": ["grpo", "rloo"],
    "seeds": [1, 2],
    "higher_is_better": True,
    "unit": "share",
}
RESULTS = {"path": "out/{condition}/{seed}/{step}.jsonl"}
NOON = 1.8e9


def comparison(*, results=RESULTS, **changes) -> ComparisonFile:
    compare = {key: value for key, value in (DECLARED | changes).items() if value is not None}
    return ComparisonFile.model_validate({"compare": compare, "results": [results]})


def runs(started: float | None = NOON + 60, has_times: bool = True, conditions=("grpo", "rloo")) -> list[RunTable]:
    return [
        RunTable(
            condition,
            seed,
            f"{condition} seed {seed}",
            numbers={("heldout", "style"): {10: 0.5}},
            started=started,
            has_times=has_times,
        )
        for condition in conditions
        for seed in (1, 2)
    ]


def reasons(path, file, tables) -> str:
    return "; ".join(standing_of(read_lock(path), file, tables).reasons)


@pytest.fixture
def locked(tmp_path):
    """A file that was declared at noon."""
    declare(tmp_path / "c.toml", comparison(), [], NOON)
    return tmp_path / "c.toml"


def test_results_after_the_declaration_have_a_verdict(locked):
    assert reasons(locked, comparison(), runs()) == ""
    content = json.loads(lock_path(locked).read_text())
    assert (content["time"], content["unix"]) == ("2027-01-15T08:00:00+00:00", NOON)
    assert content["compare"]["conditions"] == ["grpo", "rloo"]


def test_without_a_lock_everything_is_exploratory(tmp_path):
    assert reasons(tmp_path / "c.toml", comparison(), runs()) == "nothing was declared before the results"


def test_one_early_run_makes_all_exploratory(locked):
    tables = runs()
    tables[2].started = NOON - 1
    assert reasons(locked, comparison(), tables) == "there were results before the declaration (rloo seed 1)"
    tables[2].started = None
    assert reasons(locked, comparison(), tables) == "the time of the results is not known (rloo seed 1)"
    assert reasons(locked, comparison(), [*runs(), *runs(NOON - 1, conditions=["other"])]) == ""
    assert reasons(locked, comparison(), [*runs(), RunTable("grpo", 1, "without results")]) == ""


@pytest.mark.parametrize(("change", "keys"), [
    ({"metric": "f1", "seeds": [1, 2, 3]}, "[compare] metric, [compare] seeds"),
    ({"equivalence_margin": 0.1}, "[compare] equivalence_margin"),
    ({"results": {"path": "b.csv"}}, "[[results]]"),
    ({"results": RESULTS | {"where": {"split": "test"}}}, "[[results]]"),
])  # fmt: skip
def test_a_changed_file_is_exploratory(locked, change, keys):
    assert reasons(locked, comparison(**change), runs()) == f"protocol deviation: changed after the declaration: {keys}"


def test_an_edited_lock_is_exploratory(locked):
    path = lock_path(locked)
    path.write_text(path.read_text().replace("1800000000.0", "1700000000.0"))
    assert "the lock was edited" in reasons(locked, comparison(), runs())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[1]",
        '{"format": 1, "time": "", "unix": 1, "compare": {"a": 1}, "results": [{"path": "a"}]}',
        '{"format": 1, "time": "", "unix": 1, "compare": {}, "results": [{"path": "a"}], "runs_before": 3}',
        '{"format": 1, "time": "", "unix": 1e300, "compare": {}, "results": [{"path": "a"}]}',
    ],
)
def test_a_damaged_lock_is_an_error(tmp_path, text):
    lock_path(tmp_path / "c.toml").write_text(text)
    with pytest.raises(UsageError, match=r"c\.toml\.lock is not the lock of a comparison"):
        read_lock(tmp_path / "c.toml")


def test_a_declaration_is_not_changed(locked):
    before = lock_path(locked).read_bytes()
    with pytest.raises(UsageError, match="delete the lock or use another file name"):
        declare(locked, comparison(seeds=[1, 2, 3]), [], NOON + 1)
    assert lock_path(locked).read_bytes() == before


@pytest.mark.parametrize(("without", "message"), [
    (["conditions"], 'declares no conditions; add below [compare]: conditions = ["grpo", "rloo"]'),
    (["seeds", "unit"], "declares no seeds and no unit"),
    (["metric", "higher_is_better"], "declares no metric; add"),
    (["higher_is_better"], "add below [compare]: higher_is_better = true"),
])  # fmt: skip
def test_a_declaration_names_family_and_metric(tmp_path, without, message):
    with pytest.raises(UsageError) as error:
        declare(tmp_path / "c.toml", comparison(**dict.fromkeys(without)), [], NOON)
    assert message in str(error.value)
    assert not lock_path(tmp_path / "c.toml").exists()


def test_facts_that_are_known_need_no_key(tmp_path):
    unknown = {"higher_is_better": None, "unit": None}
    declare(tmp_path / "own.toml", comparison(metric="last3:correct_rate", **unknown), [], NOON)
    tables = runs()
    tables[0].facts = {"sty*": MetricFacts(higher_is_better=True, unit="share")}
    declare(tmp_path / "stated.toml", comparison(**unknown), tables, NOON)
    declare(tmp_path / "models.toml", comparison(replicate="none", seeds=None), [], NOON)


def test_existing_results_are_named_and_stay_exploratory(tmp_path):
    path, tables = tmp_path / "c.toml", runs(NOON - 5)
    lines = declare(path, comparison(), tables[:1], NOON)
    assert lines[1].startswith("steps is not declared")
    assert lines[2] == "there are results already: grpo seed 1 stay exploratory"
    later = runs(NOON + 5)  # their files were copied: the times are newer now
    assert reasons(path, comparison(), later) == "there were results before the declaration (grpo seed 1)"


def test_the_note_says_where_the_times_are_from(locked):
    lock = read_lock(locked)
    assert lock is not None
    assert "2027-01-15 08:00 UTC" in lock_note(lock, comparison(), runs())
    assert "anyone can set" in lock_note(lock, comparison(), runs(has_times=False))
