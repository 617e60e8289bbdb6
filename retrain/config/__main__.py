"""``python -m retrain.config FILE…`` writes the reference page (``.md``) or the JSON Schema (``.json``)."""

import sys
from pathlib import Path

from retrain.config.reference import configuration_markdown, json_schema
from retrain.files import dumps, write_text


def main(arguments: list[str]) -> int:
    """Write each named file; without a name, print the reference page."""
    if not arguments:
        sys.stdout.write(configuration_markdown())
    for name in arguments:
        text = dumps(json_schema(), indent=2) + "\n" if name.endswith(".json") else configuration_markdown()
        write_text(Path(name), text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
