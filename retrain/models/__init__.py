"""Models on this machine: bundled ones, checks of model directories, and sizes of models in memory."""
