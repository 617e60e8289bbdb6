"""Write ``docs/configuration.md`` from the models of the configuration: every key with default, bounds and meaning."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from retrain.config.base import ActiveIf, Section
from retrain.config.campaign import Condition
from retrain.config.comparing import Compare, Results
from retrain.config.describe import default_of, field_expected, toml
from retrain.config.modes import MODES
from retrain.config.root import lists, sections
from retrain.files import write_text

VALUE_NAMES = {
    "detector": "[planning] detector",
    "ramp": "λ rises as [sepa] says",
    "counted": "the kept tokens or all tokens",
    "normalised": "(x − mean)/std",
}
"""General names of the values in formulas that are not keys."""

INTRODUCTION = """\
# Configuration

*Made from the models in `retrain/config/` by `python docs/list_keys.py docs/configuration.md`; edit those.*

A run or a campaign is one TOML file. Every key has a default, so a file holds only what differs from it.
`retrain check FILE` tells every mistake at once, each on one line: where it stands, which key, what is wrong, and
what to type. A key or section that does not exist is a mistake, and so is one that would have no effect. Types are
strict: `"false"` is not `false`, and 1 is not `true`.

`--set section.key=value` replaces a value from the command line. The value is read as TOML, or as text where it is
no TOML, and is validated like the file. The resolved configuration is written beside the results as `config.json`.

A file with a `[campaign]` section is a campaign: every condition runs with every seed. All other sections are the base
configuration that the conditions share.

```toml
[campaign]
seeds = [1, 2, 3, 4, 5, 6, 7]
max_steps = 100

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"

[[campaign.conditions]]
advantage_mode = "maxrl"
transform_mode = "gtpo_sepa"
"sepa.steps" = 50            # an override; or: sepa = { steps = 50 }
lr = 2e-4                    # a bare key, when only one section has it
```

A condition's label is `advantage_mode+transform_mode`, then `~key=value` for each override; a run is
`<label>_s<seed>`. Tables and sentences leave out `+none`. The runs here are `grpo+none_s1`,
`maxrl+gtpo_sepa~lr=0.0002~sepa.steps=50_s1`, and so on. Conditions cannot override the base model, the engine, the
data or the evaluation, which a comparison needs to be the same, nor the seed, which is the replicate.
"""

MODES_INTRODUCTION = """\
A is the advantage of a completion, r its reward, h the uncertainty of a token, ρ the importance ratio, sg stops the
gradient. [Algorithms](algorithms.md) has more about each."""

COMPARISON_INTRODUCTION = """\
## Comparison files

A file with `[[results]]` describes results of other tools for [`retrain compare`](compare.md). It has no other sections
than these two, and `retrain check FILE` tells its mistakes."""


def configuration_markdown() -> str:
    parts = [INTRODUCTION]
    for name, section in sections().items():
        parts.append(f"## [{name}]\n\n{_text(section)}\n\n{_table(section)}")
        if name == "algorithm":
            parts.append(f"### Modes\n\n{MODES_INTRODUCTION}\n\n{_modes()}")
        for table, lists_of in _listed().items():
            if lists_of[0].partition(".")[0] == name:
                heading = ", ".join(f"[[{each}]]" for each in lists_of)
                parts.append(f"### {heading}\n\n{_text(table)}\n\n{_table(table)}")
    parts.append(f"{COMPARISON_INTRODUCTION}\n\n### [compare]\n\n{_table(Compare)}")
    parts.append(f"### [[results]]\n\n{_table(Results)}")
    return "\n".join(parts)


def _listed() -> dict[type[Section], list[str]]:
    names: dict[type[Section], list[str]] = {}
    for name, table in lists().items():
        names.setdefault(table, []).append(name)
    return names


def _text(section: type[Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def _table(section: type[Section]) -> str:
    rows = ["| key | default | accepts | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        cells = [f"`{field.alias or name}`", _default(field), field_expected(field), _meaning(field)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = default_of(field)
    if isinstance(value, list) and value and isinstance(value[0], Condition):
        return "the five standard ones: " + ", ".join(f"`{condition.label}`" for condition in value)
    return "unset" if value is None else f"`{toml(value)}`"


def _meaning(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    conditions = [
        f"`{marker.key.partition('.')[2]}` {_one_of(marker)}{marker.unless and f' (or {marker.unless_text})'}"
        for marker in field.metadata
        if isinstance(marker, ActiveIf)
    ]
    return f"{text} Used with {' and '.join(conditions)}." if conditions else text


def _one_of(marker: ActiveIf) -> str:
    if marker.values == (None,):
        return "unset"
    return " or ".join(["= " + f"`{marker.values[0]}`", *(f"`{value}`" for value in marker.values[1:])]) + (
        " or your own" if marker.plugins else ""
    )


def _modes() -> str:
    return "\n".join(["| key | mode | formula | paper | needs |", "|---|---|---|---|---|", *_mode_rows()]) + "\n"


def _mode_rows() -> Iterator[str]:
    for key, table in MODES.items():
        for name, mode in table.items():
            formula = re.sub(r"\{([\w.]+)[^}]*\}", _value_name, mode.formula)
            text = f"{mode.description}: {formula}" if mode.description else formula
            paper = f"[{mode.paper}](https://arxiv.org/abs/{mode.paper})" if mode.paper else ""
            cells = (f"`{key}`", f"`{name}`", text, paper, ", ".join(sorted(mode.needs)))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value_name(match: re.Match[str]) -> str:
    return VALUE_NAMES.get(match[1]) or match[1].rpartition(".")[2]


if __name__ == "__main__":
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md")
    write_text(page, configuration_markdown())
    sys.stdout.write(f"wrote {page}\n")
