"""Credit steps, one per file: they turn the rewards of groups into advantages and masks of tokens."""
