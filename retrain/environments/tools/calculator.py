"""Compute exactly with integers, fractions and decimals, with bounds on the cost of an expression."""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from retrain.environments.tools import ToolError

MAX_CHARACTERS = 2000
MAX_DIGITS = 1000  # Digits of a whole number, numerator or denominator
MAX_DECIMALS = 30  # Decimal places up to which a number is written in full
ROUNDED = Context(prec=15)
TYPED = str.maketrans({"×": "*", "÷": "/", "−": "-"})
# 12,345 and 1,234,567.8; there is no other use of a comma, so that 1,5 or 1,2345 is an error rather than a guess.
THOUSANDS = re.compile(r"(?<![\d.,_])\d{1,3}(?:,\d{3})+(?![\d,_])")
FOREIGN = re.compile(r"[^\d.eE_+\-*/%() ]", re.ASCII)
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
WRITE = "write numbers, + - * / // (whole part) % (remainder) ** (power) and brackets, as in (3 + 4.5) * 2"
HINTS = {
    "^": "write ** for a power",
    ",": "write thousands as 12,345 or 12345, and decimals with a point",
    "=": "write the expression alone, without an equals sign",
}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression exactly, with + - * / // % ** and brackets.

    Args:
        expression: The expression, such as (3 + 4.5) * 2 ** 10
    """
    text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), " ".join(expression.split()).translate(TYPED))
    if len(text) > MAX_CHARACTERS:
        raise ToolError(f"the expression has more than {MAX_CHARACTERS} characters; work it out in parts")
    if not text:
        raise ToolError(f"the expression is empty; {WRITE}")
    if foreign := FOREIGN.search(text):
        raise ToolError(f"{foreign[0]!r} is not part of arithmetic; {HINTS.get(foreign[0], WRITE)}")
    try:
        return _formatted(_value(ast.parse(text, mode="eval").body, text))
    except SyntaxError as error:
        raise ToolError(f"the expression cannot be read ({error.msg}); {WRITE}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (RecursionError, MemoryError):
        raise ToolError("the expression has too many parts; work it out in several calls") from None


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            return _bounded(_number(ast.get_source_segment(text, node) or ""))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, text)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, text)
        case ast.BinOp(op=ast.Pow()):
            return _bounded(_power(_value(node.left, text), _value(node.right, text)))
        case ast.BinOp():
            left, right = _value(node.left, text), _value(node.right, text)
            return _bounded(Fraction(OPERATIONS[type(node.op)](left, right)))
        case ast.Call():
            raise ToolError("something stands right before a bracket; write * between factors, as in 2 * (3 + 4)")
    raise ToolError(f"the expression cannot be read; {WRITE}")


def _number(literal: str) -> Fraction:
    """Return a number exactly as written: 0.1 is one tenth, not the nearest float."""
    exponent = literal.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > MAX_DIGITS:
        raise _too_large()
    return Fraction(literal.replace("_", ""))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("an exponent is not a whole number; only whole exponents can be worked out exactly")
    if base in (-1, 0, 1):  # only sign and parity of the exponent matter, however long it is
        return base ** int((2 - exponent % 2) * ((exponent > 0) - (exponent < 0)))
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > 4 * MAX_DIGITS:
        raise _too_large()  # log2(10) = 3.32; the exact bound follows in _bounded
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    limit = 10**MAX_DIGITS
    if abs(value.numerator) >= limit or value.denominator >= limit:
        raise _too_large()
    return value


def _too_large() -> ToolError:
    return ToolError(f"the result, or a part of it, has more than {MAX_DIGITS} digits")


def _formatted(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**MAX_DECIMALS
    if scaled.denominator == 1:
        digits = str(abs(scaled.numerator)).rjust(MAX_DECIMALS + 1, "0")
        decimals = digits[-MAX_DECIMALS:].rstrip("0")
        return f"{'-' if value < 0 else ''}{digits[:-MAX_DECIMALS]}.{decimals}"
    rounded = ROUNDED.divide(Decimal(value.numerator), Decimal(value.denominator))
    fraction = f"{value.numerator}/{value.denominator}"
    return f"{fraction} ≈ {rounded}" if len(fraction) <= 40 else f"≈ {rounded}"
