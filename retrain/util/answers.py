r"""Extract answers from completions and data columns, and compare them.

A completion's answer is its last ``\boxed{…}``, or its last line ``#### …`` if the problem's own solution has such a
line (as GSM8K's have). Every function is linear in the length of its text: a policy under optimisation may write 1 MB
of braces or of ``\boxed``, so nothing here backtracks, recurses or turns digits into numbers.
"""

import re
from collections import deque

MAX_ANSWER = 1000  # Characters; longer expressions are only compared as text, because parsers are slow
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace (as in \{1,2\}) does not nest
_NUMBER = re.compile(r"(?:(?<![0-9.)\]}])[-+])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_PLAIN_NUMBER = re.compile(r"([-+]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?)(?:\.([0-9]*))?")
_SPACING = re.compile(r"\s+|\\[,;:!> ]|~|\\q?quad(?![A-Za-z])")
_FINAL_LINE = re.compile(r"^####[ \t]*(.*)$", re.MULTILINE)
_MINUS_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-"})


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{…}`` (or ``\fbox{…}``), braces balanced; "" for an empty box.

    Only the last box counts: None without a box, or if the last one is not closed, as in a truncated completion.
    ``\boxed 5``, as some reference solutions write, gives "5".
    """
    boxes = deque(_BOX.finditer(text), maxlen=1)
    if not boxes:
        return None
    start = boxes[0].end()
    while start < len(text) and text[start].isspace():
        start += 1
    if start >= len(text):
        return None
    if text[start] != "{":
        return re.split(r"[\s$]", text[start:], maxsplit=1)[0].rstrip(".,")
    depth = 0
    for brace in _BRACE.finditer(text, start):
        if brace.group() == "{":
            depth += 1
        elif brace.group() == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : brace.start()]
    return None


def final_line(text: str) -> str | None:
    """Return the text after ``####`` (GSM8K's mark of an answer) in the last line that begins with it; None without
    such a line."""
    lines = deque(_FINAL_LINE.finditer(text), maxlen=1)
    return lines[0].group(1).strip() if lines else None


def last_number(text: str) -> str | None:
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return numbers[0].group() if numbers else None


def last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2].strip()


def reference_answer(text: str) -> str:
    r"""Return the answer in a data set's answer column.

    GSM8K's solutions end in a line ``#### 1,234``, which gives "1234" (commas between digits are removed). MATH's
    contain ``\boxed{…}``, which gives its contents. Any other text is the answer itself, stripped.
    """
    answer = final_line(text)
    if answer is not None:
        return answer.replace(",", "") if plain_number(answer) is not None else answer
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed.strip()


def plain_number(text: str) -> str | None:
    """Return the canonical spelling of a decimal number, or None: "+1,234.50" → "1234.5", "-0" → "0", ".5" → "0.5"."""
    number = _PLAIN_NUMBER.fullmatch(text.strip().translate(_MINUS_SIGNS))
    if number is None:
        return None
    sign, whole, fraction = number[1], number[2], number[3] or ""
    if not whole and not fraction:
        return None
    whole = whole.replace(",", "").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    digits = f"{whole}.{fraction}" if fraction else whole
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def normalise(answer: str) -> str:
    r"""Return the same spelling for answers that differ only in notation.

    Removed: spaces and LaTeX spacing, ``$`` and ``\$``, one final period, ``\left``/``\right``. ``\dfrac`` becomes
    ``\frac``, a number becomes its ``plain_number``. Letter case, units and commas between elements stay.
    """
    text = answer.translate(_MINUS_SIGNS)
    text = _SPACING.sub("", text.replace("\\$", "").replace("$", "").replace("{,}", ","))
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = text.removesuffix(".")
    number = plain_number(text)
    return text if number is None else number


def answer_text(completion: str, reference: str, solution: str, strict: bool = True) -> str | None:
    r"""Return the answer in a completion: its last ``\boxed{…}``, else its last line ``#### …`` if the problem's
    ``solution`` has such a line; else None.

    An unclosed box gives None, an empty box "". Without ``strict``, a completion without box or line gives its last
    number if the reference is a number, else its last line.
    """
    if _BOX.search(completion):
        return last_boxed(completion)
    by_final_line = final_line(solution) is not None
    marked = final_line(completion) if by_final_line else None
    if strict or marked is not None:
        return marked
    if plain_number(normalise(reference)) is not None:
        return last_number(completion)
    return last_line(completion)


def same_text(answer: str | None, reference: str) -> bool:
    """Return whether both are equal after ``normalise``; an empty text equals nothing."""
    if answer is None or len(answer) > 4 * len(reference) + 1000:  # too long: normalising removes fewer characters
        return False
    given = normalise(answer)
    return bool(given) and given == normalise(reference)


def verdict_by_text(reference: str, answer: str) -> bool | None:
    """Return whether two mathematical expressions are equal; None if only parsing them can decide."""
    if not answer.strip() or not reference.strip():
        return False
    if same_text(answer, reference):
        return True
    if len(answer) > MAX_ANSWER or len(reference) > MAX_ANSWER:
        return False
    numbers = plain_number(normalise(answer)), plain_number(normalise(reference))
    if None not in numbers and not any("." in str(number) for number in numbers):
        return False
    return None


def has_answer(answer: str | None) -> bool:
    return bool((answer or "").strip())
