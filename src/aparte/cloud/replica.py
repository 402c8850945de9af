"""Replicas of the server on Ray Serve: one machine or many, as many as the queue asks for.

Ray Serve starts replicas, watches them and starts others in the place of those that die. Its proxy speaks
HTTP and WebSocket, and gives a connection to the replica with the fewer ones; there it stays. In a replica
runs what runs in ``aparte serve``: :class:`~aparte.cloud.server.MiddleServer`, behind
:class:`~aparte.cloud.asgi.AsgiApp`. Replicas share nothing. A device whose replica dies connects again,
to another one, which does not know its session, and prefills; that is :mod:`aparte.recovery`'s business.

Messages of a device pass between proxy and replica as bytes in Ray's own envelopes. Ray pickles those; they
come from and go to processes of this server only.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aparte.cloud import capacity
from aparte.cloud.capacity import Replicas
from aparte.cloud.keys import Keyring
from aparte.cloud.serving import Served
from aparte.errors import AparteError, UserError

#: The names that Ray Serve shows.
APP, DEPLOYMENT = "aparte", "middle"
#: The largest message that Ray Serve's proxy takes: what its HTTP server takes unless told otherwise.
PROXY_MESSAGE_BYTES = 16 * 1024 * 1024
#: Connections beyond the sessions, for health checks and for telling a device that all is taken.
SPARE_CONNECTIONS = 16
#: How lines begin that our own log wrote.
_OURS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
#: How long a replica that has to go lets its sessions be.
FAREWELL_S = 2.0


@dataclass(frozen=True)
class Address:
    """Where the proxy listens."""

    host: str
    port: int
    cert: Path | None = None
    key: Path | None = None


class Replica:
    """One replica: the server without a socket."""

    def __init__(self, served: Served, keys: Keyring | None) -> None:
        from aparte.cloud import journal
        from aparte.cloud.server import MiddleServer, compute_thread

        _stay_home()
        journal.set_up()
        worker = compute_thread()
        self._server = MiddleServer(worker.submit(served.load).result(), worker=worker, keys=keys)

    def __serve_build_asgi_app__(self) -> Any:  # what Ray Serve asks for, when the rest is there
        from aparte.cloud.asgi import AsgiApp

        return AsgiApp(self._server)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What :func:`~aparte.cloud.capacity.wanted_replicas` decides by."""
        server = self._server
        return capacity.needs(server.steps_in_hand, server.session_count, server.engine.limits.max_sessions)


def require_ray() -> None:
    """Raises :class:`UserError` where it is not installed."""
    _settle()
    try:
        import ray.serve  # noqa: F401
    except ImportError:
        raise UserError("--ray needs Ray Serve. Install it with: pip install 'aparte[ray]'") from None


def start(served: Served, keys: Keyring | None, replicas: Replicas, address: Address) -> int:
    """Run the replicas and the proxy; returns when they answer, with their number.

    On the cluster that ``RAY_ADDRESS`` names, or on one of our own on this machine, which listens on loopback
    and ends with us.
    """
    require_ray()
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    ours = "RAY_ADDRESS" not in os.environ
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(
            address="local" if ours else None,
            include_dashboard=False if ours else None,
            configure_logging=True,
            logging_level=logging.WARNING,
        )
    except Exception as error:  # of many kinds
        where = "on this machine" if ours else f"at RAY_ADDRESS={os.environ['RAY_ADDRESS']}"
        raise AparteError(f"Ray could not be reached {where}: {_first_line(error)}") from error
    _relay_logs()
    if _is_serving():
        raise UserError(
            "Ray Serve runs on this cluster already, at an address of its own. Stop it there with "
            "`serve shutdown`, or use another cluster."
        )
    options = {"host": address.host, "port": address.port}
    if address.cert is not None:
        options |= {"ssl_certfile": str(address.cert), "ssl_keyfile": str(address.key)}
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    room = _room(served)
    most = replicas.most or max(2, room)
    least = min(replicas.least, most)
    scaling: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scaling = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "look_back_period_s": capacity.LOOK_BACK_S,
                "upscale_delay_s": capacity.UP_AFTER_S,
                "downscale_delay_s": capacity.DOWN_AFTER_S,
                "policy": {"policy_function": capacity.wanted_replicas},
            }
        }
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=DEPLOYMENT,
        ray_actor_options=_resources(served, most),
        max_ongoing_requests=served.limits.max_sessions + SPARE_CONNECTIONS,
        graceful_shutdown_wait_loop_s=FAREWELL_S / 4,
        graceful_shutdown_timeout_s=FAREWELL_S,
        logging_config=quiet,
        **scaling,
    )
    try:
        serve.start(proxy_location="EveryNode", http_options=options, logging_config=quiet)
        serve.run(deployment.bind(served, keys), name=APP, route_prefix="/", logging_config=quiet)
    except Exception as error:
        raise AparteError(f"The replicas did not start: {_first_line(error)}") from error
    return least


def stop() -> None:
    """End what :func:`start` began."""
    import ray
    from ray import serve

    if ray.is_initialized():
        serve.shutdown()
        ray.shutdown()


def _settle() -> None:
    """Settings of Ray that it reads when it is imported: nothing is reported, and nobody else is let in."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if "RAY_ADDRESS" in os.environ:
        return
    # A cluster of one machine talks over loopback only. (The name is from where that is the default.)
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Its processes know each other by a token that nobody else on this machine has, and that is kept nowhere.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _relay_logs() -> None:
    """Print what replicas log, and nothing else of Ray's many processes; that stays in Ray's own files."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("ray_print_logs", _print_log)


def _print_log(data: dict[str, Any]) -> None:
    if not str(data.get("actor_name")).startswith(f"ServeReplica:{APP}:"):
        return
    for line in data["lines"]:
        if line.startswith("{"):  # one JSON object, as it is
            print(line, file=sys.stderr, flush=True)  # noqa: T201
        elif _OURS.match(line):
            print(f"{line} [replica {data['pid']}]", file=sys.stderr, flush=True)  # noqa: T201


def _stay_home() -> None:
    """Keep the port on which replicas talk among themselves to loopback, on a cluster of one machine.

    Ray Serve opens it in every replica, on all interfaces. It asks for the cluster's token, and nobody uses
    it here; but what nobody has to reach should not be reachable.
    """
    from ray.serve._private import replica

    if os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0" and hasattr(
        replica, "add_port_to_grpc_server"
    ):
        add = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, _address: add(server, "127.0.0.1:0")


def _is_serving() -> bool:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _on_cuda(served: Served) -> bool:
    import ray

    wanted = served.compute.device
    return wanted.startswith("cuda") or (wanted == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def _room(served: Served) -> int:
    """Replicas that the cluster, as it is now, has room for: one per GPU or group of them, or per machine."""
    import ray

    if _on_cuda(served):
        return int(ray.cluster_resources().get("GPU", 0)) // served.ranks
    return sum(bool(node["Alive"]) for node in ray.nodes())


def _resources(served: Served, most: int) -> dict[str, float]:
    """What a replica reserves. On CPUs the cluster's cores are divided among the most that there will be."""
    import ray

    if _on_cuda(served):
        return {"num_gpus": served.ranks, "num_cpus": 1}
    cores = int(ray.cluster_resources().get("CPU", 1))
    return {"num_cpus": cores // most if cores >= most else cores / most}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
