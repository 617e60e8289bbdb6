"""What the policy acts in: the protocol, and problems with one answer each."""
