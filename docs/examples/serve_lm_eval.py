"""EleutherAI's lm-eval against a server: answers that are drawn, and log-likelihoods of answers that are given.

    retrain serve logs/quickstart --port 8000 &
    python docs/examples/serve_lm_eval.py http://127.0.0.1:8000/v1 grpo+none_s1

Writes two tasks of sums into a temporary folder and runs the program ``lm_eval`` (``pip install 'lm-eval[api]'``, in an
environment of its own) on each: ``sums_drawn`` asks /v1/chat/completions, ``sums_chosen`` has four results of
a calculation and takes the likeliest, by /v1/completions with echo.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from retrain.models.directory import bundled_model_path

DRAWN = {
    "task": "sums_drawn",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["<|end|>"], "max_gen_toks": 80, "do_sample": False, "temperature": 0},
    "filter_list": [
        {"name": "boxed", "filter": [
            {"function": "regex", "regex_pattern": r"\\boxed\{(\d+)\}"}, {"function": "take_first"}]},
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
CHOSEN = {
    "task": "sums_chosen",
    "output_type": "multiple_choice",
    "doc_to_text": "<|user|>{{question}}<|assistant|>{{working}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{place}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def sums(rng: random.Random, count: int) -> list[dict]:
    """Differences without a borrow, digit by digit as the bundled model works them out, and four results."""
    rows = []
    while len(rows) < count:
        a, b, place = rng.randint(10, 199), rng.randint(10, 99), rng.randrange(4)
        ones, tens = a % 10 - b % 10, a // 10 - b // 10
        if ones < 0 or tens < 1:
            continue
        working = f"{a % 10}-{b % 10}={ones}, {a // 10}-{b // 10}={tens}"
        wrong = rng.sample([x for x in range(max(10, a - b - 30), a - b + 31) if x != a - b], 3)
        answers = [*wrong[:place], a - b, *wrong[place:]]
        choices = [f", {x}\n\\boxed{{{x}}}" for x in answers]
        question = f"{a}-{b}=?"
        rows.append(
            {"question": question, "working": working, "answer": str(a - b), "choices": choices, "place": place}
        )
    return rows


def main() -> None:
    url, model = sys.argv[1:3]
    program = sys.argv[3] if len(sys.argv) > 3 else "lm_eval"
    tokenizer = bundled_model_path("tiny-reasoner")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data = folder / "sums.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in sums(random.Random(1), 40)))
        for task, kind, route in (
            (DRAWN, "local-chat-completions", "chat/completions"),
            (CHOSEN, "local-completions", "completions"),
        ):
            dataset = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
            whole = task | dataset | {"test_split": "test", "metadata": {"version": 1}}
            (folder / f"{task['task']}.yaml").write_text(json.dumps(whole))  # JSON is YAML
            arguments = {
                "model": model, "base_url": f"{url}/{route}", "num_concurrent": 8, "max_retries": 1,
                "tokenizer": tokenizer, "max_length": 1024,
            }  # fmt: skip
            command = [
                program, "run", "--model", kind, "--tasks", task["task"], "--include_path", str(folder),
                "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()),
            ]  # fmt: skip
            if kind == "local-chat-completions":
                command.append("--apply_chat_template")
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
