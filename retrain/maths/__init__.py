"""The algorithms as pure functions: tensors in, tensors out, no configuration object, no files, no state.

``advantages`` one number per completion · ``credit`` one number per token · ``planning`` which tokens plan ·
``losses`` policy losses and their denominators · ``schedules`` learning rate and SEPA λ · ``squeeze`` spectra of LoRA
updates · ``statistics`` intervals and tests · ``intervals`` for few seeds · ``sequential`` early stopping ·
``backpressure`` the Universal Scalability Law. Import the module you
need; this package imports none of them, so that asking for one does not load the others.
"""
