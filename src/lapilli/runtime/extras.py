"""What is installed with an extra of the package, `pip install lapilli[NAME]`."""

from __future__ import annotations

from importlib.util import find_spec

from lapilli.errors import MissingExtraError


def require(extra: str, what: str, *packages: str) -> None:
    """Checks that packages can be imported.

    Args:
        extra: the extra that brings them.
        what: needs them; for the message.
        *packages: their names for `import`.

    Raises MissingExtraError, a LapilliError and an ImportError, which says what to install.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {' and '.join(missing)}, not installed here. Do: pip install 'lapilli[{extra}]'."
        )
