"""The files of run and campaign directories: their names (``layout``) and the types of their rows and objects."""
