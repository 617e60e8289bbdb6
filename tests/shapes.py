"""Every call into ``retrain.maths`` checked against its annotations: shapes by jaxtyping, the rest by beartype."""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for type checkers


def check_maths() -> None:
    """From now on, modules of ``retrain.maths`` are imported with their annotations enforced; call it before any is."""
    install_import_hook("retrain.maths", "shapes.checked")
