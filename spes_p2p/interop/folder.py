"""A folder that a user asked for, which appears at once: filled under another name beside it, then renamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from spes_p2p.errors import ConfigError
from spes_p2p.files import whole_folder


@contextmanager
def filled_folder(target: Path) -> Iterator[Path]:
    """A folder to fill: becomes `target` when the block ends well, and vanishes if not.

    Raises ConfigError where there is something at `target` already, or where it cannot be made; StorageFull.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists", fix="choose another --output, or remove it")
    partial = target.with_name(f"{target.name}.partial")
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(whole_folder(target, partial))
        except OSError as error:
            raise ConfigError(
                f"{partial} cannot be created: {error.strerror}", fix="choose another --output"
            ) from error
        yield folder
