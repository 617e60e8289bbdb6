"""Where the noise between seeds comes from: the spread of finished campaigns of which each varied one thing.

    retrain train FILE --out logs/noise_all
    retrain train FILE --out logs/noise_init --set campaign.vary=init
    python benchmarks/noise.py logs/noise_all logs/noise_init

For each directory the standard deviation over seeds of the primary metric (within conditions, pooled over them) with
its 95 % interval by chi-squared, which takes the values as normal; and its variance as a share of that of the directory
in which everything varies, with its 95 % interval by F. Shares need not add up to 1: what comes from one source depends
on the others, and each holds the noise of the evaluation.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import chi2, f


class Spread(NamedTuple):
    """``vary`` of a campaign, the standard deviation over its seeds, degrees of freedom, the metric."""

    vary: str
    sd: float
    freedom: int
    metric: str

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the standard deviation: s²·f / χ²(f)."""
        low, high = (self.sd * np.sqrt(self.freedom / chi2.ppf(share, self.freedom)) for share in (0.975, 0.025))
        return float(low), float(high)


def read(directory: Path) -> Spread:
    """Return the spread of a campaign's directory. Raises ValueError for one without results."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        campaign = json.loads((directory / manifest["runs"][0]["path"] / "config.json").read_text())["campaign"]
    except (OSError, KeyError, IndexError) as error:
        raise ValueError(f"{directory} is no directory of a campaign that has begun ({error})") from error
    comparison = manifest.get("comparison")
    if not comparison:
        raise ValueError(f"{directory} has no comparison yet; type: retrain resume {directory}")
    values = [np.array(condition["after_values"]) for condition in comparison["conditions"]]
    freedom = sum(max(0, len(row) - 1) for row in values)
    if freedom < 1:
        raise ValueError(f"{directory}: no condition has two finished runs")
    total = sum(float(((row - row.mean()) ** 2).sum()) for row in values if len(row))
    return Spread(campaign.get("vary", "all"), (total / freedom) ** 0.5, freedom, comparison["metric"])


def report(spreads: list[Spread]) -> str:
    """Return the table, in points."""
    reference = next((spread for spread in spreads if spread.vary == "all" and spread.sd), None)
    lines = [f"{'varies':<10} {'degrees of freedom':>18}  {'standard deviation, points':<28} share of all variance"]
    for spread in spreads:
        low, high = spread.interval()
        interval = f"{100 * spread.sd:.2f} [{100 * low:.2f}, {100 * high:.2f}]"
        ratio = (spread.sd / reference.sd) ** 2 if reference else None
        share = "-" if ratio is None else f"{ratio:.2f}"
        if reference and ratio is not None and spread is not reference:
            low, high = (ratio / f.ppf(at, spread.freedom, reference.freedom) for at in (0.975, 0.025))
            share += f" [{low:.2f}, {high:.1f}]"
        lines.append(f"{spread.vary:<10} {spread.freedom:>18}  {interval:<28} {share}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/noise.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="of finished campaigns")
    try:
        spreads = [read(directory) for directory in parser.parse_args().directories]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    metrics = sorted({spread.metric for spread in spreads})
    if len(metrics) > 1:
        print(f"the campaigns have different metrics: {', '.join(metrics)}", file=sys.stderr)
        return 2
    print(report(spreads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
