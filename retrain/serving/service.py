"""The service behind the HTTP routes: one base model and adapters on it."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from retrain.adapters.export import uniform
from retrain.engines.local import LocalEngine
from retrain.errors import ModelError
from retrain.policy.adapter_io import AdapterFile
from retrain.policy.base import BaseModel, workers_for
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes, LayerShape, LoraWeights
from retrain.records.schema.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from retrain.rng import stream_key
from retrain.serving.batching import Batcher, GenerationState, Piece, ServedWeights
from retrain.serving.schema import SamplingBody, ServingError
from retrain.serving.scoring import Tops, score
from retrain.tokenizer import Tokenizer
from retrain.types import PolicyRef

T = TypeVar("T")
MAX_ADAPTERS = 256  # Adapters in memory at once
MIN_BODY = 1 << 20  # Smallest limit of a request body in bytes: enough for several prompts and the other fields
MAX_BODY = 1 << 30
JSON_BYTES = 6  # Largest number of bytes that JSON needs for one character of a token: `\u00e9`


class Service:
    """A served base model with its adapters. It owns the base's lanes and the engine until ``close``. ``name`` is the
    base's name in requests. At most ``max_queue`` generations may wait and ``max_rows`` are decoded at once; a request
    may take ``timeout_s`` seconds."""

    def __init__(
        self,
        base: BaseModel,
        name: str | None = None,
        *,
        max_queue: int = 4096,
        max_rows: int = 256,
        timeout_s: float = 3600.0,
        notify: Callable[[str], None] = lambda line: None,
    ):
        self.base, self.timeout_s, self.name = base, timeout_s, name or base.name
        self.lanes = Lanes(base)
        self._workers = workers_for(base)
        self.engine = LocalEngine(base, self.lanes, workers=self._workers, notify=notify)
        self.batcher = Batcher(self.engine, max_queue, max_rows)
        # A tokenizer may be used by one thread only. The engine's thread has base.tokenizer, the event loop's thread
        # decodes with the first copy, and the encoder thread tokenises with the second.
        self.tokenizer = Tokenizer(copy.deepcopy(base.tokenizer))
        self._encoder: Any = copy.deepcopy(base.tokenizer)
        self._encoder_thread = ThreadPoolExecutor(1, "tokenizer")
        self._numbers = itertools.count()
        longest = max(map(len, base.tokenizer.get_vocab()), default=1)
        # Largest accepted request body in bytes: every prompt that fits the context, with all characters escaped
        self.max_body = min(MAX_BODY, MIN_BODY + base.context_length * longest * JSON_BYTES)
        self.served: dict[str, ServedWeights] = {}  # the base, then the adapters; used by the event loop's thread alone
        self._put(self.name, base.name, zero_weights(self.lanes.shapes, 1, 1.0, base.device)).result()

    def close(self) -> None:
        self._encoder_thread.shutdown()
        self.batcher.stop()
        self._workers.close()
        self.lanes.detach()

    # -- adapters ------------------------------------------------------------------------------------------------

    def load_at_start(self, name: str, directory: Path) -> None:
        """Serve the adapter in a directory. Call it before the server listens. Raises ModelError or ServingError."""
        self._check_new(name, False)
        self._put(name, str(directory), read_weights(directory, self.base, self.lanes.shapes)).result()

    async def load(self, name: str, path: str | None, files: Mapping[str, str] | None, load_inplace: bool) -> None:
        """Serve an adapter from a directory or from uploaded files (base64 by name). Raises ServingError."""
        self._check_new(name, load_inplace)
        if (path is None) == (files is None):
            raise ServingError(400, "give either lora_path or files", "lora_path")
        if path is not None and ("\0" in path or not await asyncio.to_thread(Path(path).is_dir)):
            raise ServingError(404, f"{path[:1000]!r} is not a directory of this machine", "lora_path")
        shapes = self.lanes.shapes
        try:
            if files is not None:
                weights = await asyncio.to_thread(uploaded_weights, files, self.base, shapes)
            else:
                weights = await asyncio.to_thread(read_weights, Path(path or ""), self.base, shapes)
        except ModelError as error:
            raise ServingError(400, str(error), "lora_path" if files is None else "files") from error
        self._check_new(name, load_inplace)  # another request may have loaded one with this name
        await asyncio.wrap_future(self._put(name, path or "upload", weights))

    def _check_new(self, name: str, load_inplace: bool) -> None:
        """Raise ServingError (400) if the name is in use or ``MAX_ADAPTERS`` adapters are loaded."""
        if name == self.name:
            raise ServingError(400, f"The lora adapter '{name}' conflicts with a served base model.", "lora_name")
        if name in self.served and not load_inplace:
            raise ServingError(
                400,
                f"The lora adapter '{name}' has already been loaded. "
                "If you want to load the adapter in place, set 'load_inplace' to True.",
                "lora_name",
            )
        if len(self.served) > MAX_ADAPTERS and name not in self.served:
            raise ServingError(400, f"{MAX_ADAPTERS} adapters are loaded: unload one first", "lora_name")

    def _put(self, name: str, root: str, weights: LoraWeights) -> Future[None]:
        number = next(self._numbers)
        parent = None if name == self.name else self.name
        served = ServedWeights(name, PolicyRef(f"{name}\x1f{number}", number), weights, root, parent)
        # The thread publishes the weights before it decodes any generation with them.
        published = self.batcher.call(lambda: self.engine.publish(served.ref, LocalSnapshot(weights)))
        before = self.served.get(name)
        self.served[name] = served
        if before is not None:
            self.batcher.retire(before.ref)
        return published

    def unload(self, name: str) -> None:
        """Stop serving the adapter. Running generations still finish with it. Raises ServingError (404)."""
        if name == self.name or name not in self.served:
            raise ServingError(404, f"The lora adapter '{name[:200]}' cannot be found.", "lora_name")
        self.batcher.retire(self.served.pop(name).ref)

    def find(self, name: str | None) -> ServedWeights:
        """Return the base or adapter with this name; None selects the base. Raises ServingError (404)."""
        served = self.served.get(self.name if name is None else name)
        if served is None:
            raise ServingError(404, f"The model `{str(name)[:200]}` does not exist.", "model")
        return served

    # -- generations ---------------------------------------------------------------------------------------------

    async def with_tokenizer(self, task: Callable[[Any], T]) -> T:
        """Return ``task(tokenizer)``, run in a thread because long texts would block the event loop for seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder_thread, task, self._encoder)

    def begin(self, prompts: Sequence[tuple[int, ...]], max_tokens: int, body: SamplingBody) -> list[GenerationState]:
        """Start ``body.n`` generations for every prompt; with ``max_tokens`` 0 they end at once. Raises ServingError.

        The random stream of a generation depends on the seed, the prompt and the index of the sample. If it depended on
        the seed alone, the answers to different prompts of a benchmark would be correlated.
        """
        longest = self.base.context_length
        for prompt_ids in prompts:
            if not prompt_ids:
                raise ServingError(400, "the prompt has no tokens", "prompt")
            if len(prompt_ids) + max_tokens > longest:
                raise ServingError(
                    400,
                    f"This model's maximum context length is {longest} tokens. However, you requested {max_tokens} "
                    f"output tokens and your prompt contains {len(prompt_ids)} input tokens.",
                    "max_tokens",
                )
            if max(prompt_ids) >= self.base.vocab_size:
                raise ServingError(400, f"Token id {str(max(prompt_ids))[:30]} is out of vocabulary", "prompt")
        deadline = time.monotonic() + self.timeout_s
        served = self.find(body.model)  # submitted without awaiting: the weights are not retired in between
        pieces: asyncio.Queue[tuple[GenerationState, Piece | ServingError]] = asyncio.Queue()
        generations: list[GenerationState] = []
        for prompt_ids in prompts:
            seed = secrets.randbits(63) if body.seed is None else body.seed
            for k in range(body.n):
                stream = ("serve", seed, stream_key(*prompt_ids), k)
                generations.append(
                    GenerationState(
                        len(generations), served, prompt_ids, body, max_tokens, stream, self.tokenizer, pieces, deadline
                    )
                )
        if max_tokens:
            self.batcher.submit(generations)
        else:
            for generation in generations:
                generation.total.finish_reason = "length"
                generation.deliver(Piece(finish_reason="length"))
        return generations

    async def score(
        self, served: ServedWeights, token_ids: Sequence[int], begin: int, sampling: SamplingBody | None, top: int
    ) -> tuple[list[float], list[Tops]]:
        return await asyncio.wrap_future(
            self.batcher.call(lambda: score(self.base, self.lanes, served.weights, token_ids, begin, sampling, top))
        )


def zero_weights(shapes: Sequence[LayerShape], rank: int, scale: float, device: torch.device) -> LoraWeights:
    size = sum(rank * (shape.in_features + shape.out_features) for shape in shapes)
    return LoraWeights(shapes, rank, scale, rank, torch.zeros(size, device=device))


def read_weights(directory: Path, base: BaseModel, shapes: Sequence[LayerShape]) -> LoraWeights:
    """Read the LoRA adapter in a PEFT directory; layers without an adapter get zeros. Raises ModelError if the files
    are not a LoRA adapter, a layer does not exist in the base or has another size, or a number is not finite."""
    try:
        with AdapterFile(directory) as file:
            file.require_plain()
            scale, pairs = uniform(file, file.rank)
            weights = zero_weights(shapes, file.rank, float(scale), base.device)
            for name, (a, b) in pairs:
                if name not in weights.A or (a.shape, b.shape) != (weights.A[name].shape, weights.B[name].shape):
                    raise ModelError(f"it adapts {name}, which is no linear layer of that size in {base.name}")
                weights.A[name].copy_(a)
                weights.B[name].copy_(b)
    except ModelError:
        raise
    except Exception as error:  # any error: the files are somebody else's
        raise ModelError(f"{directory} is no LoRA adapter: {type(error).__name__}: {error}") from error
    if not torch.isfinite(weights.flat).all():
        raise ModelError(f"{directory} holds numbers that are not finite")
    return weights


def uploaded_weights(files: Mapping[str, str], base: BaseModel, shapes: Sequence[LayerShape]) -> LoraWeights:
    """Read an adapter from its files' contents in base64, by file name. Raises ModelError as ``read_weights`` does."""
    if set(files) != {ADAPTER_CONFIG, ADAPTER_WEIGHTS}:
        raise ModelError(
            f"files must be {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, not {', '.join(sorted(files))[:200] or 'nothing'}"
        )
    with tempfile.TemporaryDirectory(prefix="retrain-serve-") as folder:
        for name, content in files.items():
            try:
                (Path(folder) / name).write_bytes(base64.b64decode(content, validate=True))
            except ValueError as error:
                raise ModelError(f"{name} is not base64: {error}") from error
        return read_weights(Path(folder), base, shapes)
