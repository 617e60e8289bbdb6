"""Feed the configuration loader bytes until it breaks (atheris: coverage-guided, by libFuzzer).

    pip install atheris
    python -m tests.fuzz_config -runs=1000000 -max_len=300

Two thirds of the inputs are taken as a TOML file as they are, the rest choose sections, keys and values to write one.
Found is anything but a configuration or a list of its mistakes: a traceback, an unknown key that was accepted, a
number that does not survive being validated again. libFuzzer prints the figures and exits with a status above 0.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["retrain.config"]):
    from retrain.config import load, parse_dict
    from retrain.config.root import keys, sections
    from retrain.errors import RetrainError

KEYS = sorted(keys())
PLACES = {(section, dotted.partition(".")[2]) for dotted in KEYS for section in [dotted.partition(".")[0]]}
FREE = ("campaign", "reward")
"""Sections that hold tables of their own (conditions, components), whose keys the loader checks one by one."""
VALUES = (
    "0", "1", "-1", "2.5", "1e308", "-0.0", "nan", "inf", "true", '""', '"auto"', '"a:b"', "[]", "[1, 1]", "{}",
    "99999999999999999999", '"\\u0000"', "[[]]", "1979-05-27", '"cpu"', '"grpo"', '"gpu:0"', "0x7fffffffffffffff",
)  # fmt: skip
FOLDER = Path(tempfile.mkdtemp(prefix="fuzz_", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
FILE = FOLDER / "f.toml"


def built(source: Any) -> bytes:
    """A TOML file of known and unknown keys, from what the fuzzer chooses."""
    tables: dict[str, list[str]] = {}
    for _ in range(source.ConsumeIntInRange(1, 6)):
        section, _, key = KEYS[source.ConsumeIntInRange(0, len(KEYS) - 1)].partition(".")
        if source.ConsumeIntInRange(0, 15) == 0:
            key = source.ConsumeUnicodeNoSurrogates(6) or "x"
            key = json.dumps(key)
        choice = source.ConsumeIntInRange(0, len(VALUES) + 3)
        if choice < len(VALUES):
            value = VALUES[choice]
        elif choice == len(VALUES):
            value = json.dumps(source.ConsumeUnicodeNoSurrogates(8))
        elif choice == len(VALUES) + 1:
            value = repr(source.ConsumeFloat())
        else:
            value = str(source.ConsumeInt(8))
        tables.setdefault(section, []).append(f"{key} = {value}")
    return "".join(f"[{name}]\n" + "\n".join(rows) + "\n" for name, rows in tables.items()).encode()


def one_input(data: bytes) -> None:
    """Load one file; raises when what comes out is neither a configuration nor its mistakes."""
    content = data[1:]
    if data[:1] and data[0] % 3 == 0:
        content = built(atheris.FuzzedDataProvider(content))
    FILE.write_bytes(content)
    try:
        loaded = load(FILE)
    except RetrainError as error:
        if error.exit_status != 2 or not str(error):
            raise AssertionError("mistakes have exit status 2 and a text") from error
        return
    for section, table in tomllib.loads(content.decode("utf-8-sig")).items():
        assert section in sections(), section
        if section not in FREE and isinstance(table, Mapping):
            assert all((section, key) in PLACES for key in table), (section, table)
    if sum(content) % 4 == 0:  # it costs as much as all the rest
        assert parse_dict(loaded.config.to_dict()) == loaded.config


def main() -> None:
    """Hand over to libFuzzer, with the command line as its options."""
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
