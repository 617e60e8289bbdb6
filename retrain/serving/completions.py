"""Handle ``/v1/completions``: texts or token ids in, texts and token ids out."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from retrain.serving.batching import Piece
from retrain.serving.choices import ChoiceBuilder, JsonObject, finite
from retrain.serving.schema import CompletionBody, read
from retrain.serving.scoring import Tops
from retrain.serving.service import Service
from retrain.serving.tokens import encoded


@dataclass
class Echo:
    """Prompt as repeated in the answer, with the log-probabilities of all tokens but the first."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Tops] = field(default_factory=list)


async def answer(service: Service, request: Request) -> Response:
    body = read(CompletionBody, await request.body())
    service.find(body.model)
    special = body.add_special_tokens is not False
    prompts = await service.with_tokenizer(
        lambda tokenizer: [
            encoded(tokenizer, prompt, special) if isinstance(prompt, str) else tuple(prompt) for prompt in body.prompts
        ]
    )
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    for prompt_ids in prompts:
        service.check_prompt(prompt_ids, max_tokens)
    sampling = service.sampling(body, max_tokens)
    generation_set = service.begin(body.model, prompts, sampling, body) if max_tokens else None  # else only an echo
    return await CompletionChoices(service, body, prompts, generation_set).answer(request)


class CompletionChoices(ChoiceBuilder[CompletionBody]):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.echoes: dict[int, Echo] = {}
        self.offsets = [0] * len(self.drawn)  # Characters of the tokens of each choice until now

    async def content(self, index: int, piece: Piece, text: str, is_first: bool) -> JsonObject:
        body, number = self.body, self.prompt_of(index)
        if body.echo and number not in self.echoes:
            self.echoes[number] = await self._echo(number)
        echo = self.echoes[number] if body.echo and is_first else Echo()
        content: JsonObject = {"text": echo.text + text}
        if body.logprobs is not None:
            tops = [*echo.tops, *await self.tops(index, piece, body.logprobs)]
            token_ids, logprobs = [*echo.token_ids, *piece.token_ids], [*echo.logprobs, *piece.logprobs]
            content["logprobs"] = self._logprobs(index, token_ids, logprobs, tops)
        if body.return_token_ids:
            content["prompt_token_ids"] = list(self.prompts[number]) if is_first else None
        return content

    async def _echo(self, number: int) -> Echo:
        source, prompt_ids = self.body.prompts[number], self.prompts[number]
        text = source if isinstance(source, str) else self.service.tokenizer.decode(list(prompt_ids))
        scored, tops = [], []
        if self.body.logprobs is not None and len(prompt_ids) > 1:
            scored, tops = await self.service.score(self.served, prompt_ids, 1, None, self.body.logprobs)
        return Echo(text, prompt_ids, [None, *scored], [(), *(tops or [()] * len(scored))])

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Tops]
    ) -> JsonObject:
        """Return ``logprobs`` of a choice; the sampled token is among the top ones, as in OpenAI's API. A
        log-probability of None marks a token without context."""
        names = [self.token_text(token_id) for token_id in token_ids]
        ends = list(itertools.accumulate(map(len, names), initial=self.offsets[index]))
        self.offsets[index] = ends[-1]
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
