"""The lowest floor: what every other package may import. It imports no torch."""
