"""Network namespaces: an interface for each process, limited to the speed of a link (needs root)."""

from __future__ import annotations

import os
import subprocess

from torch_pi2.errors import Pi2Error

#: Of the interface in each namespace.
INTERFACE = "pi2"


class NetworkError(Pi2Error):
    """This machine cannot make network namespaces."""


class Network:
    """``ranks`` namespaces on one bridge, each of which sends ``mbit`` Mbit/s at most (None: as fast as it goes).
    Raises NetworkError: no permission, or no ``ip`` and ``tc``.
    """

    def __init__(self, ranks: int, mbit: float | None = None) -> None:
        self.ranks, self.mbit = ranks, mbit
        self._bridge = f"pi2b{os.getpid()}"[:15]

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def inside(self, rank: int) -> list[str]:
        """Prefix of a command that runs in a namespace."""
        return ["ip", "netns", "exec", self._name(rank)]

    @staticmethod
    def address(rank: int) -> str:
        """IP address of a namespace."""
        return f"10.77.0.{rank + 1}"

    def _name(self, rank: int) -> str:
        return f"pi2-{os.getpid()}-{rank}"

    def _outer(self, rank: int) -> str:
        return f"p{os.getpid()}r{rank}"[:15]

    def _make(self) -> None:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "link", "set", self._bridge, "up")
        for rank in range(self.ranks):
            name, outer = self._name(rank), self._outer(rank)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run("ip", "link", "set", outer, "master", self._bridge, "up")
            inside = self.inside(rank)
            _run(*inside, "ip", "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run(*inside, "ip", "link", "set", device, "up")
            if self.mbit is not None:
                # Larger bursts would hide the time of a layer's exchange.
                limit = ("rate", f"{self.mbit:g}mbit", "burst", "32kb", "latency", "50ms")
                _run(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)

    def _remove(self) -> None:
        for rank in range(self.ranks):  # the link first: it would outlive its namespace for a while
            subprocess.run(["ip", "link", "del", self._outer(rank)], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self._name(rank)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NetworkError(
            " ".join(command),
            expected="permission to make network namespaces, and the commands ip and tc",
            found=(getattr(error, "stderr", "") or str(error)).strip(),
            fix="Run it as root (apt install iproute2), or measure with --links none.",
        ) from error
