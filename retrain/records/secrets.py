"""Secrets, which must not get into a run directory: files, access keys, values of variables."""

import fnmatch
import os
import re
from pathlib import Path

# fmt: off
SECRET_NAMES = (
    "*.env", ".env*", "*.pem", "*.key", "*.p12", "*secret*", "*credential*", "cred.*", "creds*", "*passw*",
    "*token*.txt", ".netrc", "*id_rsa*", "*id_ed25519*",
)
# fmt: on
"""Files whose content never goes into a run directory."""
KEYS = re.compile(r"\b(?:sk|hf|gh[opsu]|glpat|xox[abp])[-_][A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b")
"""Access keys of common services."""
SECRET_VARIABLES = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)


def is_secret(name: str) -> bool:
    return any(fnmatch.fnmatch(Path(name).name.lower(), pattern) for pattern in SECRET_NAMES)


def without_keys(text: str) -> str:
    """Replace what looks like an access key, and the values of variables named as secrets."""
    values = {value for name, value in os.environ.items() if SECRET_VARIABLES.search(name) and len(value) >= 8}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "[key left out]")
    return KEYS.sub("[key left out]", text)
