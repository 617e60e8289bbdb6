"""Kill training again and again, at random and in the worst places, and compare with a run that nobody disturbed.

    python -m tests.soak --kills 100 --minutes 30
    python -m tests.soak --kills 100 --minutes 60 --executor processes
    python -m tests.soak --kills 100 --minutes 60 --executor ray
    python -m tests.soak --kills 100 --minutes 60 --executor slurm

One process trains single runs, campaigns, critics and episodes in turn; or a controller and two workers train a
campaign of eight runs, and are all killed, in a Ray cluster of three nodes the actors and nodes too; Slurm's commands
are stand-ins on this machine. In the end every row of every record, the last checkpoints, adapters, states and
verdicts have to be equal, time fields aside. What happens is drawn from ``--seed``; which moment of training it hits is
up to the clock. Prints one JSON line; exit status 1 at the first difference, with the directories left as they are.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.soak.campaigns import KINDS, differences, prepare, records
from tests.soak.traps import FOLDER
from tests.soak.trial import Trial

MOST_KILLS = 15  # of one campaign


def soak(folder: Path, executor: str, kills: int, minutes: float, seed: int, **cluster: Any) -> dict[str, Any]:
    """Disturb campaigns until there were ``kills`` or ``minutes`` are over; ``wrong`` should be empty."""
    chance, begin, kinds = random.Random(seed), time.monotonic(), KINDS if executor == "inprocess" else ("workers",)
    killed, besides, tried, finished = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    prepare(folder)
    wrong: list[str] = []
    while not wrong and killed.total() < kills and time.monotonic() - begin < 60 * minutes:
        kind = kinds[finished.total() % len(kinds)]
        toml, out, reference = (folder / name for name in (f"{kind}.toml", f"{kind}_out", f"{kind}_reference"))
        if not reference.exists():
            one_process = [] if executor == "inprocess" else ["campaign.executor=inprocess", 'campaign.workers="auto"']
            undisturbed = Trial(toml, reference, "", chance, tried, 0, one_process)
            undisturbed.run()
            wrong = undisturbed.wrong
        trial = Trial(toml, out, executor, chance, tried, min(MOST_KILLS, kills - killed.total()), **cluster)
        if not wrong:
            trial.run()
            killed, besides, wrong = killed + trial.killed, besides + trial.besides, trial.wrong
        if not wrong:
            exact = executor == "inprocess" and not trial.besides
            wrong = [f"{out}: {text}" for text in differences(records(out, exact), records(reference, exact))]
        if not wrong:
            finished[kind] += 1
            shutil.rmtree(out)
    counts = {"of": dict(sorted(killed.items())), "besides": dict(sorted(besides.items())), "finished": dict(finished)}
    figures = {"kills": killed.total(), "minutes": round((time.monotonic() - begin) / 60, 1), "seed": seed}
    return {"executor": executor, **figures, **counts, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="stop after so many kills")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no further campaign after so many minutes")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed where")
    parser.add_argument(
        "--executor", choices=("inprocess", "processes", "ray", "slurm"), default="inprocess", help="who trains"
    )
    parser.add_argument("--dir", type=Path, default=None, help="where to work; kept when something is wrong")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    folder = Path(tempfile.mkdtemp(prefix="soak_", dir=options.dir))
    figures = (folder, options.executor, options.kills, options.minutes, options.seed)
    if options.executor == "ray":
        from tests.system.clusters import cluster_of

        with cluster_of(*[{"num_cpus": 1}] * 3) as nodes:
            environment = f'ray.runtime_env={{ env_vars = {{ {FOLDER} = "{folder}" }} }}'
            sets = ["campaign.executor=ray", f"ray.address={nodes.address}", environment]
            report = soak(*figures, nodes=nodes, sets=sets)
    elif options.executor == "slurm":
        from tests.system.clusters import SlurmStandin

        played = SlurmStandin(folder)
        os.environ |= played.environment
        report = soak(*figures, sets=["campaign.executor=slurm", "backend.devices=cpu"])
        played.close()
    else:
        report = soak(*figures)
    print(json.dumps(report))
    if report["wrong"]:
        print(f"see {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
