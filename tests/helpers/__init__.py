"""What several folders of tests build their cases with."""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for type checkers


def check_maths() -> None:
    """Enforce the annotations of ``retrain.maths``, shapes by jaxtyping; call it before any of it is imported."""
    install_import_hook("retrain.maths", "helpers.checked")
