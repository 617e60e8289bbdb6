"""Tools that the policy may call during an episode."""
