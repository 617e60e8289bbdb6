"""What it needs is not installed."""

import absent_package  # noqa: F401
