from __future__ import annotations

from retrain.campaign.planning.manifest import MANIFEST, Manifest
from retrain.files import dumps

REASONS = (None, 'a "b"\n\tc', "new\nline \u2028 ä", float("nan"))


def entries(count: int) -> list[dict]:
    return [{"run_id": f"a_s{i}", "label": "a", "seed": i, "state": "pending", "reason": None, "step": 0, "path": "é"}
            for i in range(count)]  # fmt: skip


def test_what_was_changed_is_in_the_file_whoever_writes_meanwhile(tmp_path):
    with Manifest(tmp_path, {"runs": entries(40), "cohorts": []}) as manifest:
        for number in range(200):
            name = f"a_s{number % 40}"
            manifest.step(name, number)
            if number % 3 == 0:
                manifest.update(name, state="running", worker=f"{number} cpu", reason=REASONS[number % 4])
            if number % 5 == 0:
                manifest.note(cohorts=[[name]], lanes=number)
            if number % 7 == 0:
                manifest.update(name, without=["worker"], state="done")
                assert "worker" not in manifest.run(name)
        manifest.files.flush()
        assert (tmp_path / MANIFEST).read_text() == dumps(manifest.content, indent=2) + "\n"
