"""Files of a campaign and a run that version 0.4 has written, through the reader and against the declared types."""

import tarfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from list_records import fields_markdown, metrics_markdown
from pydantic import TypeAdapter

from retrain.cli.run_status import read_status
from retrain.files import read_json, read_jsonl
from retrain.records.columns import Columns
from retrain.records.pages.timeline import steps_of
from retrain.records.reader import (
    evaluation_rows,
    held_out_completions,
    homes_of_runs,
    read_config,
    read_manifest,
    recorded_checkpoints,
    run_entries,
)
from retrain.records.schema.base import Record, Row
from retrain.records.schema.campaign import CampaignManifest, CheckpointFiles, RunEntry
from retrain.records.schema.comparison import Comparison, ConditionComparison, ConditionSummary, SecondaryComparison
from retrain.records.schema.layout import (
    CAMPAIGN_FILES,
    GENERATIONS,
    MANIFEST,
    METRICS,
    NOTES,
    RUN_FILES,
    SPANS,
    STATE,
    SUMMARIES,
)
from retrain.records.schema.rows import RecorderState, TrajectorySummary
from retrain.ui.iterations import Index, rollouts_of
from retrain.ui.places import Places
from retrain.util.jsonl import last_row
from retrain.verdicts.pooling import conclude

ARCHIVE = Path(__file__).parent / "data" / "version_0.4.tar.xz"
OPEN = ("eval/", "exec_", "plan_")  # Beginnings of keys that the catalogue describes
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with ``campaign`` (two conditions, two seeds) and ``single``, without weights."""
    directory = tmp_path_factory.mktemp("recorded")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


def check(rows: list[Row], record: type[Record]) -> None:
    """Check that rows have the declared kinds of values, and no key that is not declared."""
    adapter, declared = TypeAdapter(record), set(record.field_names())
    assert rows
    for row in rows:
        assert {key for key in row if key not in declared and not key.startswith(OPEN)} == set()
        adapter.validate_python({key: value for key, value in row.items() if key in declared})


def runs(recorded: Path) -> list[Path]:
    return [recorded / "single", *sorted((recorded / "campaign/runs").iterdir())]


def test_every_row_is_as_declared(recorded):
    for run in runs(recorded):
        for file in RUN_FILES:
            if file.row is not None and (run / file.name).is_file() and "<" not in file.name:
                check(read_jsonl(run / file.name), file.row)
        for path in run.glob(f"*{SUMMARIES}"):
            check(read_jsonl(path), TrajectorySummary)
        for checkpoint in run.glob("checkpoints/*"):
            check([read_json(checkpoint / MANIFEST)], CheckpointFiles)
            check([read_json(checkpoint / STATE)["recorder"]], RecorderState)
    for home in (recorded / "single", recorded / "campaign"):
        manifest = read_json(home / MANIFEST)
        check([manifest], CampaignManifest)
        check(manifest["runs"], RunEntry)
    comparison = conclude(recorded / "campaign")
    check([comparison], Comparison)
    check(comparison["conditions"], ConditionComparison)
    check(comparison["secondary"], SecondaryComparison)
    check([row for measure in comparison["secondary"] for row in measure["conditions"]], ConditionSummary)


def test_every_file_is_declared(recorded):
    names = [file.name.replace("<n>", "*").replace("<name>", "*").replace("…", "*") for file in RUN_FILES]
    further = ["checkpoints/*", "final/*", "squeeze/*", "*_logtree.json", "*_iteration_*.html", "tokens_*"]
    of_campaigns = [file.name for file in CAMPAIGN_FILES]
    for run in runs(recorded):
        files = [path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()]
        known = [*names, *further, *(of_campaigns if run.name == "single" else ())]
        assert [name for name in files if not any(fnmatch(name, pattern) for pattern in known)] == []


def test_the_reader_reads_them(recorded):
    assert homes_of_runs(recorded) == [recorded / "campaign", recorded / "single"]
    manifest = read_manifest(recorded / "campaign")
    entries = run_entries(recorded / "campaign", manifest)
    assert [entry.run_id for entry in entries] == [run["run_id"] for run in manifest["runs"]]
    assert {entry.state for entry in entries} == {"done"}
    for path in runs(recorded):
        metrics = read_jsonl(path / METRICS)
        assert [row["step"] for row in metrics] == [0, 1, 2]
        assert last_row(path / METRICS) == metrics[-1]
        assert [row["step"] for row in evaluation_rows(path, "heldout")] == [0, 2, 3]
        assert [row["name"] for row in recorded_checkpoints(path)] == ["000002", "000003", "final"]
        assert len(read_jsonl(path / GENERATIONS)) == 12
        assert len(held_out_completions(path, "heldout")) == 12
        assert all(note["level"] in ("info", "warning") for note in read_jsonl(path / NOTES))
        assert [step.number for step in steps_of(read_jsonl(path / SPANS))] == [0, 1, 2]
        assert read_config(path)["training"]["max_steps"] == 3
        columns = Columns(path / METRICS)
        columns.refresh()
        assert columns.column("step").tolist() == [0, 1, 2]
        index = Index(path, Places([path]).file, path.name)
        assert [len(rollouts_of(index, one)) for one in index.refresh().values()] == [4] * 6
    (report,) = read_status(recorded / "single")["runs"]
    assert (report["state"], report["step"], list(report["evaluations"])) == ("done", 3, ["heldout"])


@pytest.mark.parametrize(("name", "made"), [("metrics.md", metrics_markdown), ("fields.md", fields_markdown)])
def test_the_documents_are_current(name, made):
    assert (DOCS / name).read_text(encoding="utf-8") == made(), "type: make docs"
