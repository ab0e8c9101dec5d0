"""Typed errors. Every error of graphkv is a `GraphKVError`; each message names the value, the limit and the way out."""


class GraphKVError(Exception):
    """Base class of every error that graphkv raises on purpose."""


class InvalidValue(GraphKVError, ValueError):
    """The caller's mistake, found before anything changed."""


class UnsupportedCombination(GraphKVError, ValueError):
    """Two options that cannot go together, refused at construction."""


class LibraryMissing(GraphKVError, ImportError):
    """A library whose kernels were chosen is not installed, or what is installed cannot do it. Nothing changed."""


class OutOfBlocks(GraphKVError):
    """A tier is short of blocks. Nothing changed; retry after steps retire, transfers end or sequences close.

    Attributes:
        needed: blocks that the refused call wanted in addition to those its rows hold.
        free: blocks that can be handed out now.
        retiring: blocks that become free when the steps in flight retire.
        evictable: cached blocks that could have been evicted for this call, besides the free ones.
        tier: 0 for the device, colder tiers from 1.
        group: the layer group that is short.
    """

    def __init__(
        self, needed: int, free: int, retiring: int = 0, evictable: int = 0, tier: int = 0, group: int = 0
    ) -> None:
        self.needed = needed
        self.free = free
        self.retiring = retiring
        self.evictable = evictable
        self.tier = tier
        self.group = group
        where = f" in tier {tier}" if tier else f" in layer group {group}" if group else ""
        cached = f", {evictable} evictable" if evictable else ""
        super().__init__(
            f"{needed} more blocks needed{where}, {free} free{cached} and {retiring} freed once the steps in flight "
            "retire; close a sequence, retire the steps in flight, or build the pools with more blocks"
        )


class OutOfRows(GraphKVError):
    """Every row is taken. Nothing changed; close a sequence or build with more rows."""

    def __init__(self, max_rows: int, retiring: int = 0) -> None:
        self.max_rows = max_rows
        self.retiring = retiring
        super().__init__(
            f"all {max_rows} rows are taken ({retiring} of them become free once the steps in flight retire); "
            "close a sequence, retire the steps in flight, or build with a larger max_rows"
        )


class NotReady(GraphKVError):
    """A sequence whose blocks are not all on the device was named where they must be. Nothing changed.

    Attributes:
        state: what it is: loading, suspending or suspended.
    """

    def __init__(self, what: str, state: str) -> None:
        self.state = str(state)
        way_out = "resume it first" if self.state == "suspended" else "leave it out until poll() or wait_ready() saw it"
        super().__init__(f"{what} is {self.state}, and only a ready sequence can be used; {way_out}")


class StaleFrame(GraphKVError):
    """The latch found another step's packet, or a torn one, in the frame; the step wrote nothing.

    Attributes:
        expected: the step number that the device was about to run.
        found: the step number in the packet's header (equal to `expected` when the packet was torn).
    """

    def __init__(self, expected: int, found: int) -> None:
        self.expected = expected
        self.found = found
        what = "a torn packet of that step" if expected == found else f"the packet of step {found}"
        super().__init__(
            f"the device expected the packet of step {expected} and found {what}; the step was a no-op and so is "
            "every step after it until the runtime is resynchronised with resync()"
        )


class DeviceFault(GraphKVError):
    """The device or its driver reported an error."""


class CudaUnavailable(DeviceFault):
    """No usable CUDA device, driver or NVRTC library in this process."""


class KernelCompileError(GraphKVError):
    """NVRTC refused a kernel source; the message holds its log."""


class OutOfMemory(GraphKVError):
    """The device or the host has no room for what was asked. Nothing changed; ask for less or free memory first."""


class TransferTimeout(GraphKVError):
    """A transfer between tiers did not end in the time allowed. It still owns its slots: nothing may reuse them.

    Attributes:
        ticket: the transfer's number.
        seconds: how long it has been under way.
    """

    def __init__(self, ticket: int, seconds: float, what: str) -> None:
        self.ticket = ticket
        self.seconds = seconds
        super().__init__(
            f"transfer {ticket} ({what}) has not ended after {seconds:.1f} s; its slots stay out of use until it does"
        )
