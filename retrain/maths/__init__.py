"""Formulas as pure functions: arrays or tensors in and out, no configuration, no files, no state.

This package imports none of its modules, so that importing one does not load the others.
"""
