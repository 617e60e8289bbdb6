"""``python -m retrain.records`` writes ``docs/metrics.md`` and the tables of ``docs/outputs.md``."""

import sys
from pathlib import Path

from retrain.files import write_text
from retrain.records.markdown import metrics_markdown, with_tables

if __name__ == "__main__":
    docs = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    outputs = docs / "outputs.md"
    for path, text in ((docs / "metrics.md", metrics_markdown()), (outputs, with_tables(outputs.read_text("utf-8")))):
        write_text(path, text)
        sys.stdout.write(f"wrote {path}\n")
