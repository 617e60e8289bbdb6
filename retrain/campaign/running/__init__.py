"""Carry a plan out: who may, where, in which cohorts, and until when."""
