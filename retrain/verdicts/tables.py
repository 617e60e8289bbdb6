"""Judge results of other tools: a table for each run becomes a ``RunResult``, and the rule compares the conditions."""

from collections.abc import Sequence

from retrain.config.comparing import Compare
from retrain.records.foreign.table import RunTable
from retrain.records.schema.base import Row
from retrain.verdicts.declaration import Standing

UNDECLARED = Standing(("nothing was declared before the results",))


def compare_tables(
    tables: Sequence[RunTable],
    compare: Compare,
    standing: Standing = UNDECLARED,
    *,
    tools: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Row:
    """Return the ``Comparison`` of the conditions as JSON.

    ``tools``: names of the tools that wrote the files; ``warnings`` come first among the warnings of the result. The
    key ``read`` has lines about what was read and which runs are missing. Raises UsageError for results that cannot be
    compared, with the line to type.
    """
    raise NotImplementedError
