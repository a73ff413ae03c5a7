"""gRPC's health service: whether the picker runs, and whether it can name an endpoint."""

from collections.abc import Callable

from tailrace.net.grpc import INVALID_ARGUMENT, NOT_FOUND, OK, RESOURCE_EXHAUSTED, GrpcCall
from tailrace.picker.messages import SERVICE

CHECK, WATCH = b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"
#: Services that are asked for: the process, and its ability to pick.
LIVENESS, READINESS = "liveness", "readiness"
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
#: Field 1 of both messages: the service's name, and its state.
_NAME_TAG, _STATE_TAG = 0x0A, 0x08
_LONGEST_NAME = 127
#: Largest message that is accepted, in bytes.
MAX_MESSAGE = 1024
#: Calls at once, most of them watchers.
MOST_CALLS = 10_000


class HealthService:
    """Answers health checks; :meth:`refresh` notifies watchers of changes."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._watching: dict[HealthCall, int] = {}  # each with the state that it was told
        self.calls: set[HealthCall] = set()
        """Calls in progress."""

    def state(self, service: str) -> int:
        """Return the state of a service; SERVICE_UNKNOWN: there is no such."""
        if service == LIVENESS:
            return _SERVING
        if service in ("", READINESS, SERVICE):
            return _SERVING if self._is_ready() else _NOT_SERVING
        return _UNKNOWN

    def begin(self, call: GrpcCall, path: bytes) -> None:
        """Begin with a call of either method."""
        if len(self.calls) >= MOST_CALLS:
            call.end(RESOURCE_EXHAUSTED, "too many health checks at once")
            return
        call.handler = begun = HealthCall(self, call, watches=path == WATCH)
        self.calls.add(begun)

    def watch(self, call: "HealthCall") -> None:
        """Tell a watcher the state now, and when it changes."""
        self._watching[call] = state = self.state(call.service)
        call.tell(state)

    def forget(self, call: "HealthCall") -> None:
        """A call is over."""
        self._watching.pop(call, None)
        self.calls.discard(call)

    def refresh(self) -> None:
        """Tell watchers what has changed; called a few times per second."""
        for call, told in tuple(self._watching.items()):
            state = self.state(call.service)
            if state != told:
                self._watching[call] = state
                call.tell(state)


class HealthCall:
    """A check, or a watcher."""

    def __init__(self, service: HealthService, call: GrpcCall, *, watches: bool) -> None:
        self._health = service
        self._call = call
        self._watches = watches
        self._asked = False
        self.service = ""

    def message(self, data: bytes) -> None:
        """Read the name of a service and answer."""
        self._asked = True
        name = _name_in(data)
        if name is None:
            self._end(INVALID_ARGUMENT, "not a HealthCheckRequest")
            return
        self.service = name
        if self._watches:
            self._health.watch(self)
            return
        state = self._health.state(name)
        if state == _UNKNOWN:
            self._end(NOT_FOUND, "unknown service")
            return
        self.tell(state)
        self._end()

    def tell(self, state: int) -> None:
        """Send a state."""
        self._call.write(bytes((_STATE_TAG, state)))

    def incomplete(self, size: int) -> bool:
        """Messages are short."""
        return size <= MAX_MESSAGE

    def half_closed(self) -> None:
        """A client sends one message only, and before this."""
        if not self._asked:
            self._end(INVALID_ARGUMENT, "no HealthCheckRequest")

    def gone(self) -> None:
        """Forget it."""
        self._health.forget(self)

    def _end(self, status: int = OK, why: str = "") -> None:
        self._health.forget(self)
        self._call.end(status, why)


def _name_in(data: bytes) -> str | None:
    """Return the service that a HealthCheckRequest names; None: it is no such message."""
    if not data:
        return ""
    named = len(data) >= 2 and data[0] == _NAME_TAG and data[1] <= _LONGEST_NAME
    if not named or data[1] != len(data) - 2:
        return None
    return data[2:].decode(errors="replace")
