"""Scripts that drive agent frameworks against a server, in an environment of their own.

    python -m tests.support.frameworks.NAME URL MODEL [--lenient]

Each prints a JSON object of what its cases returned. With --lenient, a model may answer anything:
what a framework says of an answer that it cannot use is a result too. An error of the server ends
the script in either case.
"""
