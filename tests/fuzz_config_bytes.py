"""Feed the configuration loader bytes until it breaks (atheris: coverage-guided, by libFuzzer).

    pip install atheris
    python -m tests.fuzz_config_bytes -runs=500000 -max_len=300

It begins with the sections of the shipped files and knows the names of all keys. What is wrong: ``fuzz_config.py``.
libFuzzer prints the figures and exits with a status above 0 when something was found.
"""

from __future__ import annotations

import shutil
import sys

import atheris

with atheris.instrument_imports(include=["retrain.config.lines", "retrain.config.loading", "retrain.config.checking"]):
    from tests.fuzz_config import KEYS, SHIPPED, VALUES, check, document, folder, sections

HERE = folder()


def one_file(content: bytes) -> None:
    """The bytes are the file."""
    (HERE / "f.toml").write_bytes(content)
    check(HERE / "f.toml")


def hints() -> list[str]:
    """What libFuzzer begins with, as its options: a dictionary of names and values, and a corpus of sections."""
    corpus, words = HERE / "corpus", HERE / "words"
    corpus.mkdir()
    tables = [{name: table} for data in SHIPPED for name, table in data.items()]
    for number, table in enumerate(tables):
        (corpus / str(number)).write_text(document(table), encoding="utf-8")
    names = {f"[{name}]\n" for name in sections()} | {f"{key.partition('.')[2]} = " for key in KEYS}
    lines = ["".join(f"\\x{byte:02x}" for byte in word.encode()) for word in sorted({*names, *KEYS, *VALUES})]
    words.write_text("".join(f'"{line}"\n' for line in lines), encoding="ascii")
    return [f"-dict={words}", str(corpus)]


def main() -> None:
    """Hand over to libFuzzer, with the command line as its options."""
    try:
        atheris.Setup([*sys.argv, *hints()], one_file)
        atheris.Fuzz()
    finally:
        shutil.rmtree(HERE)


if __name__ == "__main__":
    main()
