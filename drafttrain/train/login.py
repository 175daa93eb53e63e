"""Whether the user is logged in to W&B. Imports nothing of it."""

from __future__ import annotations

import netrc
import os

HOST = "api.wandb.ai"


def logged_in() -> bool:
    """Whether there is a W&B key in the environment or in ~/.netrc. The key itself is not used."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(os.environ.get("WANDB_HOST", HOST)) is not None
    except (OSError, netrc.NetrcParseError):
        return False
