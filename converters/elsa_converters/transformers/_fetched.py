"""Model directories that hold delivery files, which transformers does not look for.

It has no plug-in for where weights are, so the function that looks for them is wrapped. The wrapper
acts only where that function has failed.
"""

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from transformers import modeling_utils

from elsa_format import InvalidOption
from elsa_format.plugins import weights_file

EXTRACT: ContextVar[WeakMethod[Callable[[Path], str]]] = ContextVar("EXTRACT")
"""Extracts the level that the `ElsaConfig` of a call of `from_pretrained` names."""


def load_fetched_directories() -> None:
    """Let `from_pretrained` take delivery files where it finds nothing else."""
    plain = modeling_utils._get_resolved_checkpoint_files

    @functools.wraps(plain)
    def resolve(**named: Any) -> Any:
        try:
            return plain(**named)
        except OSError:
            found = _delivery(**named)
            if found is None:
                raise
        if (named.get("user_agent") or {}).get("quant") == "elsa":
            extract = EXTRACT.get()()
            assert extract is not None, "from_pretrained has it"
            return [extract(found)], None
        raise InvalidOption(
            f"{found}: is a delivery file; import elsa_converters.transformers and give "
            "from_pretrained quantization_config=ElsaConfig(level=N), or run: "
            f"elsa-extract {found.parent} --level N -o OUT"
        )

    modeling_utils._get_resolved_checkpoint_files = resolve


def _delivery(
    pretrained_model_name_or_path: str | os.PathLike[str] | None = None,
    variant: str | None = None,
    download_kwargs: Any = None,
    **_: Any,
) -> Path | None:
    """The delivery file, or the index of several, in the directory that is meant."""
    subfolder = (download_kwargs or {}).get("subfolder") or ""
    folder = Path(pretrained_model_name_or_path or "", subfolder)
    if not folder.is_dir():
        return None
    try:
        found = Path(weights_file(folder))
    except (InvalidOption, OSError):
        return None
    wanted = {"ship", variant or "ship"}  # as elsa-ship and elsa-fetch name them
    return found if wanted <= set(found.name.split(".")) else None
