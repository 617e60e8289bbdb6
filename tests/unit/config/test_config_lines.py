import tomllib

from hypothesis import given
from hypothesis import strategies as st

from retrain.config.describe import document
from retrain.config.loading import key_lines

EVERYTHING = '''\
# a comment with [brackets] and key = "value"
bare = 1   # and "quotes"
"quoted.key" = 2
'literal key' = 3
"esc\\u0061ped\\"" = 4
a.b . "c.d" = 5

[table]
x = """
[not.a.table]
y = 1 \\""" still inside
"""
y = \'\'\'
z = 3\'\'\'
quotes = """a"""""
z = [
  1, # one
  # [nothing]
  "two ] ,",
  { p = 3, "q.r" = [4,
    5] },
]
[ table . sub ]
w = { k = 1, l.m = "}" }
date = 1979-05-27 07:32:00Z

[[rows]]
v = 1
[rows.inner]
u = 1
[[rows]]
[[rows.deep]]
t = 1
[[rows.deep]]
t = 2
[x.y]
s = 1
'''


def test_every_way_to_write_a_key():
    lines = key_lines(EVERYTHING)
    assert set(lines) == paths(tomllib.loads(EVERYTHING))
    by_line = {
        2: "bare", 3: "quoted.key", 4: "literal key", 5: 'escaped"', 9: "table/x", 13: "table/y", 15: "table/quotes",
        16: "table/z", 17: "table/z/0", 19: "table/z/1", 21: "table/z/2/q.r/1", 23: "table/sub", 25: "table/sub/date",
        28: "rows/0/v", 29: "rows/0/inner", 30: "rows/0/inner/u", 31: "rows/1", 33: "rows/1/deep/0/t",
        34: "rows/1/deep/1", 35: "rows/1/deep/1/t", 37: "x/y/s",
    }  # fmt: skip
    written = {"/".join(map(str, path)): line for path, line in lines.items()}
    assert {path: written[path] for path in by_line.values()} == {path: line for line, path in by_line.items()}


def test_windows_line_ends_and_no_final_newline():
    text = 'a = """\r\n\r\n"""\r\n\r\n[b]\r\nc = 1'
    assert key_lines(text) == {("a",): 1, ("b",): 5, ("b", "c"): 6}


def paths(value: object, prefix: tuple = ()) -> set[tuple]:
    """Every path of parsed TOML, elements of arrays included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {prefix} if prefix else set()
    for key, item in items:
        found |= paths(item, (*prefix, key))
    return found


text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=6)
scalars = st.integers(-99, 99) | st.booleans() | st.floats(allow_nan=False) | st.dates() | text
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))


@given(st.dictionaries(text, st.dictionaries(text, values, max_size=3), max_size=4))
def test_random_documents(data):
    """The paths are those that tomllib reads, and keys stand in the lines where they were written."""
    written = document(data)
    found = key_lines(written)
    assert set(found) == paths(tomllib.loads(written))
    lines = written.split("\n")
    for path, line in found.items():
        if len(path) == 2:
            assert tomllib.loads(lines[line - 1]) == {path[1]: data[path[0]][path[1]]}
