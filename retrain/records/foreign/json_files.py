"""Read JSON documents of other tools, and the aliases of the metrics in them."""

from collections.abc import Callable, Collection
from pathlib import Path

from retrain.errors import NotReadable, UsageError
from retrain.files import read_json
from retrain.records.schema.base import Row

FIRST_BYTES = 4096


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, without a byte-order mark; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(FIRST_BYTES).removeprefix(b"\xef\xbb\xbf")
    except OSError:
        return b""


def json_object(path: Path) -> Row:
    try:
        content = read_json(path)
    except OSError as error:
        raise NotReadable(path, error) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a JSON object")
    return content


def names_in_rows(
    names: Collection[str], requested: str | None, aliases: Callable[[str], Collection[str]], place: object
) -> dict[str, str]:
    """Return the metrics to be read, with their names in the rows. ``requested`` is a metric's name, or an alias, which
    then is the name in the rows. Raises UsageError for an alias of several metrics; ``place`` names the file."""
    if requested is None or requested in names:
        return {name: name for name in names if requested in (None, name)}
    meant = [name for name in names if requested in aliases(name)]
    if len(meant) > 1:
        raise UsageError(f'{place}: "{requested}" may be {" or ".join(meant)}; name one, such as --metric "{meant[0]}"')
    return dict.fromkeys(meant, requested)
