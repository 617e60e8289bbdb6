"""Checks that retrain computes correctly on this machine and that servers sample what is trained here."""
