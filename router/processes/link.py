"""`ProcessLink`: what a process of a router has in common with the others."""

from router.processes.other_processes import OtherProcesses
from router.processes.place import ProcessPlace
from router.processes.process_server import MetricsServicer, ProcessServer, ProcessServicer
from router.processes.shared_counts import SharedAccounts
from router.registration_servicer import RegistrationServicer

__all__ = ["ProcessLink"]


class ProcessLink:
    """Connects a process with the others of its router.

    Args:
        place: of this process.

    Attributes:
        accounts: the use of limits, which all count together.
        others: asks them.

    Raises:
        OSError: the files that they share cannot be opened.
    """

    def __init__(self, place: ProcessPlace) -> None:
        self._place = place
        self._server: ProcessServer | None = None
        self.accounts = SharedAccounts(place)
        self.others = OtherProcesses(place)

    async def start(
        self,
        metrics: MetricsServicer,
        process: ProcessServicer,
        registration: RegistrationServicer | None,
    ) -> None:
        """Begins to answer the others, which shows the parent that this process listens.

        Raises:
            ConfigurationError: the socket cannot be made.
        """
        self._server = ProcessServer(self._place.target, metrics, process, registration)
        await self._server.start()

    async def close(self) -> None:
        """Ends the connections, and gives back what this process counts as running."""
        if self._server is not None:
            await self._server.stop()
        await self.others.close()
        self.accounts.close()
