"""Change shipped configuration files at random and see what the loader makes of them.

    python -m tests.fuzz_config --runs 500000 --seed 1

Every run takes a shipped file (or none) and makes one to four changes: values at known keys, keys and sections that do
not exist, the same in conditions and in parts of a reward. Wrong is anything but a configuration or a list of its
mistakes with exit status 2: a traceback; a change that had to be refused and is not among the mistakes; a file that was
accepted although campaigns/schema.json, which has every key and every bound, forbids it; a number that is none; a value
that came out as another one; a configuration that is not the same after being written and read.

Prints one JSON line; at the first thing that is wrong, its run (``--first`` repeats it) and exit status 1.
``tests/fuzz_config_bytes.py`` does the same with files that are any bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from retrain.config import load, parse_dict
from retrain.config.describe import document
from retrain.config.root import keys, sections, value_at
from retrain.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[1]
SCHEMA = Draft202012Validator(json.loads((ROOT / "campaigns/schema.json").read_text(encoding="utf-8")))
SHIPPED = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "campaigns").glob("*.toml"))]
KEYS = sorted(keys())
LISTED = (("campaign", "conditions"), ("reward", "components"))
"""Keys that hold tables."""
READ_AS = {
    "training.seed": (-1, 0),
    "training.top_k": (-1, 0),
    "environment.max_turns": (-1, 1),
    "environment.args": ("", {}),
    "inference.engine": ("pytorch", "local"),
    "inference.url": ("", None),
}
"""Values outside the schema that stand for one inside, by key."""
VALUES = (
    "0", "1", "-1", "2", "2.5", "0.5", "1e308", "-1e308", "5e-324", "-0.0", "nan", "inf", "-inf", "true", '""',
    '"auto"', '"a:b"', "[]", "[1, 1]", "[[1, 2]]", "[[]]", "{}", "{ a = 1 }", "2147483648", "9223372036854775808",
    "-99999999999999999999", '"\\u0000"', "1979-05-27", '"cpu"', '"grpo"', '"gpu:0"', '"x.jsonl"',
)  # fmt: skip
READ = [tomllib.loads(f"v = {text}")["v"] for text in VALUES]


def of_key(dotted: str) -> Draft202012Validator:
    """What the schema says of one key."""
    section, _, key = dotted.partition(".")
    tables = SCHEMA.schema["$defs"]
    table = tables[SCHEMA.schema["properties"][section]["$ref"].rpartition("/")[2]]
    return SCHEMA.evolve(schema={**table["properties"][key], "$defs": tables})


OF_KEY = {dotted: of_key(dotted) for dotted in KEYS}


def finite(value: Any) -> bool:
    """Whether every number inside is one."""
    if isinstance(value, Mapping):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def allowed(dotted: str, value: Any) -> bool:
    """Whether the schema, or what is read as a value of it, allows the value at this key."""
    alias = dotted in READ_AS and READ_AS[dotted][0] == value and type(value) is type(READ_AS[dotted][0])
    return alias or (finite(value) and OF_KEY[dotted].is_valid(value))


def check(file: Path, refused: Collection[str] = (), kept: Mapping[str, Any] | None = None) -> str:
    """Load the file; ``accepted`` or ``refused``, AssertionError when that is wrong.

    ``refused`` are keys that the mistakes have to name, ``kept`` values that have to come out as they went in.
    """
    try:
        loaded = load(file)
    except UsageError as error:
        if error.exit_status != 2 or not str(error):
            raise AssertionError("mistakes have exit status 2 and a text") from error
        named = [problem.key for problem in error.problems] if isinstance(error, ConfigError) else []
        missing = [key for key in refused if not any(name == key or name.startswith(f"{key}[") for name in named)]
        if missing:
            raise AssertionError(f"not among the mistakes: {missing}") from error
        return "refused"
    assert not refused, f"accepted: {refused}"
    data = tomllib.loads(loaded.text)
    assert finite(data), "accepted a number that is none"
    for dotted, (alias, value) in READ_AS.items():
        section, _, key = dotted.partition(".")
        if data.get(section, {}).get(key) == alias:
            data[section][key] = value
    against = best_match(SCHEMA.iter_errors(data))
    assert against is None, f"accepted against the schema: {against and against.message}"
    for dotted, value in (kept or {}).items():
        assert value_at(loaded.config, dotted) == value, f"{dotted} = {value} came out as another value"
    assert parse_dict(loaded.config.to_dict()) == loaded.config, "not the same after being written and read"
    return "accepted"


def one_change(chance: random.Random, file: Path) -> str:
    """Write a shipped file with a few changes and check what becomes of it."""
    data = deepcopy(chance.choice(SHIPPED)) if chance.random() < 0.5 else {}
    changed: dict[str, Any] = {}
    refused: set[str] = set()
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        kind = chance.randrange(8)
        if kind == 0:
            refused.add(_strange_key(chance, data))
        elif kind == 1:
            refused.add(_strange_section(chance, data))
        elif kind == 2:
            _change_row(chance, data)
        else:
            dotted = chance.choice(KEYS)
            section, _, key = dotted.partition(".")
            tries = [_value(chance) for _ in range(4)]
            value = next((each for each in tries if allowed(dotted, each)), tries[0]) if kind < 6 else tries[0]
            changed[dotted] = data.setdefault(section, {})[key] = value
    refused |= {dotted for dotted, value in changed.items() if not allowed(dotted, value)}
    numbers = {dotted: value for dotted, value in changed.items() if type(value) in (int, float) and value > 0}
    text = document(data)
    file.write_text(text, encoding="utf-8")
    assert _plain(tomllib.loads(text)) == _plain(data), "a value is not what was written"
    return check(file, refused, numbers)


def _plain(data: Any) -> str:
    """The data as text in which NaN equals itself and the order of keys does not matter."""
    return json.dumps(data, sort_keys=True, default=repr)


def _value(chance: random.Random) -> Any:
    kind = chance.randrange(8)
    if kind == 0:
        return _text(chance)
    if kind == 1:
        return chance.choice((chance.gauss(0, 10), chance.lognormvariate(0, 100), chance.random()))
    return chance.randint(-3, 300) if kind == 2 else deepcopy(chance.choice(READ))


def _text(chance: random.Random) -> str:
    """Up to eight characters of all of Unicode, half of them plain."""
    plain = chance.random() < 0.5
    ranges = ((0, 0x7F),) if plain else ((0, 0xFF), (0x100, 0xD7FF), (0xE000, 0x10FFFF))
    return "".join(chr(chance.randint(*chance.choice(ranges))) for _ in range(chance.randrange(9)))


def _strange_name(chance: random.Random) -> str:
    """A name beside a known one, or any text."""
    name = chance.choice(KEYS).partition(".")[2]
    edits = (name + "s", name[:-1], name[1:], name.upper(), f" {name}", f"{name}-", name[::-1])
    return chance.choice((*edits, _text(chance)))


def _strange_key(chance: random.Random, data: dict[str, Any]) -> str:
    """Put a key that does not exist into a section; the key."""
    section, name = chance.choice(list(sections())), _strange_name(chance)
    while f"{section}.{name}" in OF_KEY:
        name += "x"
    data.setdefault(section, {})[name] = _value(chance)
    return f"{section}.{name}"


def _strange_section(chance: random.Random, data: dict[str, Any]) -> str:
    """Put a section that does not exist, or a key outside of sections; its name."""
    name = _strange_name(chance)
    while name in sections():
        name += "x"
    data[name] = chance.choice(({"a": _value(chance)}, _value(chance)))
    return name


def _change_row(chance: random.Random, data: dict[str, Any]) -> None:
    """Change a condition or a part of a reward, where the file has some: any known key, or a strange one."""
    rows = [row for section, key in LISTED for row in _rows(data.get(section, {}).get(key))]
    if rows:
        name = chance.choice((chance.choice(KEYS), chance.choice(KEYS).partition(".")[2], _strange_name(chance)))
        chance.choice(rows)[name] = _value(chance)


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def folder() -> Path:
    """A new directory in memory, where there is one."""
    return Path(tempfile.mkdtemp(prefix="fuzz_", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


def main() -> int:
    """Parse, change and load, print one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_config", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000, help="how many files to load")
    parser.add_argument("--seed", type=int, default=0, help="of all runs; each is a function of it and its number")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    options = parser.parse_args()
    where, begin, counts = folder(), time.monotonic(), Counter[str]()
    try:
        for number in range(options.first, options.first + options.runs):
            try:
                counts[one_change(random.Random(f"{options.seed} {number}"), where / "f.toml")] += 1
            except BaseException:
                print(f"run {number} of seed {options.seed}:\n{(where / 'f.toml').read_text()}", file=sys.stderr)
                raise
    finally:
        shutil.rmtree(where)
    print(json.dumps({"runs": options.runs, **counts, "seconds": round(time.monotonic() - begin)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
