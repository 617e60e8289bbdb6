import os
from pathlib import Path
from typing import Any

import pytest

from retrain.errors import NotOurs
from retrain.files import read_jsonl
from retrain.ownership import claim
from retrain.records.observer import NullObserver
from retrain.records.registry import History, Registry, history
from retrain.records.schema.campaign import RunEntry, Seal

SEEDS = [1, 2, 3]
SEAL = Seal("d", 1, "e1", 0, "").to_row()


def declared(seeds: list[int] = SEEDS, **settings: str) -> dict[str, Any]:
    conditions = {"a": "h1", "b": "h2"} | settings
    return {
        "settings": conditions, "max_steps": dict.fromkeys(conditions, 4), "seeds": seeds, "baseline": "a",
        "primary_metric": "final", "equivalence_margin": None, "sequential": "on",
    }  # fmt: skip


def entry(label: str, seed: int, **facts: Any) -> RunEntry:
    row = {"run_id": f"{label}_s{seed}", "label": label, "seed": seed, "state": "done", "max_steps": 4, "seal": SEAL}
    return RunEntry.from_row(row | facts)


def campaign(folder: Path, name: str, what: dict[str, Any], finished: list[int] = SEEDS) -> Registry:
    """A directory that has declared ``what`` and finished these seeds."""
    directory = folder / name
    directory.mkdir()
    claim(directory)
    registry = Registry(directory)
    assert registry.prepare(NullObserver()) == "on"
    registry.declare(what, "d")
    for label in what["settings"]:
        for seed in finished:
            registry.finish(entry(label, seed), what)
    return registry


def said(registry: Registry, **manifest: Any) -> History:
    entries = [entry(label, seed).to_row() for label in "ab" for seed in SEEDS]
    return history(registry.directory, {"registry": "a time", "runs": entries, **manifest})


def test_a_first_declaration_has_no_remark_and_is_not_repeated(tmp_path):
    registry = campaign(tmp_path, "one", declared(), finished=[])
    first = registry.declare(declared(), "d")  # killed before the manifest knew of it
    (line,) = read_jsonl(registry.path)
    assert (line["time"], line["directory"], line["data"]) == (first, "one", "d")
    for _ in range(2):
        registry.finish(entry("a", 1), declared())
    assert len(read_jsonl(registry.path)) == 2
    assert said(registry) == History()
    assert history(registry.directory, {"runs": []}) == History()  # declared by an earlier version


@pytest.mark.parametrize(("what", "finished", "counted", "known"), [
    (declared([7, 8, 9]), SEEDS, True, False),
    (declared([1, 2]), SEEDS, True, True),
    (declared([1, 2, 3, 4]), SEEDS, True, True),
    (declared([1, 2]), [], True, False),
    (declared(SEEDS), SEEDS, True, False),
    (declared([1, 2], c="h3"), SEEDS, False, True),
    (declared([1, 2], a="h4"), SEEDS, False, False),
    (declared([1, 2]) | {"max_steps": {"a": 8, "b": 8}}, SEEDS, False, False),
    (declared([1, 2]) | {"primary_metric": "auc", "baseline": "b"}, SEEDS, True, True),
])  # fmt: skip
def test_what_was_declared_and_seen_before(tmp_path, what, finished, counted, known):
    campaign(tmp_path, "one", declared(), finished)
    found = said(campaign(tmp_path, "two", what, finished=[]), runs=[])
    runs = f"{2 * len(finished)} runs"
    expected = f"Second declaration of this comparison; before it: one (3 seeds, {runs} finished)."
    assert found.notes == [expected] * counted
    assert [text.startswith("seeds had finished before they were declared (1, 2") for text in found.deviations] == [
        True
    ] * known


def test_runs_that_are_not_as_they_finished(tmp_path):
    registry = campaign(tmp_path, "one", declared())
    entries = [entry(label, seed) for label in "ab" for seed in SEEDS]

    def after(**changes: Any) -> list[str]:
        rows = [each.to_row() | changes if each.run_id == "b_s2" else each.to_row() for each in entries]
        return said(registry, runs=rows).deviations

    assert after() == []
    assert after(state="running") == after(max_steps=8, state="pending") == []
    assert after(state="failed") == ["b_s2 had finished and is failed"]
    assert after(seal={**SEAL, "evaluations_sha256": "e2"}) == ["b_s2 had finished and has other evaluations"]
    rows = [each.to_row() for each in entries if each.run_id != "b_s2"]
    assert said(registry, runs=rows).deviations == ["b_s2 had finished and is not in the manifest"]
    registry.finish(entry("b", 2, seal={**SEAL, "evaluations_sha256": "e2"}), declared())
    assert "b_s2 has finished more than once, with different evaluations" in after()


def test_lines_of_several_processes_are_whole_and_a_torn_one_is_left_out(tmp_path):
    registry = campaign(tmp_path, "one", declared(), finished=[])
    with open(registry.path, "a") as file:
        file.write('{"kind": "run", "own')
    children = []
    for label in "abcd":
        if not (child := os.fork()):
            for seed in range(25):
                registry.finish(entry(label, seed), declared())
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert len(registry.lines()) == 101
    assert len(registry.path.read_text().splitlines()) == 102


def test_a_registry_that_is_gone_is_told(tmp_path):
    registry = campaign(tmp_path, "one", declared())
    registry.path.unlink()
    assert said(registry).notes == ["registry.jsonl beside the directory does not have its declaration."]


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "registry.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotOurs, match="is not a registry of retrain"):
        Registry(tmp_path / "one").check()
