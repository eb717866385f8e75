"""How a level's nested tensors are stored once extracted: dense, bitmask or CSR (spec §9)."""

from typing import Literal, get_args

from elsa_format._layouts.base import Elements, Layout, Piece, TensorMask, part_name
from elsa_format._layouts.bitmask import Bitmask, BitmaskLayout
from elsa_format._layouts.csr import Csr, CsrLayout
from elsa_format._layouts.dense import Dense

LayoutName = Literal["dense", "bitmask", "csr"]
LAYOUT_NAMES: tuple[LayoutName, ...] = get_args(LayoutName)
LAYOUTS: dict[LayoutName, Layout] = {
    "dense": Dense(),
    "bitmask": BitmaskLayout(),
    "csr": CsrLayout(),
}

__all__ = [
    "LAYOUTS",
    "LAYOUT_NAMES",
    "Bitmask",
    "Csr",
    "Elements",
    "LayoutName",
    "Piece",
    "TensorMask",
    "part_name",
]
