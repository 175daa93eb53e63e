"""A W&B run that ends no training: it waits for W&B for a bounded time, and says a failure in one line.

A run that cannot be started online is logged offline. A resumed training goes on in the same W&B run: online W&B continues it,
offline its files start again with all steps, because `wandb sync` does not join the files of one run.

Whether the user is logged in is found as wandb finds it (`logged_in`), without importing wandb.
"""

from __future__ import annotations

import netrc
import os
import secrets
import string
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from drafttrain.core.errors import one_line
from drafttrain.train import LoggerOptions

WANDB = "wandb"
ANSWER = 60.0  # seconds that a run waits for W&B at its start, and for each artifact that it uses
EARLIER = "earlier"  # next to a run's files: those of the same W&B run that later ones replace
OFFLINE = ("offline", "dryrun")

Say = Callable[[str], None]
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # of W&B's own service, by version of wandb


class WandbRun:
    """A W&B run. After a failure that ends it, calls do nothing.

    raw: wandb's run. say: prints a line. first: the first step that W&B does not have.
    """

    def __init__(self, raw: Any, say: Say, finish_timeout: float) -> None:
        self.raw, self.say, self.finish_timeout = raw, say, finish_timeout
        self.id = str(raw.id)
        self.first = int(raw.starting_step) if raw.resumed else 0
        self.files = Path(raw.dir).parent
        self._lost = self._said = False

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the figures of a step, unless W&B has them."""
        if step >= self.first:
            self.attempt("figures", lambda: self.raw.log(dict(values), step=step))

    def attempt(self, what: str, call: Callable[[], Any], seconds: float | None = None) -> None:
        """Call W&B. seconds: wait no longer than this. A failure is said, the first one only."""
        if self._lost:
            return
        try:
            call() if seconds is None else bounded(call, seconds)
        except Exception as error:  # W&B raises many kinds, and none of them may end a training
            if isinstance(error, ConnectionError):
                self._end()
            if not self._said:
                self.say(f"W&B does not get all {what} ({reason(error)}); the run's own files have them")
            self._said = True

    def finish(self, failed: bool) -> None:
        """End the run and wait for the uploads, no longer than `finish_timeout`. failed: W&B marks the run as failed."""
        if self._lost:
            return
        limit = self.finish_timeout + ANSWER if self.finish_timeout else None  # W&B keeps the first by itself
        try:
            bounded(lambda: self.raw.finish(exit_code=int(failed)), limit)
        except Exception as error:  # as above
            if isinstance(error, ConnectionError):
                self._end()
            cause = f"no answer for {self.finish_timeout:g} s" if isinstance(error, TimeoutError) else reason(error)
            self.say(f"W&B has not got all of the run ({cause}); send the rest later: {sync_command(self.files)}")
        else:
            if refused(self.files):
                self.say(f"W&B has refused a part of the run; send it again later: {sync_command(self.files)}")

    def _end(self) -> None:
        """W&B's own process is gone. Without this, wandb would print a traceback when Python ends."""
        import wandb

        self._lost = True
        with suppress(Exception):
            wandb.teardown()


def start(
    options: LoggerOptions,
    folder: Path,
    config: dict[str, Any],
    name: str,
    job: str,
    say: Say,
    resumed: str | None = None,
) -> WandbRun | None:
    """Start a W&B run with its files in `folder`; None without W&B. It never prompts.

    resumed: the id of the W&B run that goes on.
    """
    mode = options.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or setting("mode") or ("online" if logged_in() else "offline")
    if WANDB not in (options.name, *options.also) or mode == "disabled":
        return None
    import wandb

    requested_id = resumed or os.environ.get("WANDB_RUN_ID")

    def begin(mode: Any, run_id: str) -> Any:
        return wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group,
            job_type=job,
            name=name,
            id=run_id,
            resume="allow" if resumed and mode not in OFFLINE else None,
            dir=str(folder.absolute()),  # its own process may have been started in another folder
            config=config,
            mode=mode,
            settings=_settings(options),
        )

    try:
        try:
            if mode not in OFFLINE and not logged_in():
                raise wandb.errors.UsageError("not logged in; wandb login")
            raw = begin(mode, requested_id or _new_id())
        except Exception as error:  # W&B raises many kinds, and none of them may end a training
            if mode in OFFLINE:
                raise
            if requested_id is not None:
                bounded(wandb.teardown, ANSWER)  # its own process holds the id of the run that did not start
            raw = begin("offline", requested_id or _new_id())
            say(f"W&B: {reason(error)}; the run is logged offline, send it later: {sync_command(Path(raw.dir).parent)}")
    except Exception as error:  # as above
        say(f"W&B: {reason(error)}; this run is not logged there")
        return None
    run = WandbRun(raw, say, options.finish_timeout)
    _set_aside(run)
    return run


def bounded(call: Callable[[], Any], seconds: float | None) -> None:
    """Call in a thread. Raises what it raises, or TimeoutError after so many seconds; the thread then goes on alone."""
    outcome: SimpleQueue[Exception | None] = SimpleQueue()

    def work() -> None:
        try:
            call()
        except Exception as error:  # it is raised again below
            outcome.put(error)
        else:
            outcome.put(None)

    Thread(target=work, daemon=True).start()
    try:
        error = outcome.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer for {seconds:g} s") from None
    if error is not None:
        raise error


def reason(error: Exception) -> str:
    """The first line of W&B's message."""
    lines = str(error).strip().splitlines()
    return one_line(lines[0].rstrip(".")) if lines else type(error).__name__


def sync_command(files: Path) -> str:
    """The command that sends a run's files to W&B."""
    online = "" if files.name.startswith("offline-") else "--include-online "
    return f"wandb sync {online}{files}"


def refused(files: Path) -> bool:
    """Whether W&B's own log says that the server has refused the stream of figures."""
    try:
        return "filestream: fatal error" in (files / "logs" / "debug-internal.log").read_text(
            encoding="utf-8", errors="replace"
        )
    except OSError:
        return False


def _new_id() -> str:
    """A run's id in W&B's form."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def _settings(options: LoggerOptions) -> Any:
    """W&B's settings. Variables that the user has set stay, and older versions of wandb have fewer settings."""
    import wandb

    overrides: dict[str, Any] = {"silent": True, "console": "off"}
    for name, value in (("init_timeout", ANSWER), ("finish_timeout", options.finish_timeout), ("finish_timeout_raises", True)):
        if f"WANDB_{name.upper()}" not in os.environ and name in wandb.Settings.model_fields:
            overrides[name] = value
    return wandb.Settings(**overrides)


def _set_aside(run: WandbRun) -> None:
    """Move earlier files of the same W&B run away: `wandb sync` of these would put an older state in its place."""
    for files in run.files.parent.glob(f"*run-*-{run.id}"):
        if files.resolve() != run.files.resolve() and not files.is_symlink():
            (run.files.parent / EARLIER).mkdir(exist_ok=True)
            with suppress(OSError):
                files.rename(run.files.parent / EARLIER / files.name)


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
