"""The campaigns that a soak kills, and what has to be equal in their directories."""

import json
import shutil
from pathlib import Path
from typing import Any

TOML = """
{head}
[model]
model = "{model}"
lora_rank = 2
[training]
batch_size = 2
save_every = 2
eval_every = 3
keep_every = 4
{training}
[evaluation]
problems = 3
[squeeze]
enabled = {squeeze}
verify = "off"
{rest}
"""
TOOLS = """
[environment]
tools = ["calculator"]
tools_prompt = ""
max_turns = 3
[data]
source = "calculations:problems"
tags_column = "kind"
"""
FUNCTIONS = """
[sepa]
steps = 4
[data]
source = "soakproblems:problems"
[reward]
type = "custom"
custom_module = "soakreward.py"
workers = 1
"""
CONDITION = '[[campaign.conditions]]\nadvantage_mode = "{}"\ntransform_mode = "{}"\n{}\n'
SINGLE = '[algorithm]\nadvantage_mode = "maxrl"\ntransform_mode = "gtpo_sepa"\n'
SEVERAL = "num_iterations = 2\nminibatches = 2\n"
TWO = CONDITION.format("grpo", "none", "") + CONDITION.format("rloo", "gtpo_sepa", "")
CRITICS = CONDITION.format(
    "gae", "none", 'kl_coef = 0.05\nkl_in_reward = "k1"\ncritic = {warmup_steps = 2, lr = 0.02, lora_rank = 3}'
) + CONDITION.format("gae", "gtpo_sepa", "critic = {share_adapter = true}")
TURN_CREDIT = "".join(CONDITION.format("grpo", "none", f'turn_credit = "{kind}"') for kind in ("episode", "turn"))
REWARD = "def score(completion, answer):\n    return len(completion) % 5 / 4\n"
PROBLEMS = """from tests.soak.traps import TRAINING, take_trap

def problems():
    take_trap(TRAINING)
    return [{"prompt": f"{a}+{a % 7}=?", "answer": str(a + a % 7)} for a in range(11, 61)]
"""
"""A data source, which every job runs in its worker before it reads or writes anything of its runs."""
KINDS = ("critics", "single", "updates", "campaign", "episodes")  # that one process trains


def prepare(folder: Path) -> None:
    """Write a model, a reward, a data source and the file of every kind into ``folder``."""
    from tests.helpers.models import qwen3_directory

    qwen3_directory(folder / "model", ["What is 3 + 4? 7", "Compute 12 * 3."], hidden=16)
    (folder / "soakreward.py").write_text(REWARD)
    (folder / "soakproblems.py").write_text(PROBLEMS)
    shutil.copy(Path(__file__).parents[2] / "campaigns" / "calculations.py", folder)
    head = "[campaign]\nseeds = {}\nmax_steps = {}\nlanes = 2\n"
    workers = 'executor = "processes"\nworkers = 2\nmax_restarts = 1000\n'
    updates = f'max_steps = 5\nseed = 5\n{SEVERAL}minibatch_by = "sequence"\ntarget_kl = 0.02\n'
    for kind, top, training in (
        ("critics", head.format([1], 5) + CRITICS, SEVERAL),
        ("single", SINGLE, "max_steps = 7\nseed = 3\n"),
        ("updates", SINGLE, updates),
        ("campaign", head.format([1, 2], 6) + TWO, ""),
        ("workers", head.format([1, 2, 3, 4], 6) + workers + TWO, SEVERAL),
    ):
        sizes = "group_size = 3\nmax_tokens = 6\nlr = 0.01\n"
        keys = {"model": folder / "model", "squeeze": str(kind == "workers").lower(), "rest": FUNCTIONS}
        (folder / f"{kind}.toml").write_text(TOML.format(head=top, training=sizes + training, **keys))
    keys = {"model": "tiny-tool-user", "squeeze": "false", "rest": TOOLS}
    sizes = "group_size = 4\nmax_tokens = 48\nlr = 0.001"
    (folder / "episodes.toml").write_text(TOML.format(head=head.format([1], 5) + TURN_CREDIT, training=sizes, **keys))


def records(out: Path, exact: bool) -> dict[str, Any]:
    """Return everything in a finished directory that may not depend on how often it was killed, by name.

    Without ``exact``, processes that were asked to stop have left checkpoints between the scheduled ones: their lines
    are left out.
    """
    from retrain.files import ASIDE
    from tests.helpers.campaigns import is_timing_key, without_clock

    manifest = json.loads((out / "manifest.json").read_text())
    compared = (manifest.get("comparison") or {}).get("conditions", [])
    contents: dict[str, Any] = {
        "manifest": [(run["run_id"], run["state"], run["step"]) for run in manifest["runs"]],
        "cohorts": sorted(map(sorted, manifest.get("cohorts") or [])),
        "verdicts": [[row[key] for key in ("label", "finished", "after_values", "verdict")] for row in compared],
        "squeeze": [(manifest.get("squeeze") or {}).get(key) for key in ("run_id", "rows", "rank_pattern")],
    }
    for entry in manifest["runs"]:
        run = out / entry["path"]
        for path in sorted([*run.glob("*.jsonl"), *(run / "emergence").glob("*.jsonl")]):
            rows = [without_clock(json.loads(line)) for line in path.read_text().splitlines()]
            if path.name == "timing_spans.jsonl":
                rows = [row["step"] for row in rows]
            elif path.name == "checkpoints.jsonl" and not exact:
                rows = [row for row in rows if row["batch"] % 2 == 0 or row["batch"] == entry["max_steps"]]
            elif path.name in ("metrics.jsonl", "evals.jsonl"):
                rows = [{k: v for k, v in row.items() if not is_timing_key(k) and k != "seconds"} for row in rows]
            contents[f"{entry['run_id']}/{path.name}"] = rows
        last = max((run / "checkpoints").glob("step_*"))
        for path in (*(run / "final").glob("*.safetensors"), *last.glob("*.safetensors")):
            data = path.read_bytes()
            end = 8 + int.from_bytes(data[:8], "little")  # the order of the tensors in the header is free
            contents[f"{entry['run_id']}/{path.relative_to(run)}"] = [json.loads(data[8:end]), data[end:]]
        contents[f"{entry['run_id']}/leftovers"] = [path.name for path in run.rglob(f".*{ASIDE}")]
    return contents


def differences(disturbed: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    lines = []
    for name in sorted(disturbed.keys() | reference.keys()):
        one, other = disturbed.get(name, []), reference.get(name, [])
        if one != other:
            place = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), "the end")
            lines.append(f"{name}: {len(one)} and {len(other)} entries, first different at {place}")
    return lines
