import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.campaigns import run_cli
from helpers.records import HOSTILE, MARKER, Reader

from retrain.campaign.planning.manifest import Manifest, write_plan
from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.config.comparing import Compare
from retrain.errors import NotOurs
from retrain.files import append_jsonl
from retrain.records.foreign.table import RunTable
from retrain.verdicts.declaration import Standing
from retrain.verdicts.evidence import campaign_of_tables, read_campaign
from retrain.verdicts.pooling import conclude
from retrain.verdicts.report import write_campaign, write_report
from retrain.verdicts.report_sections import RESULTS, results
from retrain.verdicts.tables import judge_tables

CONDITION = '[[campaign.conditions]]\nadvantage_mode = "{}"\ntransform_mode = "none"\n'


def made(tmp_path: Path, seeds: int = 3, conditions: int = 2, states: dict | None = None, evaluated: bool = True,
         texts: list[str] | None = None) -> Path:  # fmt: skip
    head = f"[campaign]\nseeds = {list(range(1, seeds + 1))}\nmax_steps = 4\n"
    toml = tmp_path / "made.toml"
    toml.write_text(head + "".join(CONDITION.format(each) for each in ("grpo", "rloo", "maxrl")[:conditions]))
    loaded = load(toml)
    planned = Plan.of(loaded, tmp_path / "out")
    specs, out = planned.specs, planned.directory
    out.mkdir()
    manifest = Manifest.open(out, "made <b>", specs)
    write_plan(planned)
    words = itertools.cycle(texts or ["so \\boxed{4}", "or \\boxed{5}"])
    for spec in specs:
        state = (states or {}).get(spec.run_id, "done")
        manifest.update(spec.run_id, state=state, reason="broken <script>" if state == "failed" else None)
        if state == "pending":
            continue
        folder, better = out / "runs" / spec.run_id, spec.label.startswith("rloo")
        steps = 2 if state == "failed" else 4
        append_jsonl(folder / "metrics.jsonl", [
            {"step": s, "num_tokens": 100 * s, "correct_rate": 0.4 + 0.1 * s, "mean_reward": 0.4 + 0.1 * s,
             "completions/mean_length": 20.0 + s, "entropy": 0.5 - 0.1 * s, "time/update": 1.0, "cohort_size": 2,
             "sepa_lambda": s / 4 if better else 0.0, "sepa_gate_open": False}
            for s in range(steps)
        ])  # fmt: skip
        (folder / "train_iteration_000000.html").write_text("page")
        for step in (0, 4) if evaluated and state == "done" else ():
            value = (2 + better * (step > 0)) / 4
            row = {"step": step, "name": "heldout", "samples": 1, "eval/heldout/problems": 4}
            append_jsonl(folder / "evals.jsonl", [row | {
                "eval/heldout/correct_rate": value, "eval/heldout/easy/correct_rate": value}])  # fmt: skip
            append_jsonl(folder / "emergence/evaluations.jsonl", [
                {"step": step, "name": "heldout", "problem_id": f"p{i}", "prompt": f"What is {i}? {next(words)}",
                 "completion": next(words), "reward": float(i < 2 + better), "correct": i < 2 + better * (step > 0),
                 "num_tokens": 5 + i, "stop_reason": "stop", "sample": 0, "tags": ["easy"]}
                for i in range(4)
            ])  # fmt: skip
        append_jsonl(folder / "emergence/generations.jsonl", [
            {"step": s, "problem_id": f"t{s}", "prompt": next(words), "completion": next(words), "reward": 1.0,
             "correct": better, "num_tokens": 7, "stop_reason": "length", "sample": 0}
            for s in range(steps)
        ])  # fmt: skip
    runs = manifest.content["runs"]
    if len(specs) > 1 and any(run["state"] == "done" for run in runs):
        manifest.files.flush()
        manifest.note(comparison=conclude(out))
    manifest.files.flush()
    return out


def harmless_report(out: Path) -> Reader:
    return harmless(write_report(out))


def harmless(path: Path) -> Reader:
    reader = Reader(path.read_text(encoding="utf-8"))
    assert reader.tags.count("script") == 2  # the data of the charts, and the page's own
    for tag, attributes in reader.elements:
        assert tag not in ("img", "iframe", "link", "object", "form", "base"), tag
        assert not [name for name in attributes if name.startswith("on")], attributes
        address = attributes.get("href") or attributes.get("src") or "#"
        assert re.match(r"(#|runs/)", address), address
    assert "http-equiv" in reader.page
    places = {attributes["data-charts"] for _, attributes in reader.elements if "data-charts" in attributes}
    assert places == charts_of(reader.page).keys()
    return reader


def charts_of(page: str) -> dict[str, list[dict]]:
    """Return what the report's script draws, by place. NaN fails: a browser's ``JSON.parse`` refuses it."""
    data = re.search(r'id="charts">(.*?)</script>', page)[1]
    assert not set(data) & set("<>&")
    return json.loads(data, parse_constant=pytest.fail)


def test_a_whole_campaign(tmp_path):
    reader = harmless_report(made(tmp_path))
    assert "made <b>" in reader.text
    assert "2 conditions × 3 seeds" in reader.text
    curves = {chart["title"]: chart["body"]["conditions"] for chart in charts_of(reader.page)["curves"]}
    assert [condition["label"] for condition in curves["SEPA: pooling λ"]] == ["rloo"]  # 0 where there is no SEPA
    assert "SEPA: gate open (share of runs)" not in curves
    links = [attributes["href"] for tag, attributes in reader.elements if tag == "a"]
    assert "runs/rloo%2Bnone_s2/train_iteration_000000.html" in links
    same = reader.text[reader.text.index("grpo → rloo, after training") :]
    assert same.index("What is 2?") < same.index("0/3 → 3/3") < same.index("+100 points")
    assert "rloo, seed 1: right" in same
    done = run_cli("report", tmp_path / "out", "--out", tmp_path / "made/by/it/r.html")
    assert (done.exit_code, done.output.strip()) == (0, str(tmp_path / "made/by/it/r.html"))
    assert (tmp_path / "made/by/it/r.html").read_text(encoding="utf-8") == reader.page
    refused = run_cli("report", tmp_path / "out", "--out", tmp_path / "made.toml/below.html")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert run_cli("report", tmp_path / "nowhere").exit_code == 2


def test_the_interval_for_new_problems_is_given_once(tmp_path):
    _, (baseline, rloo) = results(read_campaign(made(tmp_path, seeds=8)))
    assert baseline[RESULTS.index("typical difference")] == "baseline"
    assert rloo[RESULTS.index("typical difference")] == "+25.0 points [+25.0, +25.0] [−53.6, +100.0]"


STATES = {"rloo+none_s1": "failed", "grpo+none_s2": "interrupted", "rloo+none_s3": "pending"}
ALL = [f"{mode}+none_s{seed}" for mode in ("grpo", "rloo") for seed in (1, 2, 3)]


@pytest.mark.parametrize(("shape", "parts"), [
    ({"seeds": 1}, ["cannot tell"]),
    ({"seeds": 1, "conditions": 1}, ["One condition: nothing is compared"]),
    ({"evaluated": False}, ["training prompts"]),
    ({"states": STATES}, ["3 done, 1 failed, 1 interrupted, 1 pending", "broken <script>", "interim", *STATES]),
    ({"states": dict.fromkeys(ALL, "pending")}, ["6 pending"]),
    ({"texts": list(HOSTILE.values())}, []),
])  # fmt: skip
def test_campaigns_of_every_shape(tmp_path, shape, parts):
    reader = harmless_report(made(tmp_path, **shape))
    assert "Runs" in reader.text
    for part in parts:
        assert part.lower() in reader.text.lower()
    assert f"<script>window.{MARKER}" not in reader.page
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066]", reader.page)


def tables(
    conditions: Sequence[str] = ("grpo", "rloo"),
    seeds: Sequence[int | None] = (1, 2, 3, 4, 5, 6),
    problems: Sequence[str] = ("p0", "p1", "p2", "p3"),
    steps: Sequence[int] = (0, 10, 20),
) -> list[RunTable]:
    """Answers of another tool: the later condition solves one problem more after training."""
    runs = []
    for place, condition in enumerate(conditions):
        for seed in seeds:
            run = RunTable(condition, seed, f"{condition} seed {seed}", state="done", started=1.8e9, has_times=True)
            grades = {step: {p: [float(i < 2 + place * (step > 0))] for i, p in enumerate(problems)} for step in steps}
            run.answers["math", "acc"] = grades
            runs.append(run)
    return runs


def foreign_report(target: Path, runs: Sequence[RunTable], name: str = "others.toml", **compare) -> Reader:
    judged = judge_tables(runs, Compare(**compare), Standing())
    return harmless(write_campaign(campaign_of_tables(name, judged), target, "--report"))


def test_a_report_of_other_tools_results(tmp_path):
    runs = tables()
    runs[-1].state = "failed"
    reader = foreign_report(tmp_path / "r.html", runs)
    for part in ("others.toml", "2 conditions × 6 seeds", "11 done, 1 failed", "rloo seed 6", "interim: 5 of 6 pairs",
                 "Final math/acc", "change, points"):  # fmt: skip
        assert part in reader.text
    assert "<th>tokens / run" not in reader.page
    (chart,) = charts_of(reader.page)["curves"]
    grpo, rloo = chart["body"]["conditions"]
    assert chart["unit"] == "%"
    assert grpo["mean"] == [[0, 0.5], [10, 0.5], [20, 0.5]]
    assert rloo["mean"] == [[0, 0.5], [10, 0.75], [20, 0.75]]
    assert len(rloo["band"]) == 3
    changes = re.sub(r"\s+", " ", reader.text[reader.text.index("grpo → rloo") :])
    assert changes.startswith(
        "grpo → rloo 4 problems: 1 higher, 0 lower problemgrporloochange, points p20.0%100.0%+100.0 rloo: first → last"
    )


@pytest.mark.parametrize(("shape", "compare", "part"), [
    ({"seeds": [None] * 6}, {}, "permutations of whole runs"),
    ({"seeds": [None]}, {}, "say nothing about another training run"),
    ({"steps": [0]}, {}, "Final math/acc"),
    ({"conditions": ["grpo"]}, {}, "One condition: nothing is compared"),
    ({}, {"seeds": [1, 2, 3, 4, 5, 6, 7]}, "2 missing"),
    ({}, {"metric": "auc:acc"}, "Area under math/acc"),
])  # fmt: skip
def test_other_tools_results_of_every_shape(tmp_path, shape, compare, part):
    assert part in re.sub(r"\s+", " ", foreign_report(tmp_path / "r.html", tables(**shape), **compare).text)


def test_names_of_other_tools_are_hostile_texts(tmp_path):
    texts = [text for text in HOSTILE.values() if text.strip()]
    problems = dict.fromkeys(f"{text} {i}" for i, text in enumerate([*texts, *texts]))
    runs = tables(
        conditions=[HOSTILE["script"], HOSTILE["script_end"], HOSTILE["high_surrogate"]], problems=list(problems)
    )
    reader = foreign_report(tmp_path / "r.html", runs, name=HOSTILE["comment_end"])
    assert "Problems" in reader.text
    assert f"<script>window.{MARKER}" not in reader.page
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066]", reader.page)


def test_a_report_replaces_only_a_report_of_the_same_results(tmp_path):
    target = tmp_path / "r.html"
    foreign_report(target, tables())
    foreign_report(target, tables(seeds=[1, 2]))
    with pytest.raises(NotOurs, match="give another file with --report"):
        foreign_report(target, tables(), name="more.toml")
    target.write_text("mine")
    with pytest.raises(NotOurs):
        foreign_report(target, tables())
    assert target.read_text() == "mine"
