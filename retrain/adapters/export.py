"""Export adapters for other programs: merged into a full model, or padded to a rank that a server requires.

Merging is peft's ``merge_and_unload`` on the base in float32; every weight is then converted back to the number format
of the base's files. The written model is read again and compared with the adapter.
"""

import gc
import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from retrain.adapters.provenance import Provenance
from retrain.adapters.streaming import write_streamed
from retrain.errors import ModelError, StorageError, UsageError
from retrain.files import aside_of, prepare_directory, publish_directory, writing
from retrain.policy.adapter_io import AdapterFile, Pair, padded
from retrain.policy.base import load_base
from retrain.records.schema.base import Row
from retrain.rng import generator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Number and length of random token sequences whose logits are compared; they reach every weight, whatever the
# tokenizer
PROBE_ROWS, PROBE_TOKENS = 4, 32
# Relative error of one float32 product from the order of summation
FLOAT32_NOISE = 16 * torch.finfo(torch.float32).eps
# Largest share of the adapter's effect on the logits that rounding may take; above it, the merged model is not the
# trained one
LARGEST_LOSS = 0.5


def merge(source: Provenance, out: Path, dtype: str = "stored") -> Row:
    """Write the base with the adapter merged into it to ``out``, a directory in transformers' format with tokenizer.

    ``dtype`` is "stored" (that of each weight in the base's files) or one of ``DTYPES``. Returns adapter, base, out,
    dtype, modules, and, relative to the spread of the logits, ``difference`` (written model to adapter),
    ``tolerance`` and ``effect`` (adapter to base). Raises UsageError when ``out`` is in use, ModelError when base and
    adapter do not fit, or the written model differs by more than rounding to its number format explains.
    """
    out = _free(out)
    source = source.unquantised()
    base = source.load("cpu", "stored")
    stored = {name: weight.dtype for name, weight in base.model.named_parameters()}
    if changed := source.other_weights(base):
        raise ModelError(changed)
    shape = (PROBE_ROWS, min(PROBE_TOKENS, base.context_length))
    tokens = torch.from_numpy(generator("export").integers(0, base.vocab_size, shape))
    model = _with_adapter(base.model.float(), source)
    modules = sum(hasattr(module, "lora_A") for module in model.modules())
    with_adapter = _logits(model, tokens)
    with model.disable_adapter():
        effect = _difference(_logits(model, tokens), with_adapter)
    merged = model.merge_and_unload()
    for name, weight in merged.named_parameters():
        weight.data = weight.data.to(DTYPES.get(dtype, stored.get(name, base.dtype)))
    merged.config.dtype = DTYPES.get(dtype, base.dtype)
    written = str(merged.config.dtype).removeprefix("torch.")
    with _published(out) as aside:
        _save(merged, base.tokenizer, aside)
        tokenizer = base.tokenizer
        del base, model, merged  # keep only one model in memory
        gc.collect()
        own_code = source.config.model.trust_remote_code
        again = load_base(str(aside), trust_remote_code=own_code, devices="cpu", dtype="float32")
        _check_tokenizer(tokenizer, again.tokenizer)
        difference = _difference(_logits(again.model, tokens), with_adapter)
        tolerance = max(torch.finfo(DTYPES[written]).eps, FLOAT32_NOISE) * math.sqrt(modules)
        _check(difference, tolerance, effect, written)
    return {
        "adapter": str(source.adapter),
        "base": source.base,
        "out": str(out),
        "dtype": written,
        "modules": modules,
        "difference": difference,
        "tolerance": tolerance,
        "effect": effect,
    }


def _with_adapter(model: Any, source: Provenance) -> Any:
    from peft import PeftModel, get_peft_model_state_dict

    with AdapterFile(source.adapter) as file:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peft only warns about a factor without a layer
                adapted: Any = PeftModel.from_pretrained(model, str(source.adapter))
        except (RuntimeError, ValueError, KeyError) as error:
            raise ModelError(f"{source.adapter} does not fit {source.base}: {str(error).splitlines()[0]}") from error
        loaded = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        for name, where in file.modules.items():
            for key, factor in zip((where.a_key, where.b_key), file.factors(name), strict=True):
                if key not in loaded or not torch.equal(loaded[key].cpu(), factor.to(loaded[key].dtype)):
                    raise ModelError(f"{source.adapter} does not fit {source.base}: no layer takes {key}")
    return adapted


def pad_rank(source: Provenance, out: Path, rank: int) -> Row:
    """Write the adapter with A and B padded with zeros to ``rank`` in every module, with one scale for all modules.

    The result avoids rsLoRA and rank patterns, which some servers ignore. Its scale alpha/rank is the most frequent
    one; in modules with another scale, B absorbs the ratio, rounded once. ΔW is otherwise bit-identical. Raises
    UsageError for a rank below the adapter's or when ``out`` is in use, ModelError for an adapter with more than LoRA
    factors.
    """
    out = _free(out)
    with AdapterFile(source.adapter) as file:
        if rank < file.rank:
            raise UsageError(
                f"{source.adapter} has rank {file.rank}, and padding cannot lower it: type --rank-pad {file.rank} or "
                f"more, or retrain squeeze {source.adapter} --to {rank} first"
            )
        file.require_plain()
        scale, pairs = uniform(file, rank)
        alpha = scale * rank
        config = file.config | {
            "r": rank, "lora_alpha": round(alpha) if abs(alpha - round(alpha)) < 1e-9 * rank else alpha,
            "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
            "base_model_name_or_path": source.base, "revision": source.config.model.revision,
        }  # fmt: skip
        layout = {name: where.at(rank) for name, where in file.modules.items()}
        with _published(out) as aside, writing(aside):
            write_streamed(aside, layout, pairs, config)
        ranks = sorted({where.rank for where in file.modules.values()})
    return {
        "adapter": str(source.adapter),
        "base": source.base,
        "out": str(out),
        "rank": rank,
        "ranks_before": ranks,
        "lora_alpha": config["lora_alpha"],
        "modules": len(layout),
    }


def uniform(file: AdapterFile, rank: int) -> tuple[float, Iterator[tuple[str, Pair]]]:
    """Return the most frequent scale of the adapter's modules, and (A [rank, in], B [out, rank]) of every module. B is
    rescaled in modules with another scale."""
    scales = list(file.scales.values())
    common = max(scales, key=lambda scale: (scales.count(scale), scale))

    def scaled(name: str) -> Pair:
        a, b = file.factors(name)
        if file.scales[name] != common:
            b = (b.to(torch.float64) * (file.scales[name] / common)).to(b.dtype)
        return padded((a, b), rank)

    return common, ((name, scaled(name)) for name in file.modules)


def _free(out: Path) -> Path:
    out = out.absolute()
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        kind = "a symbolic link" if out.is_symlink() else "a file"
        raise UsageError(f"{out} is {kind}: give a new directory with --out")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty and stays as it is: give a new directory with --out")
    prepare_directory(out.parent)
    return out


@contextmanager
def _published(out: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to ``out`` at the end, or removed after a failure."""
    aside = aside_of(out)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with writing(aside):
            aside.mkdir()
        yield aside
        if out.exists():
            try:
                out.rmdir()  # removes an empty directory only
            except OSError:
                raise UsageError(f"{out} is no longer empty: give a new directory with --out") from None
        publish_directory(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _save(model: Any, tokenizer: Any, directory: Path) -> None:
    from safetensors import SafetensorError

    with writing(directory):
        try:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        except SafetensorError as error:  # the error text of a full disk
            raise StorageError(directory, str(error)) from error
        mode = (directory / "config.json").stat().st_mode
        for path in directory.iterdir():
            path.chmod(mode)  # safetensors creates files readable by their owner only, and a server may be another user


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [rows, tokens, vocabulary] minus their vocabulary mean, which affects no probability."""
    logits = model(input_ids=tokens, use_cache=False).logits.double()
    return logits - logits.mean(-1, keepdim=True)


def _difference(actual: torch.Tensor, reference: torch.Tensor) -> float:
    spread = float(reference.square().mean().sqrt())
    return float((actual - reference).square().mean().sqrt()) / max(spread, 1e-30)


def _check(difference: float, tolerance: float, effect: float, dtype: str) -> None:
    """Raise ModelError unless the written model agrees with base and adapter within rounding.

    Rounding gives each weight, and so each product, an independent relative error of eps/√12 (root mean square). Over
    the products of n adapted layers these errors add up as √n. ``tolerance`` is eps·√n, three times that.
    """
    if not difference <= tolerance:
        raise ModelError(
            f"the merged model's logits differ from the adapter's by {difference:.2g} of their spread, and {dtype} "
            f"explains {tolerance:.2g} at most: nothing is written"
        )
    if effect > 0 and difference > LARGEST_LOSS * effect:
        advice = "type --dtype float32, or serve the adapter itself" if dtype != "float32" else "serve the adapter"
        raise ModelError(
            f"rounding to {dtype} loses {min(difference / effect, 99):.0%} of the effect of the adapter: {advice}; "
            "nothing is written"
        )


def _check_tokenizer(before: Any, after: Any) -> None:
    text = "Natalia sold 48/2 = 24 clips in May. \\boxed{24}\n\t<|end|> é 数学"
    same = before(text)["input_ids"] == after(text)["input_ids"]
    if not same or getattr(before, "chat_template", None) != getattr(after, "chat_template", None):
        raise ModelError("the saved tokenizer gives other tokens than the base's: nothing is written")
