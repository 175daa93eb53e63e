"""Whether the user is logged in to W&B, as wandb finds it. Imports nothing of it."""

from __future__ import annotations

import netrc
import os
from configparser import ConfigParser
from configparser import Error as ConfigError
from pathlib import Path
from urllib.parse import urlsplit

HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # of W&B's own service, by version of wandb


def logged_in() -> bool:
    """Whether there is a login for the server in use: in the environment or in ~/.netrc. The key itself is not used."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")) or setting("api_key"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or setting("base_url") or "").netloc
    try:
        logins = netrc.netrc(_netrc_file())
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
    return any(logins.authenticators(name) is not None for name in ([host] if host and host not in HOSTS else HOSTS))


def setting(key: str) -> str | None:
    """A value of W&B's settings files: of the directory, else of the user. `wandb login` and `wandb offline` write them."""
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    for folder in (Path("wandb"), user):
        parser = ConfigParser(interpolation=None)
        try:
            parser.read(folder / "settings", encoding="utf-8")
        except (OSError, ConfigError, UnicodeDecodeError):
            continue
        if value := parser.get("default", key, fallback=None):
            return value
    return None


def _netrc_file() -> Path:
    if env_path := os.environ.get("NETRC"):
        return Path(env_path).expanduser()
    return next((file for name in ("~/.netrc", "~/_netrc") if (file := Path(name).expanduser()).exists()), Path("~/.netrc"))
