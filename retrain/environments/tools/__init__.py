"""Tools that a language model may call, as typed Python functions and classes."""
