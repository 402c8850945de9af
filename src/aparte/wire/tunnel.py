"""Connections through an SSH server, with the user's own keys, agent, configuration and known hosts.

Nothing listens on this machine: each connection is one end of a pair of sockets, and the other end is copied
to a channel of the SSH connection. So no other user of this machine can use the tunnel, and there is no port
to choose. One SSH connection serves all connections to the same account. It is opened when it is needed and
again after it was lost; it closes some seconds after the last use, and with the program.

The rented machine is not trusted: no agent and no display are forwarded to it, no shell is started there, no
password is sent, and a host key that is not among the known hosts ends the attempt before any key is offered.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aparte.address import format_address
from aparte.errors import AparteError, DoorError, LinkError, UserError
from aparte.wire.link import printable
from aparte.wire.ssh_address import Account

if TYPE_CHECKING:
    import asyncssh

T = TypeVar("T")

#: A connection that nobody uses is kept so long: reconnecting costs many round trips.
IDLE_S = 10.0
KEEPALIVE_S = 15.0
_PIECE = 1 << 16


class Tunnel:
    """The SSH connection to one account, as often as it takes."""

    def __init__(self, account: Account) -> None:
        self.account = account
        #: Seconds that the last SSH connection took to be set up, logging in included.
        self.setup_s = 0.0
        #: Where the SSH server was reached, if it was over a connection of our own.
        self.peer: tuple[str, int] | None = None
        self._connection: asyncssh.SSHClientConnection | None = None
        self._opening: asyncio.Lock | None = None
        self._users = 0
        self._carrying: set[asyncio.Task[None]] = set()

    def dial(self, to: tuple[str, int], timeout_s: float) -> socket.socket:
        """A connection to ``to`` as the SSH server sees it.

        Raises :class:`LinkError` for what may be otherwise the next time, :class:`DoorError` where the
        SSH server's key or ours is not accepted, :class:`UserError` for settings that cannot be used.
        """
        return _run(self._dial(to), timeout_s, self)

    def close(self) -> None:
        """End the SSH connection and what goes through it."""
        with contextlib.suppress(LinkError):
            _run(self._hang_up(), 2.0, self)

    async def _dial(self, to: tuple[str, int]) -> socket.socket:
        import asyncssh

        connection = await self._connected()
        try:
            far = await connection.open_connection(*to, encoding=None)
        except asyncssh.ChannelOpenError as error:
            raise self._refused(error, to) from None
        except (OSError, asyncssh.Error) as error:
            self.forget()
            raise LinkError(f"The SSH connection to {self.account} was lost ({_reason(error)}).") from None
        except asyncio.CancelledError:
            self.forget()  # it may be dead without knowing
            raise
        ours, theirs = socket.socketpair()
        near = await asyncio.open_unix_connection(sock=ours)
        self._users += 1
        task = asyncio.ensure_future(self._carry(near, far))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        return theirs

    async def _connected(self) -> asyncssh.SSHClientConnection:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._connection is None or self._connection.is_closed():
                started = time.perf_counter()
                self._connection = await _log_in(self.account)
                self.setup_s = time.perf_counter() - started
                peer = self._connection.get_extra_info("peername")
                self.peer = (str(peer[0]), int(peer[1])) if peer else None
            return self._connection

    async def _carry(self, near: Any, far: Any) -> None:
        """Copy both ways until both are at their end, or one is broken."""
        import asyncssh

        try:
            await asyncio.gather(_copy(near[0], far[1]), _copy(far[0], near[1]))
        except (OSError, asyncssh.Error):
            pass  # whoever reads sees the end of it
        finally:
            for writer in (near[1], far[1]):
                with contextlib.suppress(OSError, asyncssh.Error):
                    writer.close()
            self._users -= 1
            if not self._users:
                asyncio.get_running_loop().call_later(IDLE_S, self._rest)

    def _rest(self) -> None:
        if not self._users and self._connection is not None:
            self._connection.close()

    def forget(self) -> None:
        """Let the next one connect anew."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    async def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            await self._connection.wait_closed()

    def _refused(self, error: asyncssh.ChannelOpenError, to: tuple[str, int]) -> AparteError:
        import asyncssh

        where = format_address(to)
        if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
            return DoorError(
                f"The SSH server at {self.account.host} does not allow a tunnel to {where} "
                f"({printable(error.reason)}). It needs AllowTcpForwarding; or use a direct port."
            )
        return LinkError(
            f"SSH reaches {self.account.host}, and nothing listens there on {where} "
            f"({printable(error.reason)}). Is `aparte serve` running on it, with this --port?"
        )


async def _copy(source: Any, sink: Any) -> None:
    while data := await source.read(_PIECE):
        sink.write(data)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()


async def _log_in(account: Account) -> asyncssh.SSHClientConnection:
    import asyncssh

    shown: list[tuple[str, str, int, asyncssh.SSHKey]] = []

    class Client(asyncssh.SSHClient):
        """Is asked about host keys that are not among the known ones."""

        def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
            shown.append((host, addr, port, key))
            return False

    given = {"username": account.user, "port": account.port}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings |= {
        "password_auth": False,
        "kbdint_auth": False,
        "gss_auth": False,
        "gss_kex": False,
        "agent_forwarding": False,
        "x11_forwarding": False,
        "compression_algs": None,  # hidden states don't compress
        "keepalive_interval": KEEPALIVE_S,
    }
    try:
        chosen = asyncssh.SSHClientConnectionOptions(host=account.host, config=(), **settings)
        known = _known_hosts(chosen.known_hosts)
        # An empty list would be replaced by the usual file.
        settings |= {"client_factory": Client, "known_hosts": known or asyncssh.import_known_hosts("")}
        try:
            return await asyncssh.connect(account.host, **settings)
        except (asyncssh.KeyExchangeFailed, asyncssh.ConnectionLost, ConnectionResetError):
            # Asked for keys of the known kinds only, a server with a new one hangs up, in one of these ways.
            # Now it shows it.
            return await asyncssh.connect(account.host, server_host_key_algs="default", **settings)
    except asyncssh.HostKeyNotVerifiable as error:
        raise _not_known(account, known, shown, error) from None
    except asyncssh.KeyExchangeFailed as error:
        raise DoorError(
            f"{account.host} and this device agree on no way to begin SSH ({printable(error.reason)}). "
            f"See what `ssh {account}` says."
        ) from None
    except asyncssh.PermissionDenied:
        raise DoorError(
            f"{account.host} accepts none of your SSH keys for this user. Try `ssh {account}`: it has to "
            "work without a password. Keys with a passphrase have to be in an agent (ssh-add)."
        ) from None
    except (asyncssh.ConfigParseError, asyncssh.KeyImportError) as error:
        raise UserError(f"Your SSH configuration cannot be used: {printable(str(error))}.") from None
    except (OSError, asyncssh.Error) as error:
        raise LinkError(
            f"No SSH connection to {account.host} came about ({_reason(error)}). Does `ssh {account}` work?"
        ) from None
    except ValueError as error:  # of a known hosts file, or of a name
        raise UserError(f"SSH cannot use what it was given: {printable(str(error))}.") from None


def _known_hosts(named: Any) -> list[str]:
    """The files that are there. ``None``, where the configuration names none, must not mean that every
    key is trusted, as it does to the library."""
    if named is None:
        return []
    files = list(named) or ["~/.ssh/known_hosts"]
    return [str(file) for name in files if (file := Path(name).expanduser()).is_file()]


def _not_known(
    account: Account, known: list[str], shown: Any, error: asyncssh.HostKeyNotVerifiable
) -> DoorError:
    import asyncssh

    if not shown:  # a certificate, or a revoked key
        return DoorError(f"The SSH key of {account.host} is not to be trusted: {printable(error.reason)}.")
    host, address, port, key = shown[-1]
    print_ = f"{key.get_algorithm()}, {key.get_fingerprint()}"
    name = host if port == 22 else f"[{host}]:{port}"
    others = asyncssh.match_known_hosts(known, host, address, port if port != 22 else None) if known else ()
    if others and others[0]:
        return DoorError(
            f"{account.host} shows another SSH key than the known one ({print_}). If the machine was rented "
            "anew and the provider shows this key, forget the old one with "
            f"`ssh-keygen -R '{name}'`; if not, somebody is in between."
        )
    return DoorError(
        f"The SSH key of {account.host} is not known yet ({print_}). Compare it with what the provider "
        f"shows, then connect once with `ssh {account}`, which asks and remembers it."
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return printable(error.strerror or str(error)) or type(error).__name__
    return printable(str(getattr(error, "reason", "") or error)) or type(error).__name__


# -- All tunnels of the program ------------------------------------------------------------------------

_lock = threading.Lock()
_tunnels: dict[Account, Tunnel] = {}
_loop: asyncio.AbstractEventLoop | None = None


def tunnel_to(account: Account) -> Tunnel:
    """The program's tunnel to ``account``. Nothing is connected before it is needed."""
    with _lock:
        return _tunnels.setdefault(account, Tunnel(account))


def _run(work: Coroutine[Any, Any, T], timeout_s: float, tunnel: Tunnel) -> T:
    """Do ``work`` on the tunnels' own thread."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ssh", daemon=True).start()
            atexit.register(_end)
    future = asyncio.run_coroutine_threadsafe(work, _loop)
    try:
        return future.result(timeout_s)
    except concurrent.futures.TimeoutError:
        if not future.cancel():  # it came at the last moment
            return future.result()
        raise LinkError(
            f"SSH to {tunnel.account.host} did not come about within {timeout_s:g} s. "
            "Check the address and the firewall."
        ) from None
    except BaseException:
        future.cancel()
        raise


def _end() -> None:
    """Say goodbye to the SSH servers as the program ends."""
    for tunnel in list(_tunnels.values()):
        tunnel.close()
