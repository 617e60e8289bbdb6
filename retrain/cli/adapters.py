"""``sample`` and ``export``: use a trained adapter."""

import sys
from pathlib import Path
from typing import Literal

from retrain.cli.arguments import AS_JSON, BASE, argument, option, output_path, require_directory
from retrain.cli.output import note, print_record, print_report, print_text
from retrain.errors import UsageError, plural
from retrain.records.schema.base import Values
from retrain.util.text import one_line

ADAPTER = argument("DIR", "A run, checkpoint, final/ or other adapter directory.")


def sample(
    directory: Path = ADAPTER,
    prompts: list[str] = option("--prompt TEXT", "What to ask; may be repeated; - reads standard input.", ...),
    samples: int = option("--samples N", "Answers to each prompt.", 1, min=1),
    max_tokens: int | None = option("--max-tokens N", "Longest answer; without it that of evaluation.", min=1),
    temperature: float | None = option("--temperature T", "0 is greedy; without it that of evaluation.", min=0.0),
    seed: int = option("--seed N", "Of the random numbers.", 0, min=0),
    base: str | None = BASE,
    as_json: bool = AS_JSON,
) -> None:
    """Sample from an adapter and its base, side by side.

    Both get the same prompts in the run's own template, and the same random numbers.
    """
    require_directory(directory)
    texts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]
    if prompts.count("-") > 1:
        raise UsageError("standard input is read once: give --prompt - only once")
    if not all(text.strip() for text in texts):
        raise UsageError("a prompt is empty: type --prompt and the question")
    from retrain.adapters import provenance, talk

    source = provenance.provenance(directory, base)
    if source.record is None:
        note(f"{source.adapter} belongs to no run here: default template and sampling")
    report = talk.answers(
        source, texts, samples=samples, max_tokens=max_tokens, temperature=temperature, seed=seed, notify=note
    )
    print_report(report, as_json, print_answers, print_answer_lines)


def print_answer_lines(report: Values) -> None:
    for number, prompt in enumerate(report["prompts"], start=1):
        print_record("prompt", prompt=number, tokens=prompt["tokens"], text=prompt["rendered"])
        for index, pair in enumerate(zip(prompt["base"], prompt["adapter"], strict=True), start=1):
            for who, each in zip(("base", "adapter"), pair, strict=True):
                print_record(who, prompt=number, answer=index, **{key: each[key] for key in ("tokens", "stop", "text")})


def print_answers(report: Values) -> None:
    for prompt in report["prompts"]:
        print(f"prompt    {plural(prompt['tokens'], 'token')}")
        print_text(prompt["rendered"], 2)
        for pair in zip(prompt["base"], prompt["adapter"], strict=True):
            for who, answer in zip(("base", "adapter"), pair, strict=True):
                cut = " (cut off)" if answer["stop"] == "length" else ""
                print(f"{who:<10}{plural(answer['tokens'], 'token')}{cut}")
                print_text(answer["text"], 2, limit=1 << 30)
        print()
    print(f"adapter   {one_line(report['adapter'])}\nbase      {one_line(report['base'])}")


def export(
    directory: Path = ADAPTER,
    out: Path = option("--out OUT", "New directory to write to.", ..., output_path),
    merge: bool = option("--merge", "Write a full model with the adapter merged in.", False),
    rank_pad: int | None = option("--rank-pad RANK", "Write the adapter filled up with zeros to this rank.", min=1),
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = option(
        "--dtype", "Number format of the merged model; stored is that of the base's files.", "stored"
    ),
    base: str | None = BASE,
    as_json: bool = AS_JSON,
) -> None:
    """Export an adapter merged into a model or padded.

    With --merge, write a full model and check it against the adapter's logits; with --rank-pad, pad the rank with zeros
    for servers that accept certain ranks only.
    """
    require_directory(directory)
    if merge == (rank_pad is not None):
        raise UsageError("say what to write: --merge for a full model, or --rank-pad RANK for an adapter")
    if rank_pad is not None and dtype != "stored":
        raise UsageError("--dtype is the merged model's: type --merge, or leave it out")
    from retrain.adapters import export, provenance

    source = provenance.provenance(directory, base)
    if rank_pad is None:
        report = export.merge(source, out, dtype)
        checked = (
            f"logits differ from the adapter's by {report['difference']:.1e} of their spread (rounding to "
            f"{report['dtype']} explains {report['tolerance']:.1e}; the adapter changes them by {report['effect']:.1e})"
        )
        lines = {"dtype": report["dtype"], "checked": checked}
    else:
        report = export.pad_rank(source, out, rank_pad)
        before = " to ".join(map(str, dict.fromkeys((report["ranks_before"][0], report["ranks_before"][-1]))))
        lines = {"rank": f"{report['rank']}, was {before}", "lora_alpha": f"{report['lora_alpha']:g}"}
    facts = {"adapter": report["adapter"], "base": report["base"], **lines, "written": report["out"]}
    text = "\n".join(f"{name:<12}{one_line(fact)}" for name, fact in facts.items())
    print_report(report, as_json, lambda _: print(text))
