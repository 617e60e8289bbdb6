"""Credit steps, one per file: from the rewards of groups to what each token is trained with."""
