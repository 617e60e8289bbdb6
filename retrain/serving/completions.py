"""Handle ``/v1/completions``: texts or token ids in, texts and token ids out."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from retrain.serving.answers import ChoicesResponse, JsonObject, finite
from retrain.serving.batching import GenerationState, Piece
from retrain.serving.schema import CompletionBody
from retrain.serving.scoring import Tops
from retrain.serving.service import Service


async def answer(service: Service, body: CompletionBody) -> ChoicesResponse[CompletionBody]:
    service.find(body.model)
    prompts = await service.with_tokenizer(
        lambda tokenizer: [
            encoded(tokenizer, prompt, body.add_special_tokens) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompt
        ]
    )
    return CompletionResponse(service, body, prompts, body.max_tokens)


def encoded(tokenizer: Any, text: str, add_special_tokens: bool) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


class CompletionResponse(ChoicesResponse[CompletionBody]):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionBody, prompts: Sequence[tuple[int, ...]], max_tokens: int):
        super().__init__(service, body, prompts, max_tokens)
        self._offsets = Counter[int]()  # Characters of the tokens of each choice until now
        self._prompt_scores: dict[tuple[int, ...], tuple[list[float], list[Tops]]] = {}

    async def content(self, generation: GenerationState, piece: Piece) -> JsonObject:
        body, prompt_ids, is_first = self.body, generation.prompt_ids, piece.begin == 0
        echoes, text = body.echo and is_first, piece.text
        if echoes:
            prompt = body.prompt[generation.index // body.n]
            text = (prompt if isinstance(prompt, str) else self.service.tokenizer.source.decode(prompt)) + text
        content: JsonObject = {"text": text}
        if body.logprobs is not None:
            token_ids, logprobs = piece.token_ids, piece.logprobs
            tops = await self.tops(generation, piece, body.logprobs)
            if echoes:
                scored, likeliest = await self._scores_of(prompt_ids, body.logprobs)
                token_ids, logprobs = [*prompt_ids, *token_ids], [None, *scored, *logprobs]
                tops = [(), *likeliest, *tops]
            content["logprobs"] = self._logprobs(generation.index, token_ids, logprobs, tops)
        if body.return_token_ids:
            content["prompt_token_ids"] = list(prompt_ids) if is_first else None
        return content

    async def _scores_of(self, prompt_ids: tuple[int, ...], top: int) -> tuple[list[float], list[Tops]]:
        """Return log-probabilities and top tokens of a prompt from its second token on, at temperature 1 and without
        truncation of the distribution."""
        if prompt_ids not in self._prompt_scores and len(prompt_ids) > 1:
            self._prompt_scores[prompt_ids] = await self.service.score(self.served, prompt_ids, 1, None, top)
        return self._prompt_scores.get(prompt_ids, ([], []))

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Tops]
    ) -> JsonObject:
        """Return OpenAI's ``logprobs`` of a choice. The top tokens always include the token itself. A log-probability
        of None marks a prompt's first token, which has no top tokens."""
        names = [self.token_text(token_id) for token_id in token_ids]
        ends = list(itertools.accumulate(map(len, names), initial=self._offsets[index]))
        self._offsets[index] = ends[-1]
        best: list[dict[str, float] | None] = []
        for name, logprob, top in zip(names, logprobs, tops, strict=True):
            likely = {} if logprob is None else {name: finite(logprob)}
            for token_id, other in top if likely else ():
                likely.setdefault(self.token_text(token_id), finite(other))
            best.append(likely or None)
        return {
            "text_offset": ends[:-1],
            "token_logprobs": [None if logprob is None else finite(logprob) for logprob in logprobs],
            "tokens": names,
            "top_logprobs": best,
        }
