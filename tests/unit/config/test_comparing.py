"""A comparison file is read, or all of its mistakes are named with their lines."""

import pytest
from helpers.campaigns import run_cli

from retrain.config.comparing import Compare, is_comparison_file, load_comparison
from retrain.errors import ConfigError, UsageError

FILE = """\
[compare]
metric = "last3:acc"
seeds = [1, 2]

[[results]]
path = "outputs/{condition}/seed{seed}/{step}.jsonl"

[[results]]
path = "sheet.csv"
columns = { condition = "method", value = "acc" }
where = { split = "test", epoch = 3 }
"""
WRONG = """\
[compare]
metric = 3
unitt = "share"
unit = "shares"
seeds = [-1]

[[results]]
paths = "outputs"
columns = { value = 3 }

[extra]
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="compare.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def mistakes(path, sets=()):
    with pytest.raises(ConfigError) as caught:
        load_comparison(path, sets)
    return str(caught.value).splitlines()


def test_a_comparison_file_is_read(write):
    file = load_comparison(write(FILE), ["compare.steps=200"])

    assert (file.compare.measure, file.compare.seeds, file.compare.steps) == (("last3", "acc"), [1, 2], 200)
    assert [entry.path for entry in file.results] == ["outputs/{condition}/seed{seed}/{step}.jsonl", "sheet.csv"]
    assert file.results[1].where == {"split": "test", "epoch": 3}


def test_all_mistakes_are_named_with_their_lines(write):
    assert mistakes(write(WRONG)) == [
        "compare.toml:2  compare.metric  is 3, a number, but must be a string: remove the line for the default",
        'compare.toml:3  compare.unitt  is not a key of [compare]: did you mean unit = "share"',
        'compare.toml:4  compare.unit  is "shares", but must be one of "share", "number": did you mean unit = "share"',
        "compare.toml:5  compare.seeds  is [-1], but must be a list of integers ≥ 0: remove the line for the default",
        'compare.toml:7  results[1].path  is missing: path = "outputs/{condition}/seed{seed}"',
        'compare.toml:8  results[1].paths  is not a key of [[results]]: did you mean path = "outputs"',
        "compare.toml:9  results[1].columns  has value = 3, a number, but its values must be a string: columns = {}",
        "compare.toml:11  extra  is no section of a comparison file: the sections are [compare] and [[results]]",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[compare]\nmetric = "acc"\n', 'compare.toml:1  results  is missing: [[results]] and below it path = "'),
        ("results = []\n", "compare.toml:1  results  is missing: [[results]]"),
        ('[results]\npath = "a"\n', "compare.toml:1  results  is { path"),
        ("results = [3]\n", "compare.toml:1  results[1]  is 3, a number, but must be a table: [[results]]"),
        (
            "compare = 3\n[[results]]\npath = 'a'\n",
            "compare.toml:1  compare  is 3, a number, but must be a table: [comp",
        ),
        (
            "[compare]\nmetric = acc\n",
            'compare.toml:2  syntax  is not TOML: invalid value at column 10: metric = "acc"',
        ),
    ],
)
def test_mistakes_in_the_structure(write, text, message):
    assert mistakes(write(text))[0].startswith(message)


def test_a_wrong_setting_is_named(write):
    assert mistakes(write(FILE), ["compare.steps=many"])[0].startswith('--set  compare.steps  is "many"')


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none.toml: no such file"):
        load_comparison(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(FILE, True), ("[[ results ]]\npath = ", True), ("[campaign]\nseeds = [1]\n", False), ("# [compare]\n", False)],
)
def test_a_comparison_file_is_told_from_a_campaign_file(write, text, expected):
    assert is_comparison_file(write(text)) is expected


@pytest.mark.parametrize(
    ("metric", "measure"),
    [
        (None, ("final", None)),
        ("acc", ("final", "acc")),
        ("auc", ("auc", None)),
        ("last3:math/acc", ("last3", "math/acc")),
        ("a:b", ("final", "a:b")),
    ],
)
def test_the_metric_is_a_summary_and_a_name(metric, measure):
    assert Compare(metric=metric).measure == measure


def test_check_names_the_mistakes_of_a_comparison_file(write):
    result = run_cli("check", write(WRONG))

    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 8)
