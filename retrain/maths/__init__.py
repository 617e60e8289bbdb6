"""Pure functions: arrays or tensors in, arrays, tensors or numbers out; no configuration object, no files, no state.

``ratios`` importance ratios, their statistics and KL estimates · ``corrections`` of the mismatch between sampler and
trainer · ``distillation`` divergences from a teacher · ``squeeze`` spectra of LoRA updates · ``statistics`` intervals
and tests · ``intervals`` for few seeds · ``bounded`` score intervals of bounded means · ``crossed`` intervals over
seeds and problems · ``backpressure`` the Universal Scalability Law. Import the module you need; this package imports
none of them, so that asking for one does not load the others.
"""
