"""Decode a growing generation; emit only text that later tokens cannot change."""

from collections.abc import Sequence

from retrain.tokenizer import Tokenizer

BROKEN = "�"  # Replacement character, for incomplete bytes


class Writer:
    """Decodes tokens piece by piece. ``stops`` are texts that end the generation: text that may begin one is held back,
    and the stop itself is returned only with ``keep_stop``."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), keep_stop: bool = False):
        self._tokenizer, self._stops, self._keep_stop = tokenizer, tuple(stops), keep_stop
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._token_ids: list[int] = []
        self._emitted = 0

    def add(self, token_ids: Sequence[int], stop_reason: int | str | None = None, last: bool = False) -> str:
        """Return the text that has become certain; with ``last``, all remaining text."""
        self._token_ids += token_ids
        complete_ids = self._token_ids
        if last and isinstance(stop_reason, int) and not self._keep_stop:
            complete_ids = complete_ids[:-1]
        text = self._tokenizer.decode(complete_ids)
        if last:
            end = len(text)
            if isinstance(stop_reason, str):
                end = text.find(stop_reason) + (len(stop_reason) if self._keep_stop else 0)
        else:
            end = max(self._emitted, len(text.rstrip(BROKEN)) - self._held)
        new = text[self._emitted : end]
        self._emitted += len(new)
        return new
