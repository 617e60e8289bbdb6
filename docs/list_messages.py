"""Write every error, warning, finding and console line of the program with its place, for review on one page.

    python docs/list_messages.py docs/records/messages.md

A message is the text given to an error, to ``ConfigIssue``, or to one of ``SPEAKERS``, also by a variable that the same
function assigned. Values stand as ``{expression}``.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPEAKERS = {"ConfigIssue", "NotOurs", "RunFailed", "LeaseLost", "DeviceLost", "RankLost", "ServerFailed", "WorkersLost",
            "NonFinite", "Interrupted", "MissingExtra", "PluginMissing", "NotReadable", "BadParameter",
            "warn", "warning", "note", "say", "echo", "print", "print_line", "line",
            "no_effect", "_refuse", "_fail", "refuse_given"}  # fmt: skip


def messages(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (function, kind, text) in the order of the file."""
    yield from _inside(ast.parse(path.read_text(encoding="utf-8")), "", {})


def _inside(node: ast.AST, place: str, texts: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _inside(child, f"{place}.{child.name}".lstrip("."), {})
            continue
        if isinstance(child, ast.Assign):
            target, value = child.targets[0], child.value
            is_pair = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for name, of_name in zip(target.elts, value.elts, strict=True) if is_pair else [(target, value)]:
                if isinstance(name, ast.Name):
                    texts[name.id] = _text(of_name, texts)
        if isinstance(child, ast.AugAssign) and isinstance(child.target, ast.Name):
            texts[child.target.id] = texts.get(child.target.id, "") + _text(child.value, texts)
        if isinstance(child, ast.Call):
            kind = getattr(child.func, "id", None) or getattr(child.func, "attr", "")
            if kind in SPEAKERS or kind.endswith("Error"):
                words = [_text(argument, texts) for argument in child.args]
                if text := "; ".join(word for word in words if " " in word):
                    yield place, kind, text
                continue
        yield from _inside(child, place, texts)


def _text(node: ast.expr, texts: dict[str, str]) -> str:
    """Return the text of an expression; "" where it is none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(_text(part, texts) for part in node.values)
        case ast.FormattedValue():
            return f"{{{ast.unparse(node.value)}}}"
        case ast.BinOp(op=ast.Add()):
            return _text(node.left, texts) + _text(node.right, texts)
        case ast.IfExp():
            return " / ".join(filter(None, (_text(node.body, texts), _text(node.orelse, texts))))
        case ast.Name():
            return texts.get(node.id, "")
    return ""


def page() -> str:
    lines = [
        "# Messages",
        "",
        "Written by `make docs`: every error, warning, finding and console line, for review.",
        "",
    ]
    for path in sorted((ROOT / "retrain").rglob("*.py")):
        found = list(messages(path))
        if found:
            lines += [f"## {path.relative_to(ROOT)}", ""]
            lines += [f"- `{place or 'module'}` {kind}: `{' '.join(text.replace('`', chr(39)).split())}`"
                      for place, kind, text in found]  # fmt: skip
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
