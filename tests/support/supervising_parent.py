"""`python -m tests.support.supervising_parent N`: supervises N scripted workers until killed."""

import asyncio
import sys

from worker.processes.spawn import ProcessSpec
from worker.processes.supervisor import SupervisedProcess


async def main(num_children: int) -> None:
    for number in range(num_children):
        spec = ProcessSpec(f"child-{number}", "tests.support.scripted_worker", ("stubborn",))
        SupervisedProcess(spec, lambda line: print(line, flush=True)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
