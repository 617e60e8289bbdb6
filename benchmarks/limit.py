"""The limit as one side of ``step.py``: an RL step as plain matrix products, without trainer, engine or model library.

It shows what the hardware allows for this work, written by hand for one architecture (Qwen3) and one kind of batch
(all prompts of one length, all completions of one length):

- sampling: adapters merged into the weights, q/k/v and gate/up as one product each, prompts prefilled once per
  group, a static cache, one inverse-CDF draw per token with its log-probability;
- update: base frozen, each prompt computed once for its group, adapters merged for the forward and the input gradient
  too (so that LoRA costs four thin products in the backward and nothing else), logits for completion tokens only,
  gradients of output layer, norms and SwiGLU by hand, micro-batches that fit the caches, AdamW on one flat buffer.
"""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shared
import torch
from safetensors import safe_open
from shared import ALPHA, LR, RANK, SHAPES, Setting, Shape
from torch.nn import functional as F

PARTS = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o": ("self_attn.o_proj",)}
PARTS |= {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
EPS = 1e-6


class MergedLora(torch.autograd.Function):
    """x [N, in] → x·Wᵀ with W = frozen + scale·B·A already merged; gradients for x, A [parts·r, in], B [out, r].

    The rows of B belong to the parts in order: part p maps its own r rows of A.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: list[int]):
        ctx.save_for_backward(x, weight, a, b)
        ctx.sizes = sizes
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        g = grads[0]
        x, weight, a, b = ctx.saved_tensors
        scale, low = ALPHA / RANK, x @ a.to(x.dtype).t()
        b_part = b.to(g.dtype).split(ctx.sizes)
        g_part = g.split(ctx.sizes, dim=-1)
        high = torch.cat([gp @ bp for gp, bp in zip(g_part, b_part, strict=True)], dim=-1)
        grad_b = torch.cat([gp.t() @ lp for gp, lp in zip(g_part, low.split(RANK, dim=-1), strict=True)])
        grad_x = g @ weight if ctx.needs_input_grad[0] else None
        return grad_x, None, scale * (high.t() @ x).to(a.dtype), scale * grad_b.to(b.dtype), None


class Rms(torch.autograd.Function):
    """RMS norm over the last axis; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor):
        size = x.shape[-1]
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(EPS).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        x, weight, inverse = ctx.saved_tensors
        g = grads[0] * weight
        along = (g * x).sum(-1, keepdim=True).mul_(inverse * inverse).div_(x.shape[-1])
        return g.addcmul_(x, along, value=-1).mul_(inverse), None


class SwiGlu(torch.autograd.Function):
    """[N, gate + up] → silu(gate)·up."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        torch.mul(gate, sigmoid, out=grad_up)  # silu(gate)
        torch.sub(1, sigmoid, out=grad_gate).mul_(grad_up).add_(sigmoid)  # silu'(gate)
        grad_gate.mul_(up).mul_(grads[0])
        grad_up.mul_(grads[0])
        return grad


@dataclass
class Linear:
    """One fused product of a layer: frozen and merged weight [out, in], and views of the flat adapter."""

    frozen: torch.Tensor
    merged: torch.Tensor
    sizes: list[int]
    a: torch.nn.Parameter
    b: torch.nn.Parameter

    def merge(self) -> None:
        """merged = frozen + scale·B·A, part by part."""
        delta = [b @ a for b, a in zip(self.b.split(self.sizes), self.a.split(RANK), strict=True)]
        self.merged.copy_(self.frozen + ALPHA / RANK * torch.cat(delta))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """With gradients, x [N, in] → [N, out]."""
        return MergedLora.apply(x, self.merged, self.a, self.b, self.sizes)  # pyright: ignore[reportReturnType]


class Limit:
    """A Qwen3 with one adapter, read from a model directory of the harness, and both halves of a step."""

    def __init__(self, directory: Path, shape: Shape, dtype: torch.dtype, device: str = "cpu"):
        self.shape, self.dtype, self.device = shape, dtype, device
        self.pool: ThreadPoolExecutor | None = None
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                tensors |= {key: file.get_tensor(key).to(device, dtype) for key in file.keys()}  # noqa: SIM118
        self.embedding, self.head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        self.last_norm = tensors["model.norm.weight"]
        self.norms = [
            {
                name: tensors[f"model.layers.{i}.{key}.weight"]
                for name, key in (
                    ("attention", "input_layernorm"),
                    ("mlp", "post_attention_layernorm"),
                    ("q", "self_attn.q_norm"),
                    ("k", "self_attn.k_norm"),
                )
            }
            for i in range(shape.layers)
        ]
        self._adapter([{part: [tensors[f"model.layers.{i}.{name}.weight"] for name in names]
                        for part, names in PARTS.items()} for i in range(shape.layers)])  # fmt: skip
        self.optimizer = torch.optim.AdamW([self.flat], lr=LR, weight_decay=0.0, foreach=False)
        inverse = 1e4 ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
        angles = torch.outer(torch.arange(4096, dtype=torch.float32), inverse).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        self.sin[:, : shape.head_dim // 2] *= -1  # the sign of rotate_half

    def _adapter(self, weights: list[dict[str, list[torch.Tensor]]]) -> None:
        """One flat fp32 buffer for all A and B, with gradient; A uniform, B zero as in peft."""
        size = sum(RANK * sum(matrix.shape) for layer in weights for part in layer.values() for matrix in part)
        self.flat = torch.nn.Parameter(torch.zeros(size, device=self.device))
        self.flat.grad = torch.zeros_like(self.flat)
        stream, at = torch.Generator().manual_seed(0), 0
        self.layers: list[dict[str, Linear]] = []
        for layer in weights:
            linears = {}
            for part, matrices in layer.items():
                views = []
                columns = matrices[0].shape[1]
                outs = [matrix.shape[0] for matrix in matrices]
                for shape in ((len(outs) * RANK, columns), (sum(outs), RANK)):
                    end = at + math.prod(shape)
                    view = torch.nn.Parameter(self.flat.data[at:end].view(shape))
                    view.grad = self.flat.grad[at:end].view(shape)
                    views.append(view)
                    at = end
                bound = 1 / math.sqrt(columns)
                views[0].data.copy_(torch.empty(views[0].shape).uniform_(-bound, bound, generator=stream))
                frozen = torch.cat(matrices)
                linears[part] = Linear(frozen, frozen.clone(), outs, views[0], views[1])
            self.layers.append(linears)

    # -- the model ----------------------------------------------------------------------------------------------

    def _heads(self, qkv: torch.Tensor, norms: dict[str, torch.Tensor], start: int, rows: int):
        """qkv [rows·T, q+k+v] → rotated q [rows, H, T, D], k and v [rows, H_kv, T, D]."""
        s = self.shape
        qkv = qkv.view(rows, -1, s.heads + 2 * s.kv_heads, s.head_dim)
        length = qkv.shape[1]
        cos, sin = self.cos[start : start + length, None], self.sin[start : start + length, None]
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], dim=2)
        turned = []
        for part, name in ((q, "q"), (k, "k")):
            normed = _rms(part, norms[name])
            turned.append((normed * cos).addcmul(normed.roll(s.head_dim // 2, -1), sin).transpose(1, 2))
        return turned[0], turned[1], v.transpose(1, 2)

    def _hidden(
        self, prompts: torch.Tensor, completions: torch.Tensor | None, linear: Any, keep: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states of prompts [p, L] and of the completions [p·G, T] that continue them, T may be 0.

        Prompt tokens stand before completion tokens in one flat row; only attention tells them apart. ``keep`` is
        given every layer's keys and values of the prompts.
        """
        count, width = prompts.shape
        split = count * width
        h = F.embedding(prompts, self.embedding).view(split, -1)
        rows = length = 0
        mask = None
        if completions is not None:
            rows, length = completions.shape
            h = torch.cat([h, F.embedding(completions, self.embedding).view(rows * length, -1)])
            mask = torch.ones(length, width + length, dtype=torch.bool, device=self.device).tril(width)
        for i, (products, norms) in enumerate(zip(self.layers, self.norms, strict=True)):
            qkv = linear(products["qkv"], _rms(h, norms["attention"]))
            q, k, v = self._heads(qkv[:split], norms, 0, count)
            if keep is not None:
                keep(i, k, v)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(split, -1)
            if completions is not None:
                q, k_own, v_own = self._heads(qkv[split:], norms, width, rows)
                k, v = (
                    torch.cat([prompt.repeat_interleave(rows // count, 0), own], dim=2)
                    for prompt, own in ((k, k_own), (v, v_own))
                )
                own = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
                mixed = torch.cat([mixed, own.transpose(1, 2).reshape(rows * length, -1)])
            h = h + linear(products["o"], mixed)
            gate_up = linear(products["gate_up"], _rms(h, norms["mlp"]))
            h = h + linear(products["down"], SwiGlu.apply(gate_up))
        last = h[:split].view(count, width, -1)[:, -1]
        return _rms(last, self.last_norm), _rms(h[split:], self.last_norm)

    # -- sampling -----------------------------------------------------------------------------------------------

    def sample(self, setting: Setting, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [rows, prompt + new] and the sampled tokens' log-probabilities [rows, new]."""
        with torch.no_grad():
            for layer in self.layers:
                for product in layer.values():
                    product.merge()
            prompts = torch.tensor(shared.prompt_ids(setting), device=self.device)
            stream = torch.Generator().manual_seed(seed)
            draws = torch.rand(setting.rows, setting.new_tokens, generator=stream).to(self.device)
            shares = len(self._split(prompts))
            pairs = zip(prompts.chunk(shares), draws.chunk(shares), strict=True)
            parts = self._map(lambda pair: self._decode(pair[0], pair[1], setting.samples), pairs)
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])

    def _decode(self, prompts: torch.Tensor, draws: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        s, (rows, new) = self.shape, draws.shape
        width = prompts.shape[1]
        keys = torch.empty(s.layers, rows, s.kv_heads, width + new, s.head_dim, dtype=self.dtype, device=self.device)
        values = torch.empty_like(keys)

        def fill(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            keys[layer, :, :, :width] = k.repeat_interleave(samples, 0)
            values[layer, :, :, :width] = v.repeat_interleave(samples, 0)

        def merged(product: Linear, x: torch.Tensor) -> torch.Tensor:
            return x @ product.merged.t()

        with torch.no_grad():
            hidden = self._hidden(prompts, None, merged, fill)[0].repeat_interleave(samples, 0)
            tokens = torch.empty(rows, width + new, dtype=torch.long, device=self.device)
            tokens[:, :width] = prompts.repeat_interleave(samples, 0)
            logprobs = torch.empty(rows, new, device=self.device)
            for step in range(new):
                at = width + step
                probs = (hidden @ self.head.t()).float().softmax(-1)
                cdf = probs.cumsum(-1)
                token = torch.searchsorted(cdf, draws[:, step : step + 1] * cdf[:, -1:], right=True)
                token.clamp_max_(s.vocab - 1)
                logprobs[:, step] = probs.gather(1, token).squeeze(1).log()
                tokens[:, at] = token.squeeze(1)
                if step + 1 < new:
                    hidden = self._decode_one(tokens[:, at], keys, values, at)
        return tokens, logprobs

    def _decode_one(self, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: int) -> torch.Tensor:
        """Hidden states [rows, hidden] after one more token per row, which goes to column ``at`` of the cache."""
        s, rows = self.shape, ids.shape[0]
        h = F.embedding(ids, self.embedding)
        for i, (products, norms) in enumerate(zip(self.layers, self.norms, strict=True)):
            q, k, v = self._heads(_rms(h, norms["attention"]) @ products["qkv"].merged.t(), norms, at, rows)
            keys[i, :, :, at : at + 1], values[i, :, :, at : at + 1] = k, v
            # The query heads that share keys stand in the place of query positions.
            q = q.reshape(rows, s.kv_heads, -1, s.head_dim)
            mixed = F.scaled_dot_product_attention(q, keys[i, :, :, : at + 1], values[i, :, :, : at + 1])
            h = h + mixed.reshape(rows, -1) @ products["o"].merged.t()
            gate, up = (_rms(h, norms["mlp"]) @ products["gate_up"].merged.t()).chunk(2, dim=-1)
            h = h + (F.silu(gate).mul_(up)) @ products["down"].merged.t()
        return _rms(h, self.last_norm)

    # -- update -------------------------------------------------------------------------------------------------

    def update(self, setting: Setting, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """One policy-gradient step on all rows: mean over all tokens of −ratio·advantage."""
        advantage = torch.tensor(shared.advantages(setting), device=self.device) / (setting.rows * setting.new_tokens)
        groups = max(1, shared.MICRO_TOKENS // (setting.samples * setting.new_tokens))
        shares = self._split(range(setting.prompts))
        pieces = []
        for share in shares:
            for start in range(share.start, share.stop, groups):
                part = slice(setting.samples * start, setting.samples * min(start + groups, share.stop))
                pieces.append((tokens[part], logprobs[part], advantage[part]))
        grads = self._map(lambda own: self._gradient(own, setting), self._split(pieces))
        torch.sum(torch.stack([flat for flat, _ in grads]), 0, out=self.flat.grad)
        torch.nn.utils.clip_grad_norm_([self.flat], 1.0)
        self.optimizer.step()

    def _gradient(self, pieces: list[tuple[torch.Tensor, ...]], setting: Setting) -> tuple[torch.Tensor, float]:
        """Gradient of some micro-batches in the order of the flat buffer, and the worst ratio seen."""
        worst, views = 0.0, [view for layer in self.layers for p in layer.values() for view in (p.a, p.b)]
        total: list[torch.Tensor] | None = None
        width, new = setting.prompt_tokens, setting.new_tokens
        for tokens, sampled, advantage in pieces:
            prompts = tokens[:: setting.samples, :width]
            last, rest = self._hidden(prompts, tokens[:, width:-1], lambda product, x: product(x))
            first = last.repeat_interleave(setting.samples, 0).unsqueeze(1)
            hidden = torch.cat([first, rest.view(len(tokens), new - 1, -1)], dim=1).view(len(tokens) * new, -1)
            with torch.no_grad():
                # The output layer by hand: gradient of −ratio·advantage with respect to logits, then to hidden.
                logits = (hidden @ self.head.t()).float()
                chosen = tokens[:, width:].reshape(-1, 1)
                logits -= logits.logsumexp(-1, keepdim=True)
                ratio = (logits.gather(1, chosen) - sampled.reshape(-1, 1)).exp_()
                weight = -ratio * advantage.repeat_interleave(new).unsqueeze(1)
                slope = logits.exp_().mul_(-weight).scatter_add_(1, chosen, weight)
                grad_hidden = slope.to(self.dtype) @ self.head
                worst = max(worst, float((ratio - 1).abs().max()))
            grads = torch.autograd.grad(hidden, views, grad_hidden)
            total = list(grads) if total is None else [t.add_(g) for t, g in zip(total, grads, strict=True)]
        assert total is not None
        return torch.cat([grad.reshape(-1) for grad in total]), worst

    # -- cores --------------------------------------------------------------------------------------------------

    def use_threads(self, threads: int, split: bool) -> None:
        """``split``: torch divides every product over the cores; otherwise each core does its own share of rows."""
        torch.set_num_threads(threads if split else 1)
        own = not split and threads > 1
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) if own else None

    def _split(self, items: Any) -> list[Any]:
        count = self.pool._max_workers if self.pool else 1
        size = -(-len(items) // count)
        return [items[i : i + size] for i in range(0, len(items), size)]

    def _map(self, work: Any, items: Any) -> list[Any]:
        return list(self.pool.map(work, items)) if self.pool else [work(item) for item in items]


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return Rms.apply(x, weight)  # pyright: ignore[reportReturnType]


def main() -> None:
    options = shared.side_parser(__doc__).parse_args()
    sys.stdout = sys.stderr
    setting = Setting.parse(options.serve)
    shape = SHAPES[setting.shape]
    directory = shared.model_directory(options.models, setting.shape)
    limit = Limit(directory, shape, getattr(torch, options.dtype), options.device)
    # A model whose weights fit the caches gains from rows divided over the cores, a larger one from products.
    small = sum(w.frozen.numel() for layer in limit.layers for w in layer.values()) * 4 <= 32 << 20
    limit.use_threads(options.threads, split=not small)
    seed = iter(range(1 << 30))
    shared.serve(
        lambda: shared.measure(
            lambda: limit.sample(setting, next(seed)),
            lambda sampled: limit.update(setting, *sampled),
            lambda sampled: sampled[1].numel(),
        )
    )


if __name__ == "__main__":
    main()
