"""``python -m retrain.record [PATH]`` writes ``docs/metrics.md`` from the catalogue."""

import sys
from pathlib import Path

from retrain.files import write_text
from retrain.record.catalogue import metrics_markdown

if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/metrics.md")
    write_text(path, metrics_markdown())
    sys.stdout.write(f"wrote {path}\n")
