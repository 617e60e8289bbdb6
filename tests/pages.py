"""HTML pages as their readers see them."""

from __future__ import annotations

from html.parser import HTMLParser


class Reader(HTMLParser):
    """Elements, attributes and text as a browser would see them."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data):
        self.texts.append(data)
