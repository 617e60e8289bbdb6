"""Texts that a model, a data set or a web page may hold to do harm where they are shown, stored or read back."""

from html.parser import HTMLParser

MARKER = "retrain_was_here"
"""A page in which a script of these texts ran has this name on ``window``."""

HOSTILE: dict[str, str] = {
    "script": f"<script>window.{MARKER}=1</script>",
    "script_end": f"</script><script>window.{MARKER}=1</script>",
    "comment_end": f"--><script>window.{MARKER}=1</script><!--",
    "image": f'<img src=x onerror="window.{MARKER}=1">',
    "attribute": f'" onmouseover="window.{MARKER}=1" x=\'',
    "svg": f"<svg/onload=window.{MARKER}=1>",
    "link": f"[click](javascript:window.{MARKER}=1)",
    "style_end": f"</style><script>window.{MARKER}=1</script>",
    "template": "${7*7} {{7*7}} {% raw %} `${7*7}`",
    "entities": "&lt;script&gt; &#60;b&#62; &amp;amp;",
    "terminal_clear": "\x1b[2J\x1b[H\x1b[31mred\x1b[0m",
    "terminal_title": "\x1b]0;owned\x07",
    "terminal_link": "\x1b]8;;https://example.org\x1b\\click\x1b]8;;\x1b\\",
    "terminal_paste": "\x1b[200~rm -rf ~\n\x1b[201~",
    "c1_controls": "\x9b31mred\x9b0m \x85next\x90q\x9c",
    "controls": "".join(map(chr, range(32))) + "\x7f",
    "carriage": "harmless\rHARMFUL",
    "backspaces": "no\x08\x08yes",
    "bidi": "abc\u202edcba\u2066x\u2069\u200b\u200f",
    "line_ends": "one\u2028two\u2029three\x85four\x0bfive\x0csix",
    "markup": "[bold red]rich[/bold red] [link=file:///etc/passwd]x[/link]",
    "formula": '=HYPERLINK("http://example.org","x")',
    "formula_plus": "+1+cmd|' /C calc'!A0",
    "formula_at": "@SUM(1+1)",
    "formula_tab": "\t=1+1",
    "high_surrogate": "a\ud800b",
    "low_surrogate": "a\udc00b",
    "swapped_surrogates": "\udc00\ud800",
    "escaped_bytes": b"\xff\xfe\xc3(".decode("utf-8", "surrogateescape"),
    "noncharacters": "\ufffe\uffff\U0010ffff\ufeff",
    "combining": "z" + "\u0301" * 2000,
    "json": '"}\n{"step": 99, "loss": 0}\n',
    "json_numbers": "NaN Infinity -Infinity 1e999",
    "toml": '"""\n[training]\nlr = 1\n',
    "path": "../../../../etc/passwd\x00.txt",
    "format": "%s %n {0} {x!r} {__class__}",
    "boxed": "\\boxed{" * 500,
    "power_tower": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "code": "\\boxed{__import__('os').system('true')}",
    "empty": "",
    "spaces": " \t\n ",
}
"""By a name for the test that uses it."""

MEGABYTE = "a<b&\x1b[31m" * 125_000
"""One long line of a little over a million characters, with markup and escapes in it."""

BAD_UTF8 = b"\xff\xfe\x80\xc3\x28\xed\xa0\x80\xf8\x88"
"""Bytes that are no UTF-8 anywhere."""


class Reader(HTMLParser):
    """Elements, attributes and text of a page as a browser would see them."""

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
