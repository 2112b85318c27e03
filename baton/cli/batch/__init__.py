"""The parts of `baton run-batch`: the input file, the output file, and the requests."""
