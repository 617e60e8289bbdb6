"""Algorithms: from rewards to what each token is trained with."""
