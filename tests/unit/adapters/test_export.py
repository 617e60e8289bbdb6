import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.campaigns import run_cli, train_quietly
from helpers.models import TINY_RUN, qwen3_directory
from safetensors.torch import load_file, save_file

from retrain.adapters import export as exporting
from retrain.files import read_json, write_json
from retrain.policy.adapter_io import AdapterFile

TEXTS = ["12 + 34 = 46 so the answer is \\boxed{46}", "wait let me check the key is"]


def report_of(*arguments: str | Path):
    result = run_cli(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str | Path) -> str:
    result = run_cli(*arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
    return result.stderr


def change(directory: Path, changed: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> Path:
    """Write every tensor of an adapter again, under another name or with other numbers."""
    weights = directory / "adapter_model.safetensors"
    tensors = dict(changed(name, tensor) for name, tensor in sorted(load_file(weights).items()))
    save_file(tensors, weights, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A trained run of a toy model; its adapter is enlarged so that it says something else than its base."""
    path = tmp_path_factory.mktemp("export")
    model = qwen3_directory(path / "model", TEXTS)
    (path / "rewards.py").write_text("def score(completion, answer):\n    return len(completion) % 5 / 4\n")
    reward = '[reward]\ntype = "custom"\ncustom_module = "rewards.py"\nworkers = 1\n'
    data = '[data]\nprompt_template = "Say {prompt} now"\n'
    train_quietly(path, TINY_RUN.format(model=model) + "max_tokens = 8\n" + reward + data)
    for weights in (path / "out").rglob("adapter_model.safetensors"):
        enlarge(weights.parent)
    return path


def enlarge(directory: Path) -> None:
    stream = torch.Generator().manual_seed(3)

    def enlarged(name, tensor):
        return name, 0.02 * torch.randn(tensor.shape, generator=stream) if ".lora_B." in name else tensor

    change(directory, enlarged)


def logits_with(adapter: Path, model: Path | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).float()
    with torch.no_grad():
        return PeftModel.from_pretrained(base, str(adapter)).eval()(input_ids=tokens()).logits


def tokens() -> torch.Tensor:
    return torch.arange(3, 43).reshape(2, 20)


def test_a_merged_model_is_base_and_adapter(home, tmp_path):
    """Of a checkpoint: a full model that transformers loads, with the same logits and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, out = home / "out/checkpoints/step_000002", tmp_path / "deep" / "merged"
    report = report_of("export", source, "--merge", "--out", out)
    adapter = Path(report["adapter"])
    assert adapter == source.resolve()
    assert (report["base"], report["dtype"], report["modules"]) == (str(home / "model"), "float32", 14)
    assert report["difference"] <= report["tolerance"] < 1e-4 < report["effect"]
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        got = model(input_ids=tokens()).logits
    want = logits_with(adapter, home / "model")
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    mine, theirs = (AutoTokenizer.from_pretrained(path) for path in (out, home / "model"))
    assert mine.chat_template == theirs.chat_template
    assert mine(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["merged"]
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_the_number_format_of_each_weight_is_kept(home, tmp_path):
    """A base stored in bfloat16 with its norms in float32 comes out so; --dtype changes all of it."""
    half = tmp_path / "half"
    shutil.copytree(home / "model", half)
    weights = load_file(half / "model.safetensors")
    stored = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in weights.items()}
    save_file(stored, half / "model.safetensors", metadata={"format": "pt"})
    write_json(half / "config.json", read_json(half / "config.json") | {"dtype": "bfloat16"})
    adapter = home / "out" / "final"
    report = report_of("export", adapter, "--base", half, "--merge", "--out", tmp_path / "out")
    assert report["dtype"] == "bfloat16"
    assert 1e-4 < report["difference"] < report["tolerance"]
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert read_json(tmp_path / "out" / "config.json")["dtype"] == "bfloat16"
    assert {tensor.dtype for name, tensor in merged.items() if "norm" not in name} == {torch.bfloat16}
    more = ("--dtype", "float32", "--out", tmp_path / "wide")
    wide = report_of("export", adapter, "--base", half, "--merge", *more)
    assert wide["difference"] < 1e-5 < report["difference"]
    assert {tensor.dtype for tensor in load_file(tmp_path / "wide" / "model.safetensors").values()} == {torch.float32}


def test_a_merge_that_is_wrong_is_not_published(home, tmp_path, monkeypatch):
    """What is written is read again: one tensor that went wrong on the way to the disk, or a loss by rounding."""
    save = exporting._save

    def broken(model, tokenizer, directory):
        save(model, tokenizer, directory)
        tensors = load_file(directory / "model.safetensors")
        tensors["model.layers.1.mlp.down_proj.weight"] *= 1.05
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(exporting, "_save", broken)
    assert "nothing is written" in refusal("export", home / "out", "--merge", "--out", tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_would_be_lost_is_refused(home, tmp_path):
    """By rounding, or because no layer takes it: peft would warn and export the base under the adapter's name."""
    small = change(
        shutil.copytree(home / "out/final", tmp_path / "small"),
        lambda name, tensor: (name, tensor * (1e-3 if ".lora_B." in name else 1)),
    )
    renamed = change(
        shutil.copytree(home / "out/final", tmp_path / "renamed"),
        lambda name, tensor: (name.replace("model.layers", "model.blocks"), tensor),
    )
    out = tmp_path / "out"
    assert "type --dtype float32" in refusal("export", small, "--merge", "--out", out, "--dtype", "bfloat16")
    assert "no layer takes" in refusal("export", renamed, "--merge", "--out", out)
    assert not out.exists()
    assert run_cli("export", small, "--merge", "--out", out).exit_code == 0  # float32 keeps it


def test_other_base_weights_are_refused(home, tmp_path):
    """The run recorded what its base was; a directory that holds something else now would give another model."""
    moved = shutil.copytree(home / "out", tmp_path / "home/out")
    other = qwen3_directory(tmp_path / "model", TEXTS, seed=5)
    wide = qwen3_directory(tmp_path / "wide", TEXTS, hidden=64)
    merge = ("--merge", "--out", tmp_path / "merged")
    assert "other weights" in refusal("export", moved, *merge, "--base", other)
    refusal("export", home / "out/final", *merge, "--base", wide)
    assert "not a linear layer of that size" in run_cli("sample", moved, "--prompt", "4", "--base", wide).stderr
    result = run_cli("sample", moved, "--prompt", "4", "--base", other)
    assert (result.exit_code, "other weights" in result.stderr) == (0, True)


@pytest.mark.parametrize("how", [("--merge",), ("--rank-pad", "16")])
def test_nothing_that_is_there_is_overwritten(home, tmp_path, how):
    full, file, link = (tmp_path / name for name in ("full", "file", "link"))
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    file.write_text("mine")
    link.symlink_to(tmp_path)
    for out in (full, file, link):
        assert "--out" in refusal("export", home / "out", *how, "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "link"]
    assert (full / "mine.txt").read_text() == file.read_text() == "mine"
    (full / "mine.txt").unlink()
    assert run_cli("export", home / "out", *how, "--out", full).exit_code == 0  # an empty one is filled


def test_usage_is_told_in_one_line(home, tmp_path):
    for arguments, words in (
        ((), "--merge for a full model, or --rank-pad"),
        (("--merge", "--rank-pad", "8"), "--merge for a full model, or --rank-pad"),
        (("--rank-pad", "8", "--dtype", "float32"), "--dtype is the merged model's"),
        (("--rank-pad", "2"), "has rank 4"),
        (("--merge", "--base", "/no/such/model"), "not a directory here"),
    ):
        assert words in refusal("export", home / "out", "--out", tmp_path / "out", *arguments)
    campaign = tmp_path / "campaign"
    write_json(campaign / "manifest.json", {"runs": [{"path": "runs/a_s1", "state": "done"}]})
    result = run_cli("export", campaign, "--merge", "--out", tmp_path / "out")
    assert (result.exit_code, "such as" in result.stderr, "runs/a_s1" in result.stderr) == (2, True, True)


@pytest.mark.parametrize("rslora", [False, True])
def test_a_padded_rank_changes_no_weight_change(home, tmp_path, rslora):
    """Ranks and alphas by pattern, rsLoRA: peft and AdapterFile see the same ΔW under one plain alpha and rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = LoraConfig(
        r=6, lora_alpha=8, use_rslora=rslora, target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"v_proj": 3}, alpha_pattern={r"layers\.0\.self_attn\.q_proj": 5}, init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    get_peft_model(model, settings).save_pretrained(tmp_path / "source")
    write_json(
        tmp_path / "source" / "adapter_config.json",
        read_json(tmp_path / "source" / "adapter_config.json") | {"base_model_name_or_path": str(home / "model")},
    )
    report = report_of("export", tmp_path / "source", "--rank-pad", "16", "--out", tmp_path / "padded")
    config = read_json(tmp_path / "padded" / "adapter_config.json")
    assert (config["r"], config["use_rslora"], config["rank_pattern"], config["alpha_pattern"]) == (16, False, {}, {})
    assert report["ranks_before"] == [3, 6]
    exact = 0
    with AdapterFile(tmp_path / "source") as before, AdapterFile(tmp_path / "padded") as after:
        assert before.modules.keys() == after.modules.keys()
        for name in before.modules:
            (a, b), (wide_a, wide_b) = before.factors(name), after.factors(name)
            assert (wide_a.shape[0], wide_b.shape[1]) == (16, 16)
            assert not wide_a[a.shape[0] :].any()
            assert not wide_b[:, b.shape[1] :].any()
            assert after.scales[name] == pytest.approx(config["lora_alpha"] / 16)
            exact += torch.equal(wide_b[:, : b.shape[1]], b)
            torch.testing.assert_close(after.scales[name] * (wide_b @ wide_a), before.scales[name] * (b @ a))
    assert exact >= 2  # the modules of the most frequent scale, to the bit
    outputs = [logits_with(tmp_path / name, home / "model") for name in ("source", "padded")]
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)


def test_sample_is_the_model_s_own_answer(home):
    """Greedy answers of both, token for token, as transformers and peft generate them; otherwise seeds decide."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = report_of("sample", home / "out", "--prompt", "12", "--temperature", "0", "--max-tokens", "10")
    (prompt,) = found["prompts"]
    assert prompt["rendered"] == "<turn>Say 12 now<turn>"  # by the run's template
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    ids = tokenizer(prompt["rendered"], return_tensors="pt", add_special_tokens=False)
    base = AutoModelForCausalLM.from_pretrained(home / "model")
    for who in ("base", "adapter"):
        model = base if who == "base" else PeftModel.from_pretrained(base, str(home / "out" / "final")).eval()
        drawn = model.generate(**ids, max_new_tokens=10, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert prompt[who][0]["text"] == tokenizer.decode(drawn, skip_special_tokens=True)
    ask = ("sample", home / "out", "--prompt", "12", "--samples", "3", "--max-tokens", "12")
    assert report_of(*ask)["prompts"] == report_of(*ask)["prompts"] != report_of(*ask, "--seed", "1")["prompts"]


def test_sample_reads_standard_input_and_prints_lines(home):
    result = run_cli("sample", home / "out", "--prompt", "-", "--max-tokens", "4", input="3 + 4\nor \x1b[31m5?\n")
    assert result.exit_code == 0, result.output
    kinds = [line.split()[0] for line in result.stdout.splitlines()]
    assert kinds == ["prompt", "base", "adapter"]
    text = result.stdout.splitlines()[0].partition(" text=")[2]
    assert json.loads(text) == "<turn>Say 3 + 4\nor \x1b[31m5? now<turn>"
    assert "\x1b" not in result.output
    for arguments in (("--prompt", ""), ("--prompt", "-", "--prompt", "-"), ()):
        assert run_cli("sample", home / "out", *arguments, input=" \n").exit_code == 2


def test_sample_of_an_adapter_without_a_run_says_so(home, tmp_path):
    shutil.copytree(home / "out" / "final", tmp_path / "alone")
    result = run_cli("sample", tmp_path / "alone", "--prompt", "12", "--max-tokens", "4", "--json")
    assert json.loads(result.stdout)["prompts"][0]["rendered"] == "<turn>12<turn>"
    assert "belongs to no run here" in result.stderr
