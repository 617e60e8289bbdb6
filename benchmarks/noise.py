"""Where the noise between seeds comes from: the spread of finished campaigns of which each varied one thing.

    retrain train FILE --out logs/noise_all
    retrain train FILE --out logs/noise_init --set campaign.vary=init
    retrain train FILE --out logs/noise_data --set campaign.vary=data
    retrain train FILE --out logs/noise_sampling --set campaign.vary=sampling
    python benchmarks/noise.py logs/noise_all logs/noise_init logs/noise_data logs/noise_sampling

For each directory the standard deviation over seeds of the primary metric (within conditions, pooled over them) with
its 95 % interval by chi-squared, which takes the values as normal; and its variance as a share of that of the directory
in which everything varies, with its 95 % interval by F. Shares need not add up to 1: what comes from one source depends
on the others, and each holds the noise of the evaluation.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import chi2, f


class Spread(NamedTuple):
    """What seeds of one campaign differ by: ``vary`` of its file, standard deviation with its 95 % interval, degrees of
    freedom."""

    vary: str
    sd: float
    low: float
    high: float
    freedom: int


def spread_of(vary: str, values: list[list[float]]) -> Spread:
    """Of values [conditions][seeds], pooled within conditions: s² = Σ (x − mean)² / (n − conditions), and its interval
    s²·f / χ²(f). Raises ValueError where no condition has two values."""
    rows = [np.asarray(row, dtype=np.float64) for row in values if row]
    freedom = sum(len(row) - 1 for row in rows)
    if freedom < 1:
        raise ValueError("no condition has two finished runs")
    total = float(sum(((row - row.mean()) ** 2).sum() for row in rows))
    ends = [np.sqrt(total / chi2.ppf(share, freedom)) for share in (0.975, 0.025)]
    return Spread(vary, float(np.sqrt(total / freedom)), float(ends[0]), float(ends[1]), freedom)


def read(directory: Path) -> tuple[Spread, str]:
    """The spread of a campaign's directory, and the metric it is of. Raises ValueError for one without results."""
    try:
        manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
        first = directory / manifest["runs"][0]["path"]
        campaign = json.loads((first / "config.json").read_text())["campaign"]
    except (OSError, KeyError, IndexError) as error:
        raise ValueError(f"{directory} is no directory of a campaign that has begun ({error})") from error
    comparison = manifest.get("comparison")
    if not comparison:
        raise ValueError(f"{directory} has no comparison yet; type: retrain resume {directory}")
    values = [condition["after_values"] for condition in comparison["conditions"]]
    try:
        return spread_of(campaign.get("vary", "all"), values), comparison["metric"]
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error


def table(spreads: list[Spread]) -> list[str]:
    """The lines to print, in points."""
    whole = next((each for each in spreads if each.vary == "all" and each.sd), None)
    lines = [f"{'varies':<10} {'degrees of freedom':>18}  {'standard deviation, points':<28} share of all variance"]
    for each in spreads:
        interval = f"{100 * each.sd:.2f} [{100 * each.low:.2f}, {100 * each.high:.2f}]"
        share = f"{(each.sd / whole.sd) ** 2:.2f}" if whole else "-"
        if whole and each is not whole:
            ends = [(each.sd / whole.sd) ** 2 / f.ppf(at, each.freedom, whole.freedom) for at in (0.975, 0.025)]
            share += f" [{ends[0]:.2f}, {ends[1]:.1f}]"
        lines.append(f"{each.vary:<10} {each.freedom:>18}  {interval:<28} {share}")
    return lines


def main() -> int:
    """Read, print a table."""
    parser = argparse.ArgumentParser(prog="python benchmarks/noise.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="of finished campaigns")
    directories: list[Path] = parser.parse_args().directories
    try:
        found = [read(directory) for directory in directories]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if len({metric for _, metric in found}) > 1:
        print(f"they measure different things: {', '.join(sorted({metric for _, metric in found}))}", file=sys.stderr)
        return 2
    print("\n".join(table([spread for spread, _ in found])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
