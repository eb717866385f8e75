"""How a level's nested tensors are stored once extracted: dense, bitmask or CSR (spec §9)."""

from typing import Literal, get_args

from elsa_format._layouts.base import Elements, Form, Nested, Piece, part_name
from elsa_format._layouts.bitmask import Bitmask, BitmaskForm
from elsa_format._layouts.csr import Csr, CsrForm
from elsa_format._layouts.dense import Dense

Layout = Literal["dense", "bitmask", "csr"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
FORMS: dict[Layout, Form] = {"dense": Dense(), "bitmask": BitmaskForm(), "csr": CsrForm()}

__all__ = [
    "FORMS",
    "LAYOUTS",
    "Bitmask",
    "Csr",
    "Elements",
    "Layout",
    "Nested",
    "Piece",
    "part_name",
]
