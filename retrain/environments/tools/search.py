"""Tool that searches a local corpus by BM25. It uses bm25s, which is fast and needs only numpy."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from retrain.environments.arguments import imported
from retrain.environments.tools import ToolError
from retrain.errors import DataError, UsageError

SUFFIXES = (".txt", ".md")
WORD = re.compile(r"\w+")
BEGINNING = re.compile(r"\b\w")
MAX_QUERY_WORDS = 1000


class Document(BaseModel):
    model_config = ConfigDict(strict=True)

    text: str
    id: int | str | None = None
    title: str | None = None


class Search:
    """BM25 search over ``corpus``: a .jsonl file with ``{"text", "id"?, "title"?}`` on each line, or a directory, in
    which every .txt and .md file, at any depth, is a document.

    ``k``: maximum number of documents in a result. ``characters``: length of each excerpt, taken from the place with
    the most words of the query. All searches of a process over an unchanged corpus share one index.

    Words are runs of letters and digits, in lower case, without stop words. Ties are ordered by id. Raises MissingExtra
    without bm25s, UsageError for an invalid number, DataError with file and line for an unreadable corpus.
    """

    def __init__(self, corpus: str, k: int = 3, characters: int = 1000):
        for name, value in (("k", k), ("characters", characters)):
            if value < 1:
                raise UsageError(f"tool search: {name} = {value} must be at least 1")
        imported("bm25s", "tool search")
        self.k, self.characters = k, characters
        self._index = _index(Path(corpus))

    def __call__(self, query: str) -> str:
        """Search the documents and return the passages that fit best.

        Args:
            query: The words to look for.
        """
        if not isinstance(query, str):
            raise ToolError(f"query must be a text, not {type(query).__name__}")
        query_words = split_words(query)[:MAX_QUERY_WORDS]
        if not query_words:
            raise ToolError("query has no words")
        documents = self._index.best(query_words, self.k)
        if not documents:
            return "[Nothing found]"
        excerpts = []
        for number, document in enumerate(documents, start=1):
            title = f" {document.title}" if document.title else ""
            excerpt = passage(document.text, query_words, self.characters)
            excerpts.append(f"[{number}] {document.id}{title}\n{excerpt}")
        return "\n\n".join(excerpts)


@dataclass(frozen=True)
class CorpusIndex:
    documents: list[Document]
    scores: Any

    def best(self, query_words: list[str], k: int) -> list[Document]:
        import numpy as np

        indexed = [word for word in query_words if word in self.scores.vocab_dict]
        if not indexed:
            return []
        scores = self.scores.get_scores(indexed)
        hits = np.flatnonzero(scores > 0)
        if len(hits) > k:  # sort only documents that reach the k-th best score
            hits = hits[scores[hits] >= np.partition(scores[hits], -k)[-k]]
        order = np.argsort(-scores[hits], kind="stable")[:k]
        return [self.documents[place] for place in hits[order]]


def _index(corpus: Path) -> CorpusIndex:
    """Return the index of ``corpus``, shared by all episodes of the process until a file changes. Raises DataError."""
    try:
        path = corpus.expanduser().resolve()
        files = _files(path, corpus)
        stamp = tuple((file, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files)
        return _read(path, corpus, stamp)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory for ~
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise DataError(f"tool search: corpus {corpus} cannot be read: {reason}") from error


@lru_cache(maxsize=8)
def _read(path: Path, corpus: Path, stamp: Sequence[tuple[Path, int, int]]) -> CorpusIndex:
    import bm25s

    documents = list(_lines(path)) if path.is_file() else [_text_file(file, path) for file, *_ in stamp]
    documents.sort(key=_order)
    texts = [split_words(f"{document.title or ''} {document.text}") for document in documents]
    if not any(texts):
        raise DataError(f"tool search: corpus {corpus} has no words")
    scores = bm25s.BM25(method="lucene", k1=1.5, b=0.75, backend="numpy")
    scores.index(texts, show_progress=False)
    return CorpusIndex(documents, scores)


def _files(path: Path, corpus: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"tool search: corpus {corpus} is a directory without .txt or .md files")
        return files
    if not path.exists():
        raise DataError(f"tool search: corpus {corpus} does not exist: give a .jsonl file or a directory of .txt files")
    if path.suffix != ".jsonl":
        raise DataError(f"tool search: corpus {corpus} is neither a .jsonl file nor a directory of .txt and .md files")
    return [path]


def _lines(path: Path) -> Iterator[Document]:
    seen: dict[str, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                document = Document.model_validate(json.loads(line))
            except ValidationError as error:
                (first, *_) = error.errors()
                field = f'"{first["loc"][0]}": ' if first["loc"] else ""
                raise DataError(f'{where} is no document such as {{"text": "…"}}: {field}{first["msg"]}') from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is no JSON: {error}") from error
            document.id = str(number if document.id is None else document.id)
            if document.id in seen:
                raise DataError(f"{where} has the id {document.id!r} of line {seen[document.id]}")
            seen[document.id] = number
            yield document


def _text_file(file: Path, directory: Path) -> Document:
    try:
        return Document(id=str(file.relative_to(directory)), text=file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8: {error}") from error


def _order(document: Document) -> tuple[bool, int, str]:
    id = str(document.id)
    number = id.isascii() and id.isdecimal() and len(id) < 20
    return (not number, int(id) if number else 0, id)


def split_words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def passage(text: str, query_words: list[str], characters: int) -> str:
    """Return the first part of ``text``, at most ``characters`` long, with the most distinct query words."""
    text = text.strip()
    if len(text) <= characters:
        return text
    looked_for = set(query_words)
    places = [(match.start(), word) for match in WORD.finditer(text) if (word := match.group().lower()) in looked_for]
    within: Counter[str] = Counter()
    best, most, end = 0, 0, 0
    for start, word in places:  # a window that begins at each query word
        while end < len(places) and places[end][0] < start + characters:
            within[places[end][1]] += 1
            end += 1
        count = sum(1 for other in within if within[other] > 0)
        if count > most:
            best, most = start, count
        within[word] -= 1
    if best > len(text) - characters and (near := BEGINNING.search(text, len(text) - characters)):
        best = min(best, near.start())  # extend to the left if the text ends before the window is full
    part = text[best : best + characters].strip()
    return f"{'… ' if best else ''}{part}{' …' if best + characters < len(text) else ''}"
