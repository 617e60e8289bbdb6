"""The base of all records with a declared type: dataclasses whose fields are the keys of a JSON object, in order."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from retrain.util.jsonl import Row as Row

# A read-only ``Row``
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """A row or an object in a file. The text in a field's annotation is the field's description in the docs."""

    # Fields that ``to_row`` leaves out if they are empty
    omitted_if_empty: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def field_names(cls) -> list[str]:
        return [field.name for field in fields(cls)]

    def to_row(self) -> Row:
        """Return the fields as a JSON object; values are not copied."""
        values = ((name, getattr(self, name)) for name in self.field_names())
        return {name: value for name, value in values if name not in self.omitted_if_empty or value}

    @classmethod
    def from_row(cls, row: Values) -> Self:
        """Return the record with the values of ``row``, ignoring keys that the class does not declare. Raises TypeError
        if a key without a default is missing."""
        return cls(**{name: row[name] for name in cls.field_names() if name in row})
